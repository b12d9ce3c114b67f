"""A routed depth for many short windows of one length, with its backward pass written out: what `Dispatch` runs on a
packed shelf.

With windows of a dozen tokens and narrow blocks, more than half of a depth's time goes into the small operations around
the matrix products: into passes over memory, and into kernels made for long rows. So each norm's scale is folded into
the projections behind it, and the scale of the scores into the queries; projections that read the same tokens are one
product, and tokens that come again and again are projected once; queries and keys lie in pairs of channels that turn
together, which is one complex product; the MLP's activations are transposed, so that gate and up are each one piece of
memory; all between the matrix products runs on the windows of all blocks at once; and tokens that nobody reads are left
out. What is computed is `block_update`; tests hold it and its gradients equal to `Dispatch.form = "loop"`. Letters: T
tokens, V distinct ones, K windows, n tokens of a window (m when filled up), w of them wanted, d width, f width of the
MLP, H heads, h head size, L blocks, c parts (queries, keys, values).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lol.model.short_attention import Shape, attend, attend_back, join_heads, split_heads

_WINDOWS_AT_ONCE = 256
"""Fewer would stay in a core's cache, and their calls would take longer than that saves."""


class Packed(NamedTuple):
    """The blocks' weights as the products want them; made once per forward pass of the model."""

    qkv: Float[Tensor, "L three_d d"]
    out: Float[Tensor, "L d d"]
    gate_up: Float[Tensor, "L two_f d"]
    down: Float[Tensor, "L d f"]


def pack(stacks: dict[str, Tensor], heads: int) -> Packed:
    """Put weights together, fold the scales of norms and scores into them, and lay channels that turn together side by
    side.

    Args:
        stacks: Those of a library, by name.
        heads: H.
    """
    query, key = (
        stacks[name].unflatten(1, (heads, 2, -1)).transpose(2, 3).flatten(1, 3) for name in ("q_proj", "k_proj")
    )
    query = query * (query.shape[1] // heads) ** -0.5
    qkv = torch.cat([query, key, stacks["v_proj"]], dim=1)
    gate_up = torch.cat([stacks["gate_proj"], stacks["up_proj"]], dim=1)
    return Packed(
        qkv * stacks["attn_norm"][:, None], stacks["o_proj"], gate_up * stacks["mlp_norm"][:, None], stacks["down_proj"]
    )


class Repeated(NamedTuple):
    """A stream of tokens that come again and again, as embeddings do."""

    distinct: Float[Tensor, "V d"]
    which: Int[Tensor, "K n"]
    """Which of them stands at each place of each window."""

    def spread(self) -> Float[Tensor, "K n d"]:
        """The stream, every token in its place."""
        return F.embedding(self.which, self.distinct)


def run_short_windows(
    state: Float[Tensor, "T d"] | Repeated,
    weight: Float[Tensor, "K"],
    packed: Packed,
    expert: Int[Tensor, "K"],
    shape: Shape,
) -> Float[Tensor, "Kw d"]:
    """s + weight · (E(s) - s) of every window's own block, for the wanted tokens of each window.

    Args:
        state: The stream, window after window, each of `shape.length` tokens.
        weight: Of each window's update.
        packed: What `pack` made of the shelf.
        expert: The block of each window.
        shape: What the windows and their attention are like.
    """
    if isinstance(state, Repeated) and len(state.distinct) * len(packed.qkv) > state.which.numel():
        # To project each for every block would be more work, not less.
        state = state.spread().flatten(0, 1)
    tokens, which = state if isinstance(state, Repeated) else (state, None)
    return _ShortWindows.apply(tokens, which, weight, *packed, expert, shape)  # pyright: ignore[reportReturnType]


class _Run(NamedTuple):
    """Windows in the order of their blocks, begin to end, that are worked on at once."""

    begin: int
    end: int
    blocks: list[int]
    counts: list[int]
    """Windows of each of these blocks."""

    def rows(self, each: int) -> list[int]:
        """Rows of each block, so many for a window."""
        return [count * each for count in self.counts]

    def of(self, stack: Sequence[Tensor]) -> list[Tensor]:
        """What belongs to each of these blocks."""
        return [stack[block] for block in self.blocks]


class _Blocks(NamedTuple):
    """What is packed, taken apart into the blocks' own."""

    qkv: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]


class _Kept(NamedTuple):
    """What the backward pass of a run needs."""

    turned: Float[Tensor, "c KH m h"]
    probability: Float[Tensor, "KH w m"]
    joined: Float[Tensor, "Kw d"]
    hidden_normed: Float[Tensor, "Kw d"]
    hidden_scale: Float[Tensor, "Kw one"]
    gate_and_up: Float[Tensor, "two_f Kw"]
    swish: Float[Tensor, "f Kw"]
    update: Float[Tensor, "Kw d"]


class _ShortWindows(torch.autograd.Function):
    """One run after the other; what each makes on the way stays for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, which: Tensor | None, weight: Tensor,
        qkv: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, shape: Shape,
    ) -> Tensor:  # fmt: skip
        order, runs = _runs(expert, len(qkv))
        weight = weight[:, None].index_select(0, order)
        if which is None:
            table = row = None
            x = _take_windows(tokens, order)
            normed, scale = _normalize(x.view_as(tokens), shape.eps)
        else:
            normed, scale = _normalize(tokens, shape.eps)
            table = (normed @ qkv.flatten(0, 1).t()).view(-1, qkv.shape[1])
            which = which.index_select(0, order)
            row = which * len(qkv) + expert.index_select(0, order)[:, None]
            x = tokens.index_select(0, which.flatten()).view(len(order), -1)
        moved = x.new_empty(len(order), shape.wanted * shape.width)
        blocks, kept = _Blocks(*(stack.unbind(0) for stack in (qkv, out, gate_up, down))), []
        for run in runs:
            at = slice(run.begin, run.end)
            own = x[at].view(-1, shape.width)
            if table is None or row is None:
                parts = own.new_empty(len(own), qkv.shape[1])
                rows = slice(run.begin * shape.length, run.end * shape.length)
                _project(run.of(blocks.qkv), normed[rows], parts, run.rows(shape.length))
            else:
                parts = table.index_select(0, row[at].flatten())
            mine = _run_blocks(own, parts, blocks, run, shape)
            update = mine.update.view(at.stop - at.start, -1)
            torch.addcmul(x[at, : update.shape[1]], update, weight[at], out=moved[at])
            kept += mine
        inverse = order.argsort()
        ctx.save_for_backward(order, inverse, which, row, weight, normed, scale, qkv, out, gate_up, down, *kept)
        ctx.runs, ctx.shape, ctx.repeats = runs, shape, which is not None
        return moved.index_select(0, inverse).view(-1, shape.width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape: Shape = ctx.shape
        order, inverse, which, row, weight, normed, scale, *saved = ctx.saved_tensors
        stacks, kept = saved[: len(Packed._fields)], saved[len(Packed._fields) :]
        above = grads[0].reshape(len(order), -1).index_select(0, order)
        grad_stacks = [torch.zeros_like(stack) for stack in stacks]
        blocks, grad_blocks = (_Blocks(*(stack.unbind(0) for stack in all_of)) for all_of in (stacks, grad_stacks))
        qkv, grad_qkv = stacks[0], grad_stacks[0]
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        below = torch.zeros_like(normed) if ctx.repeats else torch.empty_like(normed)
        grad_table = above.new_zeros(len(normed) * len(qkv), qkv.shape[1]) if ctx.repeats else None
        for run in ctx.runs:
            at = slice(run.begin, run.end)
            mine, kept = _Kept(*kept[: len(_Kept._fields)]), kept[len(_Kept._fields) :]
            own = above[at]
            if grad_weight is not None:
                torch.sum(own * mine.update.view_as(own), -1, keepdim=True, out=grad_weight[at])
            grad = (own * weight[at]).view(-1, shape.width)
            grad_parts, grad_hidden = _run_back(grad, mine, blocks, grad_blocks, run, shape)
            own += grad_hidden.view_as(own)
            if grad_table is None:
                rows = slice(run.begin * shape.length, run.end * shape.length)
                x, grad_x = normed[rows], below[rows]
                grad_normed = torch.empty_like(x)
                _project_back(
                    run.of(blocks.qkv), run.of(grad_blocks.qkv), grad_parts, x, grad_normed, run.rows(shape.length)
                )
                _normalize_back(grad_normed, x, scale[rows], out=grad_x)
                grad_x.view(len(own), -1)[:, : own.shape[1]] += own
            else:
                grad_table.index_add_(0, row[at].flatten(), grad_parts)
                below.index_add_(0, which[at, : shape.wanted].flatten(), own.view(-1, shape.width))
        if grad_table is None:
            below = _take_windows(below, inverse)
        else:
            grad_table = grad_table.view(len(normed), -1)
            torch.mm(grad_table.t(), normed, out=grad_qkv.flatten(0, 1))
            below += _normalize_back(grad_table @ qkv.flatten(0, 1), normed, scale)
        if grad_weight is not None:
            grad_weight = grad_weight.index_select(0, inverse).squeeze(1)
        return below.view(-1, shape.width), None, grad_weight, *grad_stacks, None, None


def _runs(expert: Tensor, blocks: int) -> tuple[Tensor, list[_Run]]:
    """Windows in the order of their blocks, and that order cut into runs."""
    runs, ends = [], torch.bincount(expert, minlength=blocks).cumsum(0).tolist()
    for begin in range(0, len(expert), _WINDOWS_AT_ONCE):
        end = min(begin + _WINDOWS_AT_ONCE, len(expert))
        taken = [
            (block, min(last, end) - max(first, begin))
            for block, (first, last) in enumerate(pairwise([0, *ends]))
            if first < end and last > max(first, begin)
        ]
        runs.append(_Run(begin, end, *map(list, zip(*taken, strict=True))))
    return expert.argsort(stable=True), runs


def _take_windows(rows: Tensor, order: Tensor) -> Tensor:
    """(K·n, …) → (K, n·…) in another order of the windows."""
    return rows.view(len(order), -1).index_select(0, order)


def _project(weights: list[Tensor], x: Tensor, out: Tensor, rows: list[int], beta: int = 0) -> None:
    """Each block's own rows: out ← beta · out + x Wᵀ."""
    for weight, own, into in zip(weights, x.split(rows), out.split(rows), strict=True):
        into.addmm_(own, weight.t(), beta=beta)


def _project_back(
    weights: list[Tensor], grad_weights: list[Tensor], grad: Tensor, x: Tensor, grad_x: Tensor, rows: list[int]
) -> None:
    """Add to the gradients of the weights, and write that of x."""
    apart = zip(weights, grad_weights, grad.split(rows), x.split(rows), grad_x.split(rows), strict=True)
    for weight, grad_weight, own_grad, own, into in apart:
        grad_weight.addmm_(own_grad.t(), own)
        torch.mm(own_grad, weight, out=into)


def _run_blocks(x: Tensor, parts: Tensor, blocks: _Blocks, run: _Run, shape: Shape) -> _Kept:
    """E(x) - x from x and its projections, and what the backward pass needs."""
    rows = run.rows(shape.wanted)
    turned = split_heads(parts, shape)
    query, key, value = turned
    probability = attend(query[:, : shape.wanted], key, shape)
    joined = join_heads(torch.bmm(probability, value), shape.heads)
    update = torch.empty_like(joined)
    _project(run.of(blocks.out), joined, update, rows)
    first = x.view(-1, shape.length, shape.width)[:, : shape.wanted]
    hidden = (first + update.view_as(first)).view_as(update)
    hidden_normed, hidden_scale = _normalize(hidden, shape.eps)
    gate_and_up = x.new_empty(blocks.gate_up[0].shape[0], len(hidden))
    _project(run.of(blocks.gate_up), hidden_normed, gate_and_up.t(), rows)
    gate, up = gate_and_up.chunk(2)
    swish = F.silu(gate)
    _project(run.of(blocks.down), (swish * up).t(), update, rows, beta=1)
    return _Kept(turned, probability, joined, hidden_normed, hidden_scale, gate_and_up, swish, update)


def _run_back(
    grad: Tensor, kept: _Kept, blocks: _Blocks, grads: _Blocks, run: _Run, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Add to the gradients of the blocks' matrices, and return that of x's projections and that of the wanted rows of x
    by way of the second norm."""
    rows = run.rows(shape.wanted)
    gate, up = kept.gate_and_up.chunk(2)
    gated = kept.swish * up
    grad_gated = torch.empty_like(gated)
    _project_back(run.of(blocks.down), run.of(grads.down), grad, gated.t(), grad_gated.t(), rows)
    grad_gate_and_up = torch.empty_like(kept.gate_and_up)
    grad_gate, grad_up = grad_gate_and_up.chunk(2)
    torch.mul(grad_gated, kept.swish, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_gated.mul_(up), gate, grad_input=grad_gate)
    grad_hidden = torch.empty_like(kept.hidden_normed)
    _project_back(
        run.of(blocks.gate_up), run.of(grads.gate_up), grad_gate_and_up.t(), kept.hidden_normed, grad_hidden, rows
    )
    grad_hidden = _normalize_back(grad_hidden, kept.hidden_normed, kept.hidden_scale)
    grad_joined = torch.empty_like(kept.joined)
    _project_back(run.of(blocks.out), run.of(grads.out), grad + grad_hidden, kept.joined, grad_joined, rows)
    return attend_back(grad_joined, kept.turned, kept.probability, shape), grad_hidden


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, and one over that root mean square."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scale, scale


def _normalize_back(grad: Tensor, normed: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient of x; takes `grad` over."""
    along = (grad * normed).sum(-1, keepdim=True)
    return torch.mul(grad.addcmul_(normed, along, value=-1 / grad.shape[-1]), scale, out=out)
