"""Grouped products: consecutive runs of rows, each times a matrix of its own.

Two forms. `grouped_linear` multiplies run after run, its lengths known to Python: on a CPU that is as fast as anything,
and it is right everywhere. `kernel_linear` is one kernel for all runs, torch's `grouped_mm`, for GPUs that have it
(`fits_kernel`); the lengths stay on the device, so nothing waits for them. Letters: T rows, L matrices.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lol.model.shared_gradient import Matrices, SharedGradient


def autocast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """What autocast makes of an argument of `F.linear`; it does not know the grouped product."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


# Without gradients, runs of at most so many numbers (they stay in the first-level cache) times a matrix of at least so
# many (reading it takes the time) go another way through BLAS: `_multiply_few`.
_FEW_NUMBERS, _MANY_NUMBERS = 3072, 2**18


def _multiply_few(rows: Float[Tensor, "M in"], weight: Float[Tensor, "out in"]) -> Float[Tensor, "M out"]:
    """rows · weightᵀ by way of weight · rowsᵀ: the same products.

    With the few rows of decoding the time goes into reading the weight, and BLAS reads it at up to twice the speed
    where it is the left factor and the right one has two columns or more. (Measured: LOG.md.)
    """
    columns = rows.expand(2, -1).contiguous() if rows.shape[0] == 1 else rows
    return torch.mm(weight, columns.t()).t()[: rows.shape[0]]


def _multiply_runs(x: Tensor, counts: list[int], weights: Sequence[Tensor], few: int = 0) -> Tensor:
    """Run after run of rows, each times its own matrix, in one result; runs of `few` numbers go their own way."""
    result = x.new_empty(x.shape[0], weights[0].shape[0])
    for rows, out, weight in zip(x.split(counts), result.split(counts), weights, strict=True):
        if rows.numel() <= few:
            out.copy_(_multiply_few(rows, weight))
        else:
            torch.mm(rows, weight.t(), out=out)
    return result


class _GroupedLinear(torch.autograd.Function):
    """`_multiply_runs`; the backward pass likewise."""

    @staticmethod
    def forward(ctx, x: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        return _multiply_runs(x, counts, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _multiply_back(grad, ctx.counts, weights)
        if not any(ctx.needs_input_grad[2:]):
            # A frozen library, under adapters elsewhere.
            return grad_x, None, *[None] * len(weights)
        grad_weights = [
            torch.mm(out.t(), rows) for out, rows in zip(grad.split(ctx.counts), x.split(ctx.counts), strict=True)
        ]
        return grad_x, None, *grad_weights


class _SharingGroupedLinear(torch.autograd.Function):
    """`_GroupedLinear` by blocks of a stack, whose gradient is added to the sum that all products of it share."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        counts: list[int],
        blocks: Sequence[int],
        shared: SharedGradient,
        _token: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts, ctx.blocks, ctx.shared = counts, blocks, shared
        return _multiply_runs(x, counts, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        for block, out, rows in zip(ctx.blocks, grad.split(ctx.counts), x.split(ctx.counts), strict=True):
            ctx.shared.add(block, out, rows)
        grad_x = _multiply_back(grad, ctx.counts, weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, grad.new_zeros(()), *[None] * len(weights)


def _multiply_back(grad: Tensor, counts: list[int], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the rows: each run of the result's gradient times its own matrix."""
    grad_x = grad.new_empty(grad.shape[0], weights[0].shape[1])
    for rows, out, weight in zip(grad.split(counts), grad_x.split(counts), weights, strict=True):
        torch.mm(rows, weight, out=out)
    return grad_x


def grouped_linear(
    x: Float[Tensor, "T in"], counts: list[int], weights: Sequence[Float[Tensor, "out in"]]
) -> Float[Tensor, "T out"]:
    """Multiply consecutive runs of rows by different matrices: run i, of `counts[i]` rows, by `weights[i]`."""
    if len(weights) == 1:
        return F.linear(x, weights[0])
    x, weights = autocast(x), [autocast(weight) for weight in weights]
    if not torch.is_grad_enabled():
        is_slow = x.device.type == "cpu" and x.dtype == torch.float32 and weights[0].numel() >= _MANY_NUMBERS
        return _multiply_runs(x, counts, weights, _FEW_NUMBERS if is_slow else 0)
    return _GroupedLinear.apply(x, counts, *weights)  # pyright: ignore[reportReturnType]


def shelf_linear(
    x: Float[Tensor, "T in"], counts: list[int], matrices: Matrices, blocks: Sequence[int]
) -> Float[Tensor, "T out"]:
    """`grouped_linear` by blocks of a stack: run i by `matrices[blocks[i]]`; the backward passes of all calls add to
    one gradient of the stack."""
    weights = [matrices[block] for block in blocks]
    if matrices.shared is None or not torch.is_grad_enabled():
        return grouped_linear(x, counts, weights)
    own = [weight.detach() for weight in weights]
    shared = matrices.shared
    return _SharingGroupedLinear.apply(autocast(x), counts, blocks, shared, shared.token, *own)  # pyright: ignore[reportReturnType]


def fits_kernel(stack: Float[Tensor, "L out in"]) -> bool:
    """Whether `kernel_linear` is a kernel for these matrices, and not torch's loop in its place: bfloat16 on Hopper or
    newer, with rows of whole 16 bytes."""
    if stack.device.type != "cuda" or stack.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(stack.device) >= (9, 0) and all(size % 8 == 0 for size in stack.shape[1:])


class _KernelLinear(torch.autograd.Function):
    """`kernel_linear`, with a backward pass that torch's own lacks: it takes an upstream gradient of any strides, and a
    matrix whose run is empty gets zeros (some kernels leave there what the memory held before)."""

    @staticmethod
    def forward(ctx, x: Tensor, ends: Tensor, stack: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, stack)
        return F.grouped_mm(x, stack.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, ends, stack = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = F.grouped_mm(grad, stack, offs=ends) if ctx.needs_input_grad[0] else None
        grad_stack = None
        if ctx.needs_input_grad[2]:
            is_idle = ends.diff(prepend=ends.new_zeros(1)) == 0
            grad_stack = F.grouped_mm(grad.t(), x, offs=ends).masked_fill_(is_idle[:, None, None], 0)
        return grad_x, None, grad_stack


def kernel_linear(
    x: Float[Tensor, "T in"], ends: Int[Tensor, "L"], stack: Float[Tensor, "L out in"]
) -> Float[Tensor, "T out"]:
    """`grouped_linear` by one kernel.

    Args:
        x: Rows; the runs fill all of them, for the kernel writes no others.
        ends: The row after each run's last, int32; equal to the one before where a run is empty.
        stack: The matrices, as autocast wants them.
    """
    return _KernelLinear.apply(autocast(x).contiguous(), ends, stack)  # pyright: ignore[reportReturnType]
