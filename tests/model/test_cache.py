"""What is decoded with a cache is what one pass over the whole text computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from cache_cases import (
    EQUAL,
    W,
    check_equal,
    ids_of,
    in_chunks,
    is_decided,
    padded,
    put_together,
    small,
    states,
)
from model_cases import Spec, assume_decided, bounded, compare, make_model, specs
from oracle import core_windows, document_forward

pytestmark = pytest.mark.usefixtures("no_gradients")

LENGTHS = [35, 20, 29, 3]


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
