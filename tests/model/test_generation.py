"""`generate`: greedy, sampled and beam-searched text, padded batches, paths and router-only tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lol import LoLForCausalLM, UserError
from model_cases import PADDING_ID, VOCABULARY, Spec, make_model

SPEC = Spec(8, 2, 1, 1, 3, 3, 4, 2)
PROMPT = 7
NEW = 8


@pytest.fixture
def model() -> LoLForCausalLM:
    return make_model(SPEC, 0)


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def greedy_by_loop(model: LoLForCausalLM, ids: Tensor, steps: int = NEW, **inputs) -> Tensor:
    for _ in range(steps):
        following = model(ids, **inputs).logits[:, -1].argmax(-1)
        ids = torch.cat((ids, following[:, None]), dim=1)
    return ids


def test_greedy_generation(model: LoLForCausalLM):
    ids = ids_of(2, PROMPT)
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(text, greedy_by_loop(model, ids))


def test_a_left_padded_batch_generates_what_its_rows_generate(model: LoLForCausalLM):
    rows = [ids_of(1, length, seed=length) for length in (7, 3, 5)]
    padded = torch.cat([torch.nn.functional.pad(row, (7 - row.shape[1], 0), value=PADDING_ID) for row in rows])
    mask = torch.tensor([[column >= 7 - row.shape[1] for column in range(7)] for row in rows]).long()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PADDING_ID}
    together = model.generate(padded, attention_mask=mask, **options)
    for row, text in zip(rows, together, strict=True):
        alone = model.generate(row, attention_mask=torch.ones_like(row), **options)
        assert torch.equal(text[7 - row.shape[1] :], alone[0])


def test_samples_repeat_with_their_seed(model: LoLForCausalLM):
    def sample(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model.generate(ids_of(1, PROMPT), max_new_tokens=12, do_sample=True, num_return_sequences=3)

    first = sample(1)
    assert first.shape == (3, PROMPT + 12)
    assert torch.equal(sample(1), first)
    assert not torch.equal(sample(2), first)
    assert not torch.equal(first[0], first[1])


def test_the_end_of_a_document_ends_the_text(model: LoLForCausalLM):
    ids = ids_of(1, PROMPT)
    third = int(greedy_by_loop(model, ids)[0, PROMPT + 2])
    text = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=third,
        pad_token_id=0,
    )
    assert int(text[0, -1]) == third
    assert text.shape[1] <= PROMPT + 3


def probability_of(model: LoLForCausalLM, ids: Tensor, **inputs) -> Tensor:
    """Log-probability of everything after the prompt, per row."""
    logs = model(ids, **inputs).logits.double().log_softmax(-1)[:, PROMPT - 1 : -1]
    return logs.gather(-1, ids[:, PROMPT:, None]).sum((1, 2))


@pytest.mark.parametrize("path", [None, [2, 0, 1]], ids=["free", "forced"])
def test_beams_as_wide_as_all_texts_find_the_most_probable(model: LoLForCausalLM, path: list[int] | None):
    """Two new tokens, and a beam for each first one: the search is exhaustive."""
    ids = ids_of(2, PROMPT)
    steering = {} if path is None else {"path": path}
    beams = model.generate(ids, max_new_tokens=2, do_sample=False, num_beams=VOCABULARY, **steering)
    pairs = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))
    for row in range(2):
        every = torch.cat((ids[row].expand(len(pairs), -1), pairs), dim=1)
        assert torch.equal(beams[row], every[probability_of(model, every, **steering).argmax()])


def rows_of_paths() -> Tensor:
    """(2, D, windows) with other blocks for every row; the last window stays free."""
    return torch.tensor([[[0, 1, -1], [2, 2, -1], [1, 0, -1]], [[1, 1, -1], [0, 2, -1], [2, 2, -1]]])


@pytest.mark.parametrize(
    "path",
    [[2, 0, 1], torch.tensor([2, 0, 1]), torch.tensor([[2], [0], [1]]), rows_of_paths(), rows_of_paths().tolist()],
    ids=["list", "depths", "depths and windows", "rows", "list of rows"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "several beams", "samples"],
)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "again"])
def test_generation_on_a_path(model: LoLForCausalLM, path: list | Tensor, options: dict, use_cache: bool):
    """Every forward pass of a batch that was multiplied runs, in each row, the path of the row it came from."""
    ids = ids_of(2, PROMPT)
    seen = []
    handle = model.register_forward_hook(lambda _module, _args, output: seen.append(output.routing))
    torch.manual_seed(0)
    options = {"do_sample": False, "use_cache": use_cache} | options
    model.generate(ids, max_new_tokens=NEW, path=path, **options)
    handle.remove()
    copies = options.get("num_beams", options.get("num_return_sequences", 1))
    shaped = torch.as_tensor(path)
    shaped = shaped if shaped.ndim == 3 else shaped.reshape(1, 3, 1)
    given = shaped.expand(2, 3, -1).repeat_interleave(copies, dim=0)
    assert len(seen) == NEW
    checked = 0
    for routing in seen:
        own = routing.experts
        assert own.shape[0] == 2 * copies
        number = routing.first_window[..., None] + torch.arange(own.shape[2])
        if given.shape[2] == 1:
            wanted = given.expand_as(own)
        else:
            wanted = given.gather(2, number.clamp(max=2)).masked_fill(number > 2, -1)
        forced = (wanted >= 0) & (own >= 0)
        checked += int(forced.sum())
        assert torch.equal(own[forced], wanted[forced])
    # A path of windows names the two of the prompt, and no more.
    assert checked >= 2 * copies * 3 * (NEW if given.shape[2] == 1 else 2)


def test_greedy_text_on_a_path_is_that_of_the_forced_model(model: LoLForCausalLM):
    ids = ids_of(2, PROMPT)
    free = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    forced = model.generate(ids, max_new_tokens=NEW, do_sample=False, path=[2, 0, 1])
    assert torch.equal(forced, greedy_by_loop(model, ids, path=[2, 0, 1]))
    assert not torch.equal(forced, free)


def test_windows_that_a_path_does_not_name_stay_free(model: LoLForCausalLM):
    """The path names a window that is still to come, but not the last ones of the text."""
    ids, new = ids_of(2, PROMPT), 15
    path = torch.tensor([[2, 2, 1, 0, 2], [0, 1, -1, 2, 1], [1, 0, -1, 2, 0]])
    grown, unnamed = ids, set()
    for _ in range(new):
        width = model.config.windows_in(grown.shape[1])
        padded = torch.nn.functional.pad(path[:, :width], (0, max(0, width - 5)), value=-1)
        output = model(grown, path=padded)
        unnamed |= set(output.routing.experts[..., 5:].flatten().tolist()) - {-1}
        grown = torch.cat((grown, output.logits[:, -1].argmax(-1)[:, None]), dim=1)
    assert len(unnamed) > 1
    assert torch.equal(model.generate(ids, max_new_tokens=new, do_sample=False, path=path), grown)


def test_generation_refuses_a_path_that_does_not_fit(model: LoLForCausalLM):
    with pytest.raises(UserError, match="path has 2 depths, but 3 are run"):
        model.generate(ids_of(1, PROMPT), max_new_tokens=2, path=[0, 1])
    with pytest.raises(UserError, match="path has 2 rows, but the batch has 3"):
        model.generate(ids_of(3, PROMPT), max_new_tokens=2, path=rows_of_paths(), num_beams=2)
    with pytest.raises(UserError, match="path must have shape"):
        model.generate(ids_of(1, PROMPT), max_new_tokens=2, path=[[[[0]]]])


def test_router_only_tokens_hold_while_the_text_grows():
    model = make_model(SPEC, 0, router_only_tokens=True)
    ids = ids_of(2, PROMPT)
    hidden = torch.full_like(ids, -1)
    hidden[:, 0] = torch.tensor([3, 4])
    grown = ids
    for _ in range(NEW):
        following = model(
            grown, router_only_ids=torch.nn.functional.pad(hidden, (0, grown.shape[1] - PROMPT), value=-1)
        ).logits[:, -1]
        grown = torch.cat((grown, following.argmax(-1)[:, None]), dim=1)
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False, router_only_ids=hidden)
    assert torch.equal(text, grown)
    assert not torch.equal(text, model.generate(ids, max_new_tokens=NEW, do_sample=False))
