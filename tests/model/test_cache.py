"""What is decoded with a cache is what one pass over the whole text computes."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from cache_cases import (
    EQUAL,
    check_equal,
    ids_of,
    in_chunks,
    is_decided,
    left_padded,
    put_together,
    routed_layers,
    same_states,
    states,
)
from lol import LoLConfig, LoLForCausalLM, UserError
from lol.model.cost import core_cache_bytes
from model_cases import PADDING_ID, VOCABULARY, Spec, assume_decided, bounded, compare, make_model, specs
from oracle import core_windows, document_forward

W = 8
SPEC = Spec(8, 2, 1, 1, 3, 3, W, W // 2)
LENGTHS = [35, 20, 29, 3]


def small(seed: int = 0, router_only_tokens: bool = False, **changes) -> LoLForCausalLM:
    """A float32 model without parameters that are the same at start."""
    return make_model(Spec(**(vars(SPEC) | changes)), seed, router_only_tokens).float()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def padded(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    mask = left_padded(lengths)
    return ids_of(*mask.shape, seed=seed), mask


# --- Equality -------------------------------------------------------------------------------------------------------

VARIANTS = {
    "half stride": {},
    "no stride": {"window_stride": 0},
    "a stride that does not divide": {"window_stride": 3},
    "full": {"core_attention": "full"},
    "sliding": {"core_attention": "sliding"},
    "film, injection, routers of their own": {
        "depth_film": True,
        "input_injection": "diagonal",
        "tie_router": False,
        "balance_scope": "depth",
    },
    "core only": {"num_prelude_layers": 0, "num_coda_layers": 0, "tie_word_embeddings": True},
    "fixed": {"routing": "fixed", "fixed_path": (2, 0, 1)},
}


# The quick tier takes the first of them, and ragged rows alone.
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] * (place > 0)) for place, name in enumerate(VARIANTS)]
)
@pytest.mark.parametrize(
    "lengths", [pytest.param([35], marks=pytest.mark.slow), LENGTHS], ids=["one row", "left-padded rows"]
)
def test_chunks_are_one_pass(variant: str, lengths: list[int]):
    model = small(**VARIANTS[variant])
    ids, mask = padded(lengths)
    full = model(ids, attention_mask=mask, output_router_logits=True)
    assert full.routing.experts.shape[2] > 3 or model.config.core_window is None
    for size in (1, W - 1, W, W + 1, 13, 35):
        given = None if len(lengths) == 1 else mask
        check_equal(in_chunks(model, ids, [size], given), full, mask)


@st.composite
def texts(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Tokens, a mask with padding on either side and in holes, sizes of chunks, and noise to stand under padding."""
    columns = draw(st.integers(2, 26))
    rows = draw(st.integers(1, 4))
    mask = torch.zeros(rows, columns, dtype=torch.long)
    # A pass needs a token in some row.
    mask[draw(st.integers(0, rows - 1))] = 1
    for row in range(rows):
        if mask[row].all():
            continue
        if draw(st.booleans()):
            start = draw(st.integers(0, columns - 1))
            mask[row, start : draw(st.integers(start + 1, columns))] = 1
        else:
            mask[row] = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=columns, max_size=columns)))
            mask[row, draw(st.integers(0, columns - 1))] = 1
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    ids = ids_of(rows, columns, seed=draw(st.integers(0, 99)))
    return ids, mask, sizes, torch.randint_like(ids, -5, 99)


@st.composite
def paths(draw: st.DrawFn, batch: int, depths: int, windows: int, experts: int) -> Tensor | None:
    shape = draw(st.sampled_from([None, (depths,), (depths, 1), (depths, windows), (batch, depths, windows)]))
    seed = draw(st.integers(0, 99))
    return None if shape is None else torch.randint(-1, experts, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@bounded(60)
@given(spec=specs(), text=texts(), data=st.data())
def test_any_model_any_padding_any_chunks(spec: Spec, text: tuple, data: st.DataObject):
    ids, mask, sizes, noise = text
    if data.draw(st.integers(0, 4)) == 0:
        blocks = torch.randint(0, spec.num_experts, (spec.num_routed_depths,)).tolist()
        spec = Spec(**(vars(spec) | {"routing": "fixed", "fixed_path": tuple(blocks)}))
    hides = spec.routing == "learned" and data.draw(st.booleans())
    model = make_model(spec, data.draw(st.integers(0, 99)), router_only_tokens=hides).float()
    batch, width = ids.shape[0], model.config.windows_in(int(mask.sum(1).max()))
    path = data.draw(paths(batch, spec.num_routed_depths, width, spec.num_experts))
    given = {} if path is None else {"path": path, "path_weight": data.draw(st.sampled_from([None, 0.5]))}
    if hides:
        hidden = torch.full_like(ids, -1)
        at = data.draw(st.integers(0, min(sizes[0], ids.shape[1]) - 1))
        hidden[:, at] = torch.where(mask[:, at] > 0, ids[:, at], 99)
        given["router_only_ids"] = hidden
    full = model(ids, attention_mask=mask, output_router_logits=True, **given)
    assume(is_decided(model, full))
    dirty = torch.where(mask > 0, ids, noise)
    together = in_chunks(model, dirty, sizes, mask.bool() if data.draw(st.booleans()) else mask, **given)
    check_equal(together, full, mask)


@pytest.mark.slow
@bounded(25)
@given(
    spec=specs(core_attention="windowed"), lengths=st.lists(st.integers(1, 17), min_size=1, max_size=3), data=st.data()
)
def test_chunks_are_the_oracle(spec: Spec, lengths: list[int], data: st.DataObject):
    model = make_model(spec, data.draw(st.integers(0, 99)))
    ids, mask = padded(lengths, data.draw(st.integers(0, 99)))
    together = in_chunks(model, ids, data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)), mask)
    for row, length in enumerate(lengths):
        columns = slice(mask.shape[1] - length, None)
        result = document_forward(spec, model.state_dict(), ids[row, columns].tolist(), depth=spec.num_routed_depths)
        assume_decided(spec, model.state_dict(), result)
        spans = [slice(0, len(core_windows(spec, length, depth))) for depth in range(spec.num_routed_depths)]
        compare(together, result, row, spans, columns)


@pytest.mark.parametrize("size", [1, 5])
def test_a_row_does_not_see_its_batch(size: int):
    model = small()
    lengths = [35, 20, 29, 3, 16, 8, 33, 9]
    ids, mask = padded(lengths)
    full = in_chunks(model, ids, [size], mask)
    for count in (1, 3):
        part = slice(4, 4 + count)
        columns = slice(35 - max(lengths[part]), None)
        fewer = in_chunks(model, ids[part, columns], [size], mask[part, columns])
        real = mask[part, columns].bool()
        assert_close(fewer.logits[real], full.logits[part, columns][real], **EQUAL)
        windows = fewer.routing.experts.shape[2]
        assert torch.equal(fewer.routing.experts, full.routing.experts[part, :, :windows])


def test_embeddings_are_ids():
    model = small()
    ids, mask = padded(LENGTHS)
    full = model(ids, attention_mask=mask, output_router_logits=True)
    check_equal(in_chunks(model, ids, [5], mask, embeds=True), full, mask)


def test_positions_may_be_given():
    model = small()
    ids, mask = padded(LENGTHS)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    outputs = [
        model(ids[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part], cache=cache)
        for part in (slice(0, 13), slice(13, 35))
    ]
    check_equal(put_together(outputs), model(ids, attention_mask=mask), mask)


def test_a_path_counts_windows_of_rows_that_pause():
    """The longest row may hold no token of a pass; a path still has its width."""
    model = small()
    ids, mask = ids_of(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, 20:] = 0
    mask[1, :18] = 0
    path = torch.randint(0, 3, (2, 3, model.config.windows_in(20)))
    full = model(ids, attention_mask=mask, path=path, output_router_logits=True)
    check_equal(in_chunks(model, ids, [20, 10], mask, path=path), full, mask)


def test_sixty_windows_lose_no_precision():
    model = small()
    ids = ids_of(1, 60 * W)
    full = model(ids, output_router_logits=True)
    assert is_decided(model, full)
    check_equal(in_chunks(model, ids, [5]), full)


def test_bfloat16_takes_the_same_routes():
    """The projections of a chunk round as they do in one pass; sums and routing are float32."""
    model = small().bfloat16()
    ids, mask = padded([35, 29])
    full = model(ids, attention_mask=mask, output_router_logits=True)
    exact = small()(ids, attention_mask=mask)
    rounding = (full.logits.float() - exact.logits)[mask.bool()].abs().max()
    for size in (1, 7):
        cache = DynamicCache(config=model.config)
        together = in_chunks(model, ids, [size], mask, cache)
        assert torch.equal(together.routing.experts, full.routing.experts)
        assert (together.logits - full.logits)[mask.bool()].float().abs().max() <= rounding
        assert {rows.keys.dtype for rows in states(cache)} == {torch.bfloat16}
        assert {rows.earlier_sum.dtype for rows in states(cache)} == {torch.float32}


def test_autocast():
    model = small()
    ids, mask = padded([35, 29])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        full = model(ids, attention_mask=mask)
        together = in_chunks(model, ids, [5], mask)
    assert torch.equal(together.routing.experts, full.routing.experts)
    assert_close(together.logits[mask.bool()].float(), full.logits[mask.bool()].float(), atol=0.1, rtol=0.1)


# --- Gradients and modes --------------------------------------------------------------------------------------------


def test_gradients_flow_through_the_cache():
    model = small()
    ids = ids_of(2, 21)
    with torch.enable_grad():
        in_chunks(model, ids, [6, 10]).logits.square().sum().backward()
        own = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        model(ids).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert own[name] is None, name
            continue
        scale = parameter.grad.abs().max()
        assert (own[name] - parameter.grad).abs().max() <= 1e-4 * scale, name


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.no_grad])
def test_a_cache_passes_from_mode_to_mode(first: type, second: type):
    model = small()
    ids, cache = ids_of(2, 21), DynamicCache(config=model.config)
    with first():
        before = in_chunks(model, ids[:, :10], [3], cache=cache)
    with second():
        after = in_chunks(model, ids[:, 10:], [3], cache=cache)
    full = model(ids)
    assert_close(torch.cat([before.logits, after.logits], dim=1), full.logits, **EQUAL)


def test_a_pass_without_gradients_writes_in_place():
    model = small()
    cache = DynamicCache(config=model.config)
    in_chunks(model, ids_of(1, 3), [1], cache=cache)
    kept = [rows.keys.data_ptr() for rows in states(cache)]
    model(ids_of(1, 1), cache=cache)
    assert [rows.keys.data_ptr() for rows in states(cache)] == kept


# --- Going back -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["windowed", "full", "sliding"])
def test_crop_by_every_length(attention: str):
    """Also with rows that pause in what is cropped, and with what is cropped being other text."""
    model = small(core_attention=attention)
    ids, mask = padded([30, 17, 24])
    mask[2, 15:19] = 0
    full = model(ids, attention_mask=mask, output_router_logits=True)
    for remove in range(20):
        cache = DynamicCache(config=model.config)
        in_chunks(model, ids[:, :10], [4], mask, cache)
        cache.activate_past_recording()
        begun = ids.clone()
        begun[:, 29 - remove :] = ids_of(3, 1 + remove, seed=7)
        for start, end in ((10, 11), (11, 20), (20, 29)):
            model(begun[:, start:end], attention_mask=mask[:, :end], cache=cache)
        cache.crop(-remove)
        end = 29 - remove
        assert cache.get_seq_length() == end
        assert {layer.get_seq_length() for layer in cache.layers} == {end}
        again = DynamicCache(config=model.config)
        in_chunks(model, ids[:, :end], [end], mask, again)
        same_states(states(cache), states(again))
        rest = model(ids[:, end:], attention_mask=mask, cache=cache)
        real = mask[:, end:].bool()
        assert_close(rest.logits[real], full.logits[:, end:][real], **EQUAL)


def test_recording_is_bounded_by_the_crops():
    """Decoding that crops at every step, as assisted decoding does, keeps one step's past."""
    model = small()
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for step in range(6):
        model(ids_of(1, 5, seed=step), cache=cache)
        assert all(len(layer._log) == 1 for layer in routed_layers(cache))
        cache.crop(-(step % 3))
        assert not any(layer._log for layer in routed_layers(cache))
    with pytest.raises(UserError, match=r"cannot forget 1 tokens.*crop them at once"):
        routed_layers(cache)[0].crop(-1)


def test_a_crop_of_what_was_not_recorded_is_refused():
    model = small(num_prelude_layers=0)
    ids, cache = ids_of(2, 25), DynamicCache(config=model.config)
    in_chunks(model, ids[:, :13], [5], cache=cache)
    with pytest.raises(UserError, match=r"cannot forget 3 tokens.*call cache.activate_past_recording\(\) before"):
        cache.crop(-3)
    with pytest.raises(UserError, match="as a negative number, not 4"):
        cache.crop(4)
    # Nothing has changed.
    cache.activate_past_recording()
    model(ids[:, 13:15], cache=cache)
    with pytest.raises(UserError, match="cannot forget 3 tokens"):
        cache.crop(-3)
    assert_close(model(ids[:, 15:], cache=cache).logits, model(ids).logits[:, 15:], **EQUAL)


def test_a_cache_whose_layers_disagree_is_refused():
    """transformers crops layer after layer: those before the core have forgotten when the core refuses."""
    model = small()
    ids, cache = ids_of(2, 25), DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    in_chunks(model, ids[:, :13], [5], cache=cache)
    with pytest.raises(UserError, match="cannot forget 3 tokens"):
        cache.crop(-3)
    with pytest.raises(UserError, match="a refused crop leaves behind: make a new cache"):
        model(ids[:, 10:], attention_mask=mask, cache=cache)


# --- Rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 6])
def test_rows_move(size: int):
    """Reordered, picked by number and by mask, repeated: each row goes on from its own past."""
    model = small()
    ids, mask = padded([22, 9, 17])
    cut = 13

    def go_on(cache: DynamicCache, rows: list[int]) -> None:
        full = model(ids[rows], attention_mask=mask[rows])
        after = []
        for start in range(cut, 22, size):
            end = min(start + size, 22)
            after.append(model(ids[rows, start:end], attention_mask=mask[rows, :end], cache=cache).logits)
        assert_close(torch.cat(after, dim=1), full.logits[:, cut:], **EQUAL)

    def begun() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        in_chunks(model, ids[:, :cut], [5], mask[:, :cut], cache)
        return cache

    cache = begun()
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    go_on(cache, [2, 0, 2])
    cache = begun()
    cache.batch_select_indices(torch.tensor([2, 1]))
    go_on(cache, [2, 1])
    cache = begun()
    cache.batch_select_indices(torch.tensor([True, False, True]))
    go_on(cache, [0, 2])
    cache = begun()
    cache.batch_repeat_interleave(2)
    go_on(cache, [0, 0, 1, 1, 2, 2])
    cache = begun()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert core_bytes(cache) == 0
    check_equal(in_chunks(model, ids, [6], mask, cache), model(ids, attention_mask=mask), mask)


def test_copies_of_a_cache_part_ways():
    model = small()
    ids, cache = ids_of(2, 25), DynamicCache(config=model.config)
    in_chunks(model, ids[:, :13], [5], cache=cache)
    kept = [rows.select(torch.arange(2)) for rows in states(cache)]
    for layer in routed_layers(cache):
        layer.reorder_cache(torch.arange(2))
    model(ids[:, 13:20], cache=cache)
    assert all((a.position + 7 == b.position).all() for a, b in zip(kept, states(cache), strict=True))


# --- Memory ---------------------------------------------------------------------------------------------------------


def core_bytes(cache: DynamicCache) -> int:
    return sum(layer.num_bytes for layer in routed_layers(cache))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_core_keeps_what_is_predicted_however_long_the_text(dtype: torch.dtype, batch: int):
    model = small().to(dtype)
    cache, ids = DynamicCache(config=model.config), ids_of(batch, 2000)
    for end in (1, W, 2000):
        model(ids[:, cache.get_seq_length() : end], cache=cache)
        assert core_bytes(cache) == core_cache_bytes(model.config, batch, dtype)
    # The tensors are all that is kept: no view holds a larger one alive.
    for rows in states(cache):
        assert rows.keys.untyped_storage().nbytes() == rows.keys.nbytes
        assert rows.running_sum.untyped_storage().nbytes() == rows.running_sum.nbytes
    assert cache.layers[0].keys.shape[2] == 2000


def test_the_core_at_32768_tokens_is_the_core_at_one_window():
    model = small(num_prelude_layers=0, num_coda_layers=0)
    cache, ids = DynamicCache(config=model.config), ids_of(1, 32_768)
    model(ids[:, :W], cache=cache)
    after_one = core_bytes(cache)
    in_chunks(model, ids[:, W:], [4096], cache=cache)
    model(ids[:, -1:], cache=cache)
    assert cache.get_seq_length() == 32_769
    assert core_bytes(cache) == after_one == core_cache_bytes(model.config, 1, torch.float32)


def test_full_attention_has_no_bound_to_predict():
    with pytest.raises(UserError, match="'full' keeps every token"):
        core_cache_bytes(LoLConfig(core_attention="full"), 1, torch.float32)
    model = small(core_attention="full")
    cache = DynamicCache(config=model.config)
    model(ids_of(1, 100), cache=cache)
    short = core_bytes(cache)
    model(ids_of(1, 100), cache=cache)
    assert core_bytes(cache) > short


# --- What is made, and what is refused -------------------------------------------------------------------------------


def test_a_cache_is_made_where_it_is_asked_for():
    model = small()
    ids = ids_of(2, 12)
    assert model(ids).cache is None
    first = model(ids[:, :7], use_cache=True)
    assert len(routed_layers(first.cache)) == 3
    assert first.cache.get_seq_length() == 7
    again = model(ids[:, 7:], cache=first.cache, return_dict=False)
    assert_close(again[0], model(ids).logits[:, 7:], **EQUAL)


TAIL = ids_of(2, 4, seed=3)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"attention_mask": torch.ones(2, 16, dtype=torch.long)},
            r"\[12, 12\] real tokens .* the cache holds \[12, 7\]",
        ),
        ({}, r"\[12, 12\] real tokens in the cached part, the cache holds \[12, 7\]: give the mask"),
        (
            {"input_ids": TAIL[:1], "attention_mask": torch.ones(1, 16, dtype=torch.long)},
            "holds 2 rows, the input has 1",
        ),
        ({"num_depths": 2}, "a cache holds all depths: leave num_depths out"),
        ({"path": [0, 1]}, "path has 2 depths"),
        ({"path": [[0, 1]] * 3}, "path has 2 windows, but the longest row has 3"),
        ({"router_only_ids": torch.tensor([[1, -1, -1, -1]] * 2)}, "part of it has passed: give them with the first"),
        ({"labels": TAIL}, "a loss needs the whole text"),
        ({"position_ids": torch.arange(4)[None]}, "packed rows cannot go on|go on where a cache ends"),
        ({"position_ids": torch.tensor([[12, 13, 0, 1]])}, "packed rows cannot go on from a cache"),
        ({"input_ids": TAIL + VOCABULARY}, "outside of the vocabulary"),
    ],
)
def test_what_cannot_go_on_is_refused_and_the_cache_stays_as_it_was(inputs: dict, message: str):
    model = small(router_only_tokens=True)
    ids, mask = padded([12, 7])
    cache = DynamicCache(config=model.config)
    in_chunks(model, ids, [5], mask, cache)
    whole = torch.cat([mask, torch.ones_like(TAIL)], dim=1)
    given = {"input_ids": TAIL} | ({"attention_mask": whole} if inputs else {}) | inputs
    with pytest.raises(UserError, match=message):
        model(**given, cache=cache)
    full = model(torch.cat([ids, TAIL], dim=1), attention_mask=whole)
    assert_close(model(TAIL, attention_mask=whole, cache=cache).logits, full.logits[:, 12:], **EQUAL)


def test_a_mask_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = small()
    cache = DynamicCache(config=model.config)
    model(ids_of(2, 12), cache=cache)
    with pytest.raises(
        UserError, match=r"shape \(2, 4\), the input \(2, 4\) after 12 in the cache: give one entry per"
    ):
        model(TAIL, attention_mask=torch.ones_like(TAIL), cache=cache)


def test_packed_rows_have_no_cache():
    model = small()
    with pytest.raises(UserError, match="packed rows cannot go on from a cache: give one document per row"):
        model(ids_of(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=True)


def test_a_cache_without_routed_layers_is_refused():
    model = small()
    for cache in (DynamicCache(), DynamicCache(config=small(num_routed_depths=2).config)):
        with pytest.raises(UserError, match=r"no routed layers: make it by DynamicCache\(config=model.config\)"):
            model(ids_of(1, 6), cache=cache)


def test_a_pass_of_padding_alone_is_refused():
    model = small()
    mask = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(UserError, match="no real token"):
        model(torch.full((2, 3), PADDING_ID), attention_mask=mask, use_cache=True)


def test_recomputation_has_no_cache():
    model = small()
    model.activation_checkpointing_enable()
    model.train()
    with pytest.raises(UserError, match="gradient checkpointing runs layers twice"):
        model(ids_of(1, 6), use_cache=True)


def test_a_routed_layer_is_filled_by_the_core_alone():
    layer = routed_layers(DynamicCache(config=small().config))[0]
    for fill in (layer.update, layer.lazy_initialization):
        with pytest.raises(UserError, match="fills its cache itself"):
            fill(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
