"""The gradient of a stack of matrices that every depth multiplies by: added up in place.

Left to itself autograd writes the part of each depth to memory of its own and adds the parts up, block by block, and
stacks the sums at the end: with D depths each weight's gradient is written D times and read as often. Here a product's
backward pass adds its part to the one sum by the product's own accumulation. Letters: L matrices.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class SharedGradient:
    """The sum of one stack, of one forward pass; it belongs to the backward pass under way.

    A second backward pass through the same graph begins a sum of its own, and so does one after a pass that never came
    to the stack (`torch.autograd.grad` of something behind it).
    """

    def __init__(self, stack: Float[Tensor, "L out in"]):
        self._shape, self._like = stack.shape, {"dtype": stack.dtype, "device": stack.device}
        self._sums: Tensor | None = None
        self._begun: set[int] = set()
        self._backward_pass = -1
        self.token = _Collect.apply(stack, self)
        """Input of every product that adds to the sum: autograd then comes to the stack after all of them."""

    def add(self, block: int, left: Float[Tensor, "rows out"], right: Float[Tensor, "rows in"]) -> None:
        """Add leftᵀ · right to the gradient of one matrix; for backward passes."""
        backward_pass = torch._C._current_graph_task_id()
        if self._sums is None or self._backward_pass != backward_pass:
            self._backward_pass, self._begun = backward_pass, set()
            self._sums = torch.empty(self._shape, **self._like)
        own = self._sums[block]
        if block in self._begun:
            torch.addmm(own, left.t(), right, out=own)
        else:
            torch.mm(left.t(), right, out=own)
            self._begun.add(block)

    def take(self) -> Tensor | None:
        """The gradient of the whole stack, exactly 0 for a matrix that nothing was added to."""
        sums, is_own = self._sums, self._backward_pass == torch._C._current_graph_task_id()
        self._sums = None
        if sums is None or not is_own:
            return None
        for block in set(range(self._shape[0])) - self._begun:
            sums[block].zero_()
        return sums


class _Collect(torch.autograd.Function):
    """Nothing forward; backward, what was added up."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor, shared: SharedGradient) -> Tensor:
        ctx.shared = shared
        return stack.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor):
        return ctx.shared.take(), None


class Matrices(tuple[Tensor, ...]):
    """The L matrices of a stack, each (out, in) and part of the graph, and the gradient that products may share."""

    shared: SharedGradient | None

    @classmethod
    def of(cls, stack: Float[Tensor, "L out in"]) -> "Matrices":
        """Take a stack apart."""
        matrices = cls(stack.unbind(0))
        matrices.shared = SharedGradient(stack) if stack.requires_grad and torch.is_grad_enabled() else None
        return matrices
