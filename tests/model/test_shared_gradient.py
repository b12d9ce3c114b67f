"""The gradient that the products of all depths share is the one that autograd would add up, whatever is asked of it."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lol.model.grouped import grouped_linear, shelf_linear
from lol.model.shared_gradient import Matrices

# Runs of three depths: their lengths and their blocks. Block 3 of 4 never runs.
DEPTHS = [([2, 3, 4], [2, 0, 1]), ([9], [1]), ([5, 4], [1, 2])]


def run(stack: Tensor, x: Tensor, is_shared: bool) -> Tensor:
    matrices = Matrices.of(stack)
    for counts, blocks in DEPTHS:
        if is_shared:
            update = shelf_linear(x, counts, matrices, blocks)
        else:
            update = grouped_linear(x, counts, [matrices[block] for block in blocks])
        x = x + update.tanh()
    return x.square().sum()


@pytest.fixture
def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    stack, x = torch.randn(4, 8, 8, generator=generator), torch.randn(9, 8, generator=generator)
    return stack.double().requires_grad_(), x.double().requires_grad_()


def assert_equal(own: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for part, plain in zip(own, expected, strict=True):
        assert_close(part, plain, atol=1e-12, rtol=1e-12)


def test_it_is_the_sum_over_depths_and_zero_for_an_idle_block(leaves: tuple[Tensor, Tensor]):
    own = torch.autograd.grad(run(*leaves, is_shared=True), leaves)
    assert_equal(own, torch.autograd.grad(run(*leaves, is_shared=False), leaves))
    assert torch.equal(own[0][3], torch.zeros(8, 8, dtype=torch.float64))
    assert own[0][:3].abs().amin() > 0


def test_a_second_backward_pass_begins_anew(leaves: tuple[Tensor, Tensor]):
    expected = torch.autograd.grad(run(*leaves, is_shared=False), leaves)
    loss = run(*leaves, is_shared=True)
    # This one ends before it comes to the stack, and leaves a sum that nobody takes.
    (only_x,) = torch.autograd.grad(loss, leaves[1], retain_graph=True)
    assert_equal((only_x,), expected[1:])
    for _ in range(2):
        assert_equal(torch.autograd.grad(loss, leaves, retain_graph=True), expected)


def test_what_needs_no_gradient_gets_none(leaves: tuple[Tensor, Tensor]):
    stack, x = leaves
    expected = torch.autograd.grad(run(stack, x, is_shared=False), leaves)
    assert_equal(torch.autograd.grad(run(stack.detach(), x, is_shared=True), x), expected[1:])
    assert_equal(torch.autograd.grad(run(stack, x.detach(), is_shared=True), stack), expected[:1])
    with torch.no_grad():
        assert Matrices.of(stack).shared is None


def test_a_gradient_of_a_gradient_is_refused(leaves: tuple[Tensor, Tensor]):
    gradients = torch.autograd.grad(run(*leaves, is_shared=True), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradients[1].sum().backward()
