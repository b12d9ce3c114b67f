"""Complaints about models of this kind, each tried on ours as its users meet it: loaded by transformers' Auto classes.

A test has the name of its complaint and passes where the complaint does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, pipeline

from cache_cases import ids_of, left_padded
from lol import LoLForCausalLM, record_paths
from model_cases import PADDING_ID, VOCABULARY, Spec, make_model

W = 4
SPEC = Spec(8, 2, 1, 1, 3, 3, W, W // 2)
LENGTHS = [11, 4, 8]
COLUMNS = max(LENGTHS)
NEW = 3 * W + 1
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PADDING_ID}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
LOW_PRECISION = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with random parameters and a bias that no narrower dtype can hold."""
    return save(make_model(SPEC, 0).float(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> LoLForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder)


def save(model: LoLForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def noisy(mask: Tensor, seed: int) -> Tensor:
    """The same tokens for every seed, and other ids at padding."""
    return torch.where(mask > 0, ids_of(*mask.shape), ids_of(*mask.shape, seed=seed))


# --- Padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_attention_mask_ignored_with_padding(model: LoLForCausalLM, side: str):
    mask = left_padded(LENGTHS) if side == "left" else left_padded(LENGTHS).flip(1)
    output = model(noisy(mask, 1), attention_mask=mask)
    for row in range(len(LENGTHS)):
        place = mask[row] > 0
        alone = model(ids_of(*mask.shape)[row : row + 1, place])
        assert_close(output.logits[row, place], alone.logits[0], **CLOSE)
        own = output.routing.experts[row, :, : alone.routing.experts.shape[2]]
        assert torch.equal(own, alone.routing.experts[0])
    # And padding is what the mask says, not what an id says.
    assert not torch.allclose(model(noisy(mask, 1)).logits[1, -1], output.logits[1, -1])


@pytest.mark.parametrize("chunk", [1, W, W + 1])
def test_padding_leaks_on_chunked_prefill(model: LoLForCausalLM, chunk: int):
    """Some chunks are nothing but padding in some rows."""
    mask = left_padded(LENGTHS)
    given = GREEDY | {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    outputs = [model.generate(noisy(mask, seed), prefill_chunk_size=chunk, **given) for seed in (1, 2)]
    assert torch.equal(outputs[0].sequences[:, COLUMNS:], outputs[1].sequences[:, COLUMNS:])
    for row, length in enumerate(LENGTHS):
        text = outputs[0].sequences[row : row + 1, COLUMNS - length :]
        wanted = model(text).logits[0, length - 1 : -1]
        assert_close(torch.stack(outputs[0].logits)[:, row], wanted, **CLOSE)


@pytest.mark.slow
def test_a_batch_of_a_pipeline_writes_other_text_than_its_prompts_alone(trained: Path):
    checkpoint = str(newest(trained))
    write = pipeline("text-generation", model=checkpoint, tokenizer=checkpoint)
    assert write.tokenizer.pad_token_id is not None
    write.tokenizer.padding_side = "left"
    prompts = ["library", "path of a depth", "the router, ", "b"]
    greedy = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
    alone = [write(prompt, **greedy)[0]["generated_text"] for prompt in prompts]
    together = write(prompts, batch_size=len(prompts), **greedy)
    assert [texts[0]["generated_text"] for texts in together] == alone
    assert len(set(alone)) > 1


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)


# --- Decoding with a cache --------------------------------------------------------------------------------------------


def test_text_turns_to_garbage_two_tokens_into_cached_decoding(model: LoLForCausalLM):
    ids = ids_of(3, 6)
    given = GREEDY | {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, **given)
    assert output.cache.get_seq_length() == 6 + NEW - 1
    whole = model(output.sequences).logits[:, 5:-1]
    assert_close(torch.stack(output.logits, dim=1), whole, **CLOSE)


def test_one_token_at_a_time_without_its_cache_writes_wrong_text(model: LoLForCausalLM):
    """transformers hands over one token and the keyword `cache`; one that takes another loses the past."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _module, _args, given: seen.append((given["input_ids"].shape[1], given["cache"].get_seq_length())),
        with_kwargs=True,
    )
    text = model.generate(ids_of(1, 6), attention_mask=torch.ones(1, 6, dtype=torch.long), **GREEDY)
    handle.remove()
    assert seen == [(6, 0)] + [(1, 6 + step) for step in range(NEW - 1)]
    for end in range(6, 6 + NEW):
        assert int(model(text[:, :end]).logits[0, -1].argmax()) == int(text[0, end])


def test_beam_reorder_skipped(model: LoLForCausalLM):
    mask = left_padded(LENGTHS)
    given = GREEDY | {"attention_mask": mask, "num_beams": 4, "return_dict_in_generate": True}
    cached, again = (model.generate(noisy(mask, 1), use_cache=use_cache, **given) for use_cache in (True, False))
    assert torch.equal(cached.sequences, again.sequences)
    assert_close(cached.sequences_scores, again.sequences_scores, **CLOSE)
    # Rows of the cache had to move: the winner's ancestors were other beams than itself.
    assert (cached.beam_indices.diff() != 0).any()


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that nothing was written to holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def test_non_persistent_buffers_uninitialised_after_load(model: LoLForCausalLM, folder: Path):
    """20 reloads, the first few of them in poisoned memory, all built on the meta device as transformers does."""
    ids = ids_of(2, COLUMNS)
    wanted = model(ids).logits
    for reload in range(20):
        if reload < 10:
            with poisoned_memory():
                loaded = AutoModelForCausalLM.from_pretrained(folder)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(folder)
        for (name, tensor), (_, original) in zip(tensors(loaded), tensors(model), strict=True):
            assert torch.equal(tensor, original), name
        assert torch.equal(loaded(ids).logits, wanted)
    assert {name for name, _ in model.named_buffers()} <= set(model.state_dict())


def tensors(model: LoLForCausalLM) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def test_tied_head_corrupts_safetensors(tmp_path: Path):
    spec = Spec(**(vars(SPEC) | {"tie_word_embeddings": True}))
    ids = ids_of(2, COLUMNS)
    model = AutoModelForCausalLM.from_pretrained(save(make_model(spec, 0).float(), tmp_path / "first"))
    wanted = model(ids).logits
    stored = load_file(tmp_path / "first" / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert torch.equal(stored["model.embed_tokens.weight"], model.lm_head.weight)

    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    loaded = AutoModelForCausalLM.from_pretrained(save(model, tmp_path / "second"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.config.vocab_size == loaded.lm_head.out_features == VOCABULARY + 3
    assert_close(loaded(ids).logits[..., :VOCABULARY], wanted, **CLOSE)
    loaded(ids, labels=ids).loss.backward()
    with torch.no_grad():
        loaded.model.embed_tokens.weight -= loaded.model.embed_tokens.weight.grad
    third = AutoModelForCausalLM.from_pretrained(save(loaded, tmp_path / "third"))
    assert torch.equal(third(ids).logits, loaded(ids).logits)
    assert not torch.allclose(third(ids).logits[..., :VOCABULARY], wanted)


# --- The router -------------------------------------------------------------------------------------------------------


def test_router_logits_that_were_already_softmaxed(model: LoLForCausalLM):
    ids = ids_of(1, COLUMNS)
    logits = torch.cat(model(ids, output_router_logits=True).router_logits)
    used = logits.abs().sum(-1) > 0
    assert ((logits[used].sum(-1) - 1).abs() > 0.01).all()
    assert logits.min() < 0
    table = record_paths(model, ids.tolist())
    for line in table.itertuples():
        probabilities = torch.tensor(line.probabilities, dtype=torch.float32)
        assert_close(logits[line.depth, line.window].softmax(-1), probabilities, **CLOSE)
        assert line.weight == pytest.approx(float(probabilities[line.expert]), abs=1e-6)
    assert len(table) == int(used.sum())


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_the_bias_turned_bf16(model: LoLForCausalLM, folder: Path, tmp_path: Path, dtype: torch.dtype):
    """By a cast, by loading, by training under autocast, and on the way back to disk."""
    bias = load_file(folder / "model.safetensors")["model.expert_bias"]
    assert not torch.equal(bias, bias.to(dtype).float())
    cast = AutoModelForCausalLM.from_pretrained(folder)
    cast = cast.half() if dtype == torch.float16 else cast.bfloat16()
    moved = AutoModelForCausalLM.from_pretrained(folder).to(dtype)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.train()
    with torch.autocast("cpu", dtype):
        loss = model(ids_of(2, COLUMNS), labels=ids_of(2, COLUMNS)).loss
    loss.backward()
    for one in (cast, moved, loaded, model):
        assert one.model.expert_bias.dtype == torch.float32
        assert torch.equal(one.model.expert_bias, bias)
    assert all(one.lm_head.weight.dtype == dtype for one in (cast, moved, loaded))
    stored = load_file(save(loaded, tmp_path) / "model.safetensors")["model.expert_bias"]
    assert stored.dtype == torch.float32
    assert torch.equal(stored, bias)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_ties_of_a_narrow_dtype_flip_routes_between_train_and_eval(folder: Path, dtype: torch.dtype, autocast: bool):
    """Block 1 leads by what float32 can tell and `dtype` cannot, which would give the tie to block 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, router_noise_max=0.0)
    lead = 1e-5
    assert torch.tensor(1 / 3, dtype=dtype) + lead == torch.tensor(1 / 3, dtype=dtype)
    with torch.no_grad():
        model.model.router.weight.zero_()
        model.model.router.bias.zero_()
        model.model.expert_bias.copy_(torch.tensor([0.0, lead, 0.0]))
    ids = ids_of(2, COLUMNS)
    for training in (True, False):
        model.train(training)
        with torch.autocast("cpu", dtype, enabled=autocast), torch.set_grad_enabled(training):
            output = model(ids, output_router_logits=True)
        experts = output.routing.experts
        assert set(experts[experts >= 0].tolist()) == {1}
        assert output.routing.weights.dtype == output.router_logits[0].dtype == torch.float32


def test_packed_document_b_sees_a_also_in_routes(model: LoLForCausalLM):
    first, second = 7, 10
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    b = ids_of(1, second, seed=5)
    outputs = []
    for seed in range(3):
        packed = torch.cat([ids_of(1, first, seed=seed), b], dim=1)
        outputs.append(model(packed, position_ids=positions))
    alone = model(b)
    for output in outputs:
        assert_close(output.logits[:, first:], alone.logits, **CLOSE)
        for depth in range(SPEC.num_routed_depths):
            own = output.routing.experts[0, depth][output.routing.documents[0, depth] == 1]
            wanted = alone.routing.experts[0, depth]
            assert torch.equal(own, wanted[wanted >= 0])
    # The documents in front did differ, in their routes too.
    assert not torch.equal(outputs[0].routing.experts, outputs[1].routing.experts)


def test_a_score_that_moves_with_the_batch_size(model: LoLForCausalLM):
    """Texts of very different lengths are scored in batches of 1, 3 and 8."""
    lengths = [3, 17, 1 + W, 9, 2, 30, 2 * W, 12]
    texts = [ids_of(1, length, seed=length) for length in lengths]
    scores, routes = {}, {}
    for size in (1, 3, 8):
        scores[size], routes[size] = [], []
        for start in range(0, len(texts), size):
            batch = texts[start : start + size]
            mask = left_padded([text.shape[1] for text in batch])
            padded = [torch.nn.functional.pad(text, (mask.shape[1] - text.shape[1], 0)) for text in batch]
            ids = torch.cat(padded)
            output = model(ids, attention_mask=mask)
            for row, text in enumerate(batch):
                logs = output.logits[row, -text.shape[1] : -1].log_softmax(-1)
                scores[size].append(logs.gather(-1, text[0, 1:, None]).sum())
                experts = output.routing.experts[row]
                routes[size].append(experts[experts >= 0].tolist())
    for size in (3, 8):
        assert routes[size] == routes[1]
        assert_close(torch.stack(scores[size]), torch.stack(scores[1]), **CLOSE)
