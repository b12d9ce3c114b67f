"""The library: grouped dispatch is a plain loop, attention in windows is a dense masked attention, recomputation is
invisible, and the work is done by as many operations whatever the number of tokens."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lol import LoLConfig, LoLForCausalLM
from lol.model import library as library_module
from lol.model.attention import AttentionShape, window_attention
from lol.model.grouped import grouped_linear
from lol.model.layers import Film, rotary_angles, rotate
from lol.model.library import Dispatch, Library
from lol.model.windows import WindowLayout, find_documents, lay_windows, line_up
from model_cases import Spec, bounded, make_batch, make_model

EXACT = {"atol": 1e-12, "rtol": 1e-12}
CPU = torch.device("cpu")


# --- Dispatch -------------------------------------------------------------------------------------------------------


def make_library(dtype: torch.dtype, attention: str = "windowed", seed: int = 0) -> tuple[Library, Dispatch]:
    """Four blocks of width 32 with random weights, and what runs windows on them."""
    config = LoLConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_experts=4,
        window_size=16,
        window_stride=8,
        core_attention=attention,
    )
    library, generator = Library(config).to(dtype), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in library.named_parameters():
            scale, mean = (0.2, 1.0) if "norm" in name else (0.2, 0.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale + mean)
    return library, Dispatch(config)


def packed_layout(lengths: list[int], window_size: int | None = 16, shift: int = 8) -> WindowLayout:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return lay_windows(find_documents((1, positions.shape[1]), positions, None, CPU), shift, window_size)


RAGGED = [5, 40, 1, 23, 16, 9, 30, 2, 14]


def run(
    parts: tuple[Library, Dispatch], form: str, layout: WindowLayout, expert: Tensor, dtype: torch.dtype, film: bool
):
    """Result, and the gradients of the state, of the windows' weights, of FiLM and of every parameter."""
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    total = layout.windows.total
    state, weight, upstream = leaf(total, 32), leaf(layout.num_windows), leaf(total, 32)
    modulation = Film(*(leaf(32) for _ in range(4))) if film else None
    library, dispatch = parts
    dispatch.form = form
    result = dispatch(state, library(), layout, expert, weight, modulation)
    leaves = {"state": state, "weight": weight} | dict(library.named_parameters())
    leaves |= {} if modulation is None else modulation._asdict()
    gradients = torch.autograd.grad((result * upstream.detach()).sum(), list(leaves.values()))
    return result.detach(), dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("lengths", [RAGGED, [48], [40, 40]], ids=["ragged", "one row", "two rows"])
@pytest.mark.parametrize("attention", ["windowed", "full", "sliding"])
@pytest.mark.parametrize("film", [False, True], ids=["plain", "film"])
def test_grouped_dispatch_is_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    tolerance: float,
    lengths: list[int],
    attention: str,
    film: bool,
):
    layout = packed_layout(lengths) if attention == "windowed" else packed_layout(lengths, None, 0)
    assert (layout.windows.slots[2] is not None) == (lengths is RAGGED)
    expert = torch.randint(0, 4, (layout.num_windows,), generator=torch.Generator().manual_seed(3))
    parts = make_library(dtype, attention)
    looped, looped_gradients = run(parts, "loop", layout, expert, dtype, film)
    for kernel in (False, True) if dtype == torch.float32 else (False,):
        # The kernel of some GPUs; on a CPU torch runs a loop in its place, not in float64.
        monkeypatch.setattr(library_module, "fits_kernel", lambda _stack, kernel=kernel: kernel)
        assert isinstance(parts[0]()["q_proj"], Tensor) == kernel
        result, gradients = run(parts, "grouped", layout, expert, dtype, film)
        assert_close(result, looped, atol=tolerance, rtol=tolerance)
        for name, gradient in gradients.items():
            # Relative to the largest entry: a sum over all tokens rounds as its terms do.
            error = (gradient - looped_gradients[name]).abs().max() / looped_gradients[name].abs().max()
            assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("used", [[0, 2, 3], [1]], ids=["blocks", "one block"])
def test_autocast_reaches_the_grouped_products(used: list[int]):
    """Float32 weights, products in bfloat16, as F.linear does it in the loop; gradients are float32 again."""
    layout = packed_layout(RAGGED)
    expert = torch.tensor(used)[torch.arange(layout.num_windows) % len(used)]
    parts = make_library(torch.float32)
    exact, exact_gradients = run(parts, "grouped", layout, expert, torch.float32, True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shelf = parts[0]()
        assert shelf["q_proj"][0].dtype == torch.bfloat16
        assert shelf["attn_norm"][0].dtype == torch.float32
        result, gradients = run(parts, "grouped", layout, expert, torch.float32, True)
        looped, looped_gradients = run(parts, "loop", layout, expert, torch.float32, True)
    assert result.dtype == torch.float32
    gradients, looped_gradients, exact_gradients = (
        {"result": own} | more
        for own, more in ((result, gradients), (looped, looped_gradients), (exact, exact_gradients))
    )
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        size = exact_gradients[name].norm()
        assert 0 < (gradient - exact_gradients[name]).norm() < 0.05 * size, name
        assert (gradient - looped_gradients[name]).norm() < 0.01 * size, name


@pytest.mark.parametrize("form", ["grouped", "loop"])
@pytest.mark.parametrize("used", [[0, 2], [3]], ids=["two blocks", "one block"])
def test_an_idle_block_has_a_gradient_of_exactly_zero(form: str, used: list[int]):
    (library, dispatch), layout = make_library(torch.float32), packed_layout(RAGGED)
    expert = torch.tensor(used)[torch.arange(layout.num_windows) % len(used)]
    dispatch.form = form
    state = torch.randn(layout.windows.total, 32)
    dispatch(state, library(), layout, expert, torch.ones(layout.num_windows), None).square().sum().backward()
    for name, parameter in library.named_parameters():
        assert parameter.grad is not None, name
        busy = [block for block in range(4) if (parameter.grad[block] != 0).any()]
        assert busy == used, name


def test_a_weight_of_zero_leaves_the_window_as_it_was():
    (library, dispatch), layout = make_library(torch.float32), packed_layout(RAGGED)
    expert = torch.arange(layout.num_windows) % 4
    weight = torch.ones(layout.num_windows)
    weight[1] = 0
    state = torch.randn(layout.windows.total, 32)
    with torch.no_grad():
        result = dispatch(state, library(), layout, expert, weight, None)
    changed = (result != state).any(1)
    assert torch.equal(changed, layout.window_of_token != 1)


@pytest.mark.parametrize("counts", [[3, 1, 4], [5], [2, 2]])
def test_the_gradient_of_grouped_linear(counts: list[int]):
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    x, weights = leaf(sum(counts), 3), [leaf(2, 3) for _ in counts]
    expected = torch.cat([rows @ weight.t() for rows, weight in zip(x.split(counts), weights, strict=True)])
    assert_close(grouped_linear(x, counts, weights), expected, **EXACT)
    assert torch.autograd.gradcheck(lambda x, *weights: grouped_linear(x, counts, weights), (x, *weights))


# --- Attention ------------------------------------------------------------------------------------------------------


@bounded(40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    heads=st.sampled_from([1, 3]),
    sliding=st.none() | st.integers(1, 14),
    seed=st.integers(0, 999),
)
def test_attention_in_windows_is_a_dense_attention_with_a_mask(
    lengths: list[int], heads: int, sliding: int | None, seed: int
):
    """Also sliding; and rotary angles that count from the window's start make no difference."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(total, heads * 4, generator=generator, dtype=torch.float64) for _ in range(3))
    shape = AttentionShape(num_heads=heads, rope_theta=50.0, window_size=None, sliding=sliding)
    own = window_attention(query, key, value, line_up(torch.tensor(lengths)), shape)

    window = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(total)
    distance = place[:, None] - place
    visible = (window[:, None] == window) & (distance >= 0)
    if sliding is not None:
        visible &= distance < sliding
    angles = rotary_angles(place, 4, 50.0, torch.float64)
    q, k, v = (part.view(total, heads, 4).transpose(0, 1) for part in (query, key, value))
    scores = rotate(q, angles) @ rotate(k, angles).transpose(1, 2) / 2
    dense = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
    assert_close(own, dense.transpose(0, 1).reshape(total, -1), **EXACT)


def test_windows_in_any_order_attend_alike():
    """Windows that lie in the order of their blocks, in groups by length: each still sees itself alone."""
    layout = packed_layout(RAGGED)
    order = layout.group(torch.arange(layout.num_windows).flip(0))
    stream = torch.randn(layout.windows.total, 8, dtype=torch.float64)
    shape = AttentionShape(num_heads=2, rope_theta=100.0, window_size=None, sliding=None)
    straight = window_attention(stream, stream, stream, layout.windows, shape)
    arranged = order.arrange(stream)
    attended = window_attention(arranged, arranged, arranged, order.windows, shape)
    assert_close(order.restore(attended), straight, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_runs_of_few_rows_are_products_like_any_other(dtype: torch.dtype):
    """Runs of few rows, which decoding has, take another way through BLAS."""
    counts = [1, 3, 4, 2, 1, 99]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 512, generator=generator).to(dtype)
    weights = [torch.randn(512, 512, generator=generator).to(dtype) for _ in counts]
    with torch.no_grad():
        product = grouped_linear(x, counts, weights)
    own = [run.double() @ weight.double().t() for run, weight in zip(x.split(counts), weights, strict=True)]
    tolerance = {torch.float32: 1e-3, torch.float64: 1e-10, torch.bfloat16: 0.5}[dtype]
    assert product.dtype == dtype
    assert_close(product.double(), torch.cat(own), atol=tolerance, rtol=0)


# --- Recomputation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_changes_nothing(monkeypatch: pytest.MonkeyPatch, reentrant: bool):
    """Training noise is on: a recomputation that drew anew would route elsewhere."""
    spec = Spec(8, 2, 1, 1, 3, 4, 4, 2, depth_film=True, input_injection="diagonal", tie_router=False)
    model, batch = make_model(spec, 0).train(), make_batch([[11, 5], [9, 2]], 0)
    runs = Counter()
    update = library_module.block_update

    def counted(*args):
        runs["blocks"] += 1
        return update(*args)

    monkeypatch.setattr(library_module, "block_update", counted)
    labels = torch.where(batch.attention_mask == 1, batch.input_ids, -100)

    def step():
        runs.clear()
        model.zero_grad()
        output = model(**batch.inputs(), labels=labels, generator=torch.Generator().manual_seed(5))
        output.loss.backward()
        return output, {name: parameter.grad for name, parameter in model.named_parameters()}, runs["blocks"]

    plain, plain_gradients, once = step()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    again, gradients, twice = step()
    assert twice == 2 * once
    assert torch.equal(again.logits, plain.logits)
    assert torch.equal(again.loss, plain.loss)
    assert torch.equal(again.routing.experts, plain.routing.experts)
    assert torch.equal(again.routing.weights, plain.routing.weights)
    assert torch.equal(again.routing.load, plain.routing.load)
    for name, gradient in plain_gradients.items():
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None:
            assert_close(gradients[name], gradient, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


# --- No loop over tokens or windows ---------------------------------------------------------------------------------


class CountOperations(TorchDispatchMode):
    """Counts the torch operations that run inside of it."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[str(func)] += 1
        return func(*args, **(kwargs or {}))


def work_of(model: LoLForCausalLM, rows: int, n: int) -> tuple[Counter, Counter]:
    """Torch operations and Python calls of one forward and backward pass, whose windows use both blocks."""
    ids = torch.zeros(rows, n, dtype=torch.long)
    depths = model.config.num_routed_depths
    windows = model.config.windows_in(n)
    path = (torch.arange(windows) % 2).expand(depths, windows)
    calls: Counter = Counter()

    def profile(frame, event, _arg):
        if event == "call" and "/lol/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    with CountOperations() as counter:
        sys.setprofile(profile)
        try:
            model(ids, labels=ids, path=path).loss.backward()
        finally:
            sys.setprofile(None)
    return counter.operations, calls


@pytest.mark.parametrize("attention", ["windowed", "sliding"])
def test_the_number_of_operations_does_not_grow_with_the_text(attention: str):
    spec = Spec(8, 2, 1, 1, 2, 4, 64, 32, core_attention=attention)
    model = make_model(spec, 0).float().train()
    work_of(model, 1, 256)
    operations, calls = work_of(model, 8, 256)  # runs of fewer numbers are multiplied in another way
    assert sum(operations.values()) > 100
    assert any("Dispatch" in name for name in calls)
    for rows, n in ((2, 1024), (9, 512)):
        more_operations, more_calls = work_of(model, rows, n)
        assert more_operations == operations
        assert more_calls == calls
