"""Grouped products by one kernel are those of run after run. On a CPU torch runs a loop where a GPU has the kernel, so
that everything around it is tested here: order, ends, idle blocks, gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from lol import LoLConfig, LoLForCausalLM
from lol.model import grouped, library, moe
from lol.model.grouped import fits_kernel, grouped_linear, kernel_linear

COUNTS = [3, 0, 6, 1, 0]
ENDS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)


def leaves(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, stack = torch.randn(10, 8, generator=generator), torch.randn(5, 16, 8, generator=generator)
    return x.to(dtype).requires_grad_(), stack.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("upstream", ["contiguous", "expanded", "transposed"])
def test_the_kernel_multiplies_run_after_run(dtype: torch.dtype, upstream: str):
    x, stack = leaves(dtype)
    gradient = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradient = {
        "contiguous": gradient,
        "expanded": gradient[:1].expand(10, 16),
        "transposed": gradient.t().clone().t(),
    }[upstream]
    used = [index for index, count in enumerate(COUNTS) if count]
    expected = grouped_linear(x, [COUNTS[index] for index in used], [stack[index] for index in used])
    expected_gradients = torch.autograd.grad(expected, (x, stack), gradient)
    result = kernel_linear(x, ENDS, stack)
    assert result.dtype == dtype
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    assert_close(result, expected, **tolerance)
    for own, plain in zip(torch.autograd.grad(result, (x, stack), gradient), expected_gradients, strict=True):
        assert_close(own, plain, **tolerance)


def test_what_a_kernel_leaves_at_idle_matrices_is_no_gradient(monkeypatch: pytest.MonkeyPatch):
    plain = F.grouped_mm

    def leaves_something(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        result = plain(left, right, offs=offs)
        if right.ndim == 2:
            result[[1, 4]] = torch.nan
        return result

    monkeypatch.setattr(F, "grouped_mm", leaves_something)
    x, stack = leaves(torch.float32)
    kernel_linear(x, ENDS, stack).sum().backward()
    assert [block for block in range(5) if (stack.grad[block] != 0).any()] == [0, 2, 3]
    assert stack.grad.isfinite().all()


def test_frozen_matrices_get_no_gradient():
    for multiply in (
        lambda x, stack: kernel_linear(x, ENDS, stack),
        lambda x, stack: grouped_linear(x, [3, 6, 1], [stack[0], stack[2], stack[3]]),
    ):
        x, stack = leaves(torch.float32)
        (expected,) = torch.autograd.grad(multiply(x, stack).square().sum(), x)
        (own,) = torch.autograd.grad(multiply(x, stack.detach()).square().sum(), x)
        assert torch.equal(own, expected)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_whole_model_by_the_kernel(monkeypatch: pytest.MonkeyPatch, precision: str, checkpointing: bool):
    """Library and mixture-of-experts layers, forward, backward and with a cache."""
    torch.manual_seed(0)
    config = LoLConfig(
        vocab_size=24, hidden_size=32, num_attention_heads=4, intermediate_size=48, num_prelude_layers=1,
        num_coda_layers=1, num_experts=4, num_routed_depths=3, window_size=8, window_stride=4, moe_num_experts=3,
        depth_film=True,
    )  # fmt: skip
    model = LoLForCausalLM(config)
    torch.nn.init.normal_(model.model.router.weight)
    if checkpointing:
        model.activation_checkpointing_enable()
    ids = torch.randint(24, (3, 30))

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            output = model(ids, labels=ids, generator=torch.Generator().manual_seed(1))
        output.loss.backward()
        return output.logits, {name: parameter.grad for name, parameter in model.named_parameters()}

    logits, gradients = step()
    used = []
    monkeypatch.setattr(grouped, "_KernelLinear", _Noted(grouped._KernelLinear, used))
    for module in (library, moe):
        monkeypatch.setattr(module, "fits_kernel", lambda _stack: True)
    own_logits, own_gradients = step()
    # Seven projections of each depth, three of each layer of experts.
    assert len(used) == (7 * 3 + 3 * 2) * (2 if checkpointing else 1)
    tolerance = 1e-5 if precision == "float32" else 0.03
    assert_close(own_logits, logits, atol=tolerance, rtol=tolerance)
    for name, gradient in gradients.items():
        error = (own_gradients[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: {error}"

    if precision == "float32" and not checkpointing:
        model.eval()
        with torch.inference_mode():
            whole = model(ids).logits
            first = model(ids[:, :11], use_cache=True)
            second = model(ids[:, 11:], cache=first.cache)
        assert_close(torch.cat([first.logits, second.logits], dim=1), whole, atol=1e-5, rtol=1e-5)


class _Noted:
    """An autograd function whose calls are noted."""

    def __init__(self, function: type, calls: list[None]):
        self.function, self.calls = function, calls

    def apply(self, *args: object) -> Tensor:
        self.calls.append(None)
        return self.function.apply(*args)


def test_a_cpu_takes_run_after_run():
    assert not fits_kernel(torch.zeros(2, 8, 8, dtype=torch.bfloat16))
    assert isinstance(
        library.Library(LoLConfig(hidden_size=16, num_attention_heads=2, num_experts=2))()["q_proj"], tuple
    )
