"""`generate` with a cache writes what it writes when every token re-runs the text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from cache_cases import ids_of, left_padded, routed_layers
from lol import LoLForCausalLM, UserError, force_path
from model_cases import PADDING_ID, Spec, make_model

W = 4
SPEC = Spec(8, 2, 1, 1, 3, 3, W, W // 2)
PROMPT = 7
NEW = 3 * W + 2
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PADDING_ID}
VARIANTS = {
    "half stride": {},
    "no stride": {"window_stride": 0},
    "a stride that does not divide": {"window_stride": 3},
    "full": {"core_attention": "full"},
    "fixed": {"routing": "fixed", "fixed_path": (2, 0, 1)},
}


def variant(name: str, seed: int = 0) -> LoLForCausalLM:
    """A float64 model: two ways to compute the same never differ in the most probable token."""
    return make_model(Spec(**(vars(SPEC) | VARIANTS[name])), seed)


@pytest.fixture
def model() -> LoLForCausalLM:
    return variant("half stride")


def padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    mask = left_padded(lengths)
    return torch.where(mask > 0, ids_of(*mask.shape), PADDING_ID), mask


def write(model: LoLForCausalLM, ids: Tensor, **options) -> Tensor:
    return model.generate(ids, **({"attention_mask": torch.ones_like(ids)} | GREEDY | options))


def both(model: LoLForCausalLM, ids: Tensor, **options) -> Tensor:
    """The text with a cache, which must be the text without."""
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        texts.append(write(model, ids, use_cache=use_cache, **options))
    assert torch.equal(*texts)
    return texts[0]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=["greedy", "beams", "several beams", "samples", "several samples"],
)
def test_the_cache_changes_no_text(name: str, options: dict):
    ids, mask = padded([PROMPT, 2, 5])
    text = both(variant(name), ids, attention_mask=mask, **options)
    assert text.shape == (3 * options.get("num_return_sequences", 1), PROMPT + NEW)


def test_a_mask_of_booleans_is_one_of_numbers(model: LoLForCausalLM):
    ids, mask = padded([PROMPT, 2, 5])
    text = both(model, ids, attention_mask=mask)
    assert torch.equal(write(model, ids, attention_mask=mask.bool()), text)


def test_rows_write_alone_what_they_write_together(model: LoLForCausalLM):
    lengths = [7, 2, 5, 6, 1, 3, 7, 4]
    ids, mask = padded(lengths)
    together = write(model, ids, attention_mask=mask)
    for rows in (slice(1, 2), slice(2, 5)):
        columns = slice(7 - max(lengths[rows]), None)
        fewer = write(model, ids[rows, columns], attention_mask=mask[rows, columns])
        assert torch.equal(fewer, together[rows, columns])


def test_only_new_tokens_run(model: LoLForCausalLM):
    seen = []
    handle = model.register_forward_hook(lambda _module, _args, output: seen.append(output.routing.load.sum().item()))
    write(model, ids_of(1, PROMPT))
    handle.remove()
    total = model(ids_of(1, PROMPT + NEW - 1)).routing.load.sum().item()
    assert sum(seen) == total


def test_an_old_cache_goes_on(model: LoLForCausalLM):
    """A turn of a conversation, more text from the user, the next turn."""
    ids, mask = padded([PROMPT, 3])
    cache = DynamicCache(config=model.config)
    first = write(model, ids, attention_mask=mask, cache=cache)
    longer = torch.cat([first, ids_of(2, 6, seed=9)], dim=1)
    whole = torch.cat([mask, torch.ones(2, NEW + 6, dtype=torch.long)], dim=1)
    second = write(model, longer, attention_mask=whole, cache=cache)
    assert torch.equal(second, both(model, longer, attention_mask=whole))
    assert cache.get_seq_length() == second.shape[1] - 1


def test_a_prompt_put_into_the_cache_beforehand(model: LoLForCausalLM):
    ids = ids_of(1, PROMPT + 6)
    cache = model(ids[:, :PROMPT], use_cache=True).cache
    assert torch.equal(write(model, ids, cache=cache), both(model, ids))


def test_the_cache_comes_back(model: LoLForCausalLM):
    ids = ids_of(1, PROMPT)
    output = write(model, ids, return_dict_in_generate=True)
    assert len(routed_layers(output.cache)) == 3
    longer = torch.cat([output.sequences, ids_of(1, 3)], dim=1)
    assert torch.equal(write(model, longer, cache=output.cache), both(model, longer))


# --- Prompts of embeddings --------------------------------------------------------------------------------------------


def write_embeds(model: LoLForCausalLM, ids: Tensor, **options) -> Tensor:
    """The new tokens of a prompt that is given as the embeddings of its ids, whatever stands at padding."""
    mask = options.get("attention_mask", torch.ones_like(ids))
    embeds = model.model.embed_tokens(ids).detach().masked_fill(mask[..., None] == 0, 7.0)
    torch.manual_seed(5)
    return model.generate(**(GREEDY | {"attention_mask": mask, "inputs_embeds": embeds} | options))


WINDOWS_OF_A_PATH = torch.tensor([[2, 1, 2, -1, 0, 1], [0, 2, -1, 1, 2, 2], [1, 1, 0, 0, -1, 2]])
STEERED = {
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "path": {"path": [2, 2, 0]},
    "path of windows": {"path": WINDOWS_OF_A_PATH},
    "paths of rows": {"path": torch.randint(-1, 3, (3, 3, 9)), "num_beams": 2},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [("half stride", {}), ("full", {}), *(("half stride", options) for options in STEERED.values())],
    ids=["greedy", "full attention", *STEERED],
)
def test_embeddings_write_what_their_ids_write(name: str, options: dict):
    model = variant(name)
    ids, mask = padded([PROMPT, 2, 5])
    given = options | {"attention_mask": mask}
    torch.manual_seed(5)
    wanted = write(model, ids, **given)[:, PROMPT:]
    assert wanted.shape[1] == NEW
    assert torch.equal(write_embeds(model, ids, **given), wanted)
    # Ids beside the embeddings come back in front of the new ones.
    beside = write_embeds(model, ids, input_ids=ids, **given)
    assert torch.equal(beside[:, PROMPT:], wanted)
    assert torch.equal(beside[:, :PROMPT], ids.repeat_interleave(beside.shape[0] // 3, dim=0))


def test_embeddings_are_not_forgotten_without_a_cache(model: LoLForCausalLM):
    """transformers reads them in the first pass alone, and decodes with a cache whatever it is asked for."""
    ids, mask = padded([PROMPT, 2])
    wanted = both(model, ids, attention_mask=mask)[:, PROMPT:]
    assert torch.equal(write_embeds(model, ids, attention_mask=mask, use_cache=False), wanted)


def test_embeddings_are_read_and_not_the_ids_beside_them(model: LoLForCausalLM):
    ids, other = ids_of(2, PROMPT), ids_of(2, PROMPT, seed=1)
    embeds = model.model.embed_tokens(other).detach()
    text = model.generate(ids, inputs_embeds=embeds, attention_mask=torch.ones_like(ids), **GREEDY)
    assert torch.equal(text[:, PROMPT:], write(model, other)[:, PROMPT:])
    assert not torch.equal(text[:, PROMPT:], write(model, ids)[:, PROMPT:])


def test_embeddings_without_a_mask_and_a_path_named_first(model: LoLForCausalLM):
    """transformers counts the rows of a prompt without ids by the first tensor that it was given."""
    ids, path = ids_of(2, PROMPT), torch.tensor([2, 0, 1])
    embeds = model.model.embed_tokens(ids).detach()
    text = model.generate(path=path, inputs_embeds=embeds, **GREEDY)
    assert torch.equal(text, write(model, ids, path=path)[:, PROMPT:])
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), write(model, ids)[:, PROMPT:])


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside ids"])
def test_router_only_tokens_hold_for_embeddings(beside: bool):
    model = make_model(SPEC, 0, router_only_tokens=True)
    ids, mask = padded([PROMPT, 3])
    hidden = torch.full_like(ids, -1)
    hidden[0, 0], hidden[1, 4] = 3, 4
    given = {"attention_mask": mask, "router_only_ids": hidden}
    wanted = write(model, ids, **given)[:, PROMPT:]
    text = write_embeds(model, ids, **given, **({"input_ids": ids} if beside else {}))
    assert torch.equal(text[:, -NEW:], wanted)
    assert not torch.equal(text[:, -NEW:], write_embeds(model, ids, attention_mask=mask))


@pytest.mark.parametrize("cached", [1, W, PROMPT + 5])
def test_embeddings_go_on_from_an_old_cache(model: LoLForCausalLM, cached: int):
    ids, mask = padded([PROMPT + 6, 14 - cached + 1])
    cache = model(ids[:, :cached], attention_mask=mask[:, :cached], use_cache=True).cache
    text = write_embeds(model, ids, attention_mask=mask, cache=cache)
    assert torch.equal(text, write(model, ids, attention_mask=mask)[:, ids.shape[1] :])


@pytest.mark.parametrize("chunk", [1, W, 2 * W + 1])
def test_a_prompt_in_chunks(chunk: int):
    """Router-only tokens and the windows of a path are those of the chunk."""
    model = make_model(SPEC, 0, router_only_tokens=True)
    ids = ids_of(2, PROMPT + 6)
    hidden = torch.full_like(ids, -1)
    hidden[:, 0] = torch.tensor([3, 4])
    given = {"router_only_ids": hidden, "path": torch.tensor([[2, 1, 2, -1, 0, 1]] * 3)}
    assert torch.equal(write(model, ids, prefill_chunk_size=chunk, **given), both(model, ids, **given))


def test_embeddings_that_do_not_fit(model: LoLForCausalLM):
    ids = ids_of(2, PROMPT)
    embeds = model.model.embed_tokens(ids).detach()
    with pytest.raises(UserError, match=r"one embedding per id, or leave the ids out"):
        model.generate(ids[:, 1:], inputs_embeds=embeds, **GREEDY)
    for beside in ({}, {"input_ids": ids}):
        with pytest.raises(UserError, match="prefill_chunk_size cuts ids"):
            write_embeds(model, ids, prefill_chunk_size=3, **beside)


# --- Drafts that are taken back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("drafted", [1, W + 1, 2 * W + 1])
def test_prompt_lookup(name: str, drafted: int):
    """The prompt repeats itself, so that drafts are found; few of their tokens are right."""
    model = variant(name)
    ids = ids_of(1, 5).repeat(1, 4)
    crops = count_crops(model)
    text = write(model, ids, prompt_lookup_num_tokens=drafted)
    assert torch.equal(text, both(model, ids))
    assert len(crops) > 0


@pytest.mark.parametrize("drafted", [1, 2 * W + 1])
@pytest.mark.parametrize("assistant", ["itself", "almost itself", "another"])
def test_assisted_decoding(model: LoLForCausalLM, assistant: str, drafted: int):
    """Drafts that are all right, right now and then, and hardly ever right."""
    helper = variant("half stride", 0 if assistant != "another" else 1)
    if assistant == "almost itself":
        with torch.no_grad():
            helper.lm_head.weight.add_(torch.randn_like(helper.lm_head.weight), alpha=0.1)
    helper.generation_config.num_assistant_tokens = drafted
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0.0
    crops = count_crops(model)
    # With an id for padding the helper takes that id in the text for padding.
    text = write(model, ids_of(1, PROMPT), assistant_model=helper, pad_token_id=None)
    assert torch.equal(text, both(model, ids_of(1, PROMPT)))
    assert (min(crops) == 0) if assistant == "itself" else (min(crops) < 0)


def count_crops(model: LoLForCausalLM) -> list[int]:
    """What `crop` is called with while the model decodes, seen at the first routed layer of the cache it is given."""
    crops: list[int] = []

    def watch(_module, _args, kwargs):
        layer = routed_layers(kwargs["cache"])[0] if kwargs.get("cache") is not None else None
        if layer is not None and "crop" not in vars(layer):
            crop = layer.crop
            layer.crop = lambda number: (crops.append(number), crop(number))[1]

    model.register_forward_pre_hook(watch, with_kwargs=True)
    return crops


# --- Steering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["half stride", "fixed"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    "path", [[2, 2, 0], [[0, 1, 2, 1, 0]] * 3, torch.randint(-1, 3, (2, 3, 9)).tolist()], ids=["D", "D K", "B D K"]
)
def test_paths_hold_with_a_cache(name: str, options: dict, path: list):
    ids, mask = padded([PROMPT, 3])
    model = variant(name)
    forced = both(model, ids, attention_mask=mask, path=torch.tensor(path), **options)
    assert not torch.equal(forced, both(model, ids, attention_mask=mask, **options))


@pytest.mark.parametrize("name", ["half stride", "fixed"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_windows_are_counted_from_the_beginning_of_the_text(name: str, options: dict):
    """`force_path` names windows of the row, not of the pass."""
    ids, mask = padded([PROMPT, 3])
    model = variant(name)
    given = {"attention_mask": mask} | options
    free = both(model, ids, **given)
    with force_path(model, [2, 1, 0], windows=[1, 3], weight=1):
        forced = both(model, ids, **given)
        seen = model(forced).routing.experts
    assert not torch.equal(forced, free)
    assert seen[0, :, [1, 3]].tolist() == [[2, 2], [1, 1], [0, 0]]
    path = torch.full((3, 4), -1)
    path[:, [1, 3]] = torch.tensor([[2], [1], [0]])
    assert torch.equal(forced, both(model, ids, path=path, path_weight=1.0, **given))


def test_forcing_knows_a_cache_that_is_older(model: LoLForCausalLM):
    ids = ids_of(1, 22)
    cache = model(ids[:, :9], use_cache=True).cache
    with force_path(model, [2, 1, 0], windows=[3]):
        routing = model(ids[:, 9:], cache=cache).routing
        alone = model.model(ids[:, :9], None, None, use_cache=True).routing
    for depth, block in enumerate([2, 1, 0]):
        assert routing.experts[0, depth, 3 - int(routing.first_window[0, depth])] == block
    path = torch.full((3, model.config.windows_in(22)), -1)
    path[:, 3] = torch.tensor([2, 1, 0])
    whole = model(ids, path=path).routing.experts
    for depth in range(3):
        first = int(routing.first_window[0, depth])
        own = routing.experts[0, depth][routing.experts[0, depth] >= 0]
        assert torch.equal(own, whole[0, depth, first : first + len(own)])
    assert torch.equal(alone.experts, model(ids[:, :9]).routing.experts)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_router_only_tokens_hold_with_a_cache(options: dict):
    model = make_model(SPEC, 0, router_only_tokens=True)
    ids, mask = padded([PROMPT, 3])
    hidden = torch.full_like(ids, -1)
    hidden[0, 0], hidden[1, 4] = 3, 4
    text = both(model, ids, attention_mask=mask, router_only_ids=hidden, **options)
    assert not torch.equal(text, both(model, ids, attention_mask=mask, **options))
    lookup = write(model, ids[:1], router_only_ids=hidden[:1], prompt_lookup_num_tokens=3)
    assert torch.equal(lookup, both(model, ids[:1], router_only_ids=hidden[:1]))


def test_a_router_only_token_comes_with_the_first_tokens():
    model = make_model(SPEC, 0, router_only_tokens=True)
    ids = ids_of(1, PROMPT)
    cache = model(ids[:, :3], use_cache=True).cache
    hidden = torch.full_like(ids, -1)
    hidden[0, 5] = 3
    with pytest.raises(UserError, match="give them with the first"):
        write(model, ids, router_only_ids=hidden, cache=cache)


# --- Low precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_text_stays_good_in_low_precision(dtype: torch.dtype):
    """The exact model finds every token of the text about as probable as its own choice there."""
    exact = variant("half stride")
    ids, mask = padded([PROMPT, 3])
    text = both(variant("half stride").to(dtype), ids, attention_mask=mask)
    whole = torch.nn.functional.pad(mask, (0, NEW), value=1)
    logits = exact(text, attention_mask=whole).logits[:, PROMPT - 1 : -1]
    lost = logits.max(-1).values - logits.gather(-1, text[:, PROMPT:, None])[..., 0]
    assert lost.max() < 0.2
    # Any other text loses more than that.
    assert (logits.max(-1, keepdim=True).values - logits).mean() > 1


@pytest.mark.parametrize("use_cache", [True, False])
def test_prompts_that_end_in_padding_are_refused(model: LoLForCausalLM, use_cache: bool):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    with pytest.raises(UserError, match="a row ends in padding: pad prompts on the left"):
        model.generate(ids_of(2, 6), attention_mask=mask, max_new_tokens=2, use_cache=use_cache)
