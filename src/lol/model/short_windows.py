"""A routed depth for many short windows of one length, with its backward pass written out: what `Dispatch` runs on a
packed shelf.

With windows of a dozen tokens and narrow blocks, more than half of a depth's time goes into the small operations around
the matrix products: into passes over memory, and into kernels made for long rows. So each norm's scale is folded into
the projections behind it, and the scale of the scores into the queries; projections that read the same tokens are one
product; queries and keys lie in pairs of channels that turn together, so that one complex product splits the heads and
turns them; the MLP's activations are transposed, so that gate and up are each one piece of memory; the residual and the
weight of the update are added while the rows are at hand; and tokens that nobody reads are left out. What is computed
is `block_update`; tests hold it and its gradients equal to `Dispatch.form = "loop"`. Letters: T tokens, K windows, n
tokens of a window (m when filled up), w of them wanted, d width, f width of the MLP, H heads, h head size, L blocks,
c parts (queries, keys, values).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float, Int
from torch import Tensor

from lol.model.layers import rotary_angles

_WINDOWS_AT_ONCE = 256
"""Fewer would keep a run in a core's cache, and their calls would take longer than that saves."""
_MULTIPLE = 4
"""Scores of twelve keys take half of the time that those of eleven take. (Measured on Zen 4 with torch 2.13.)"""
_LARGEST = 80.0
"""Up to here the exponential function is a normal number of float32, and so is the sum of a thousand."""


class Packed(NamedTuple):
    """The blocks' weights as the products want them; made once per forward pass of the model."""

    qkv: Float[Tensor, "L three_d d"]
    out: Float[Tensor, "L d d"]
    gate_up: Float[Tensor, "L two_f d"]
    down: Float[Tensor, "L d f"]


class Shape(NamedTuple):
    """What the windows and their attention are like."""

    length: int
    wanted: int
    """How many first tokens of each window are returned; the others are read as keys and values alone."""
    width: int
    heads: int
    rope_theta: float
    is_causal: bool
    eps: float


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


def run_short_windows(
    state: Float[Tensor, "T d"], weight: Float[Tensor, "K"], packed: Packed, expert: Int[Tensor, "K"], shape: Shape
) -> Float[Tensor, "Kw d"]:
    """s + weight · (E(s) - s) of every window's own block, for the wanted tokens of each window.

    Args:
        state: The stream, window after window, each of `shape.length` tokens.
        weight: Of each window's update.
        packed: What `pack` made of the shelf.
        expert: The block of each window.
        shape: What the windows and their attention are like.
    """
    return _ShortWindows.apply(state, weight, *packed, expert, shape)  # pyright: ignore[reportReturnType]


class _Kept(NamedTuple):
    """What the backward pass of some windows needs."""

    normed: Float[Tensor, "T d"]
    scale: Float[Tensor, "T one"]
    turned: Float[Tensor, "c KH m h"]
    probability: Float[Tensor, "KH w m"]
    joined: Float[Tensor, "Kw d"]
    hidden_normed: Float[Tensor, "Kw d"]
    hidden_scale: Float[Tensor, "Kw one"]
    gate_and_up: Float[Tensor, "two_f Kw"]
    swish: Float[Tensor, "f Kw"]
    gated: Float[Tensor, "f Kw"]
    update: Float[Tensor, "Kw d"]


class _ShortWindows(torch.autograd.Function):
    """One block after the other, each on its own windows; what it makes on the way stays for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, weight: Tensor, qkv: Tensor, out: Tensor, gate_up: Tensor, down: Tensor,
        expert: Tensor, shape: Shape,
    ) -> Tensor:  # fmt: skip
        windows = expert.shape[0]
        order, runs = _runs(expert, qkv.shape[0])
        x = state.view(windows, -1).index_select(0, order)
        sorted_weight = weight[:, None].index_select(0, order)
        moved = state.new_empty(windows, shape.wanted * shape.width)
        blocks, kept = _of_blocks(qkv, out, gate_up, down), []
        for block, begin, end in runs:
            own = x[begin:end]
            mine = _run_block(own.view(-1, shape.width), blocks[block], shape)
            update = mine.update.view(end - begin, -1)
            torch.addcmul(own[:, : update.shape[1]], update, sorted_weight[begin:end], out=moved[begin:end])
            kept += mine
        inverse = order.argsort()
        ctx.save_for_backward(sorted_weight, order, inverse, qkv, out, gate_up, down, *kept)
        ctx.runs, ctx.shape = runs, shape
        return moved.index_select(0, inverse).view(-1, shape.width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape, runs = ctx.shape, ctx.runs
        weight, order, inverse, qkv, out, gate_up, down, *kept = ctx.saved_tensors
        above = grads[0].reshape(len(order), -1).index_select(0, order)
        below = above.new_empty(len(order), shape.length * shape.width)
        grad_stacks = [torch.zeros_like(stack) for stack in (qkv, out, gate_up, down)]
        blocks, grad_blocks = _of_blocks(qkv, out, gate_up, down), _of_blocks(*grad_stacks)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for block, begin, end in runs:
            mine, kept = _Kept(*kept[: len(_Kept._fields)]), kept[len(_Kept._fields) :]
            own = above[begin:end]
            if grad_weight is not None:
                torch.sum(own * mine.update.view_as(own), -1, keepdim=True, out=grad_weight[begin:end])
            grad = (own * weight[begin:end]).view(-1, shape.width)
            grad_x = below[begin:end]
            through_hidden = _run_back(
                grad, grad_x.view(-1, shape.width), mine, blocks[block], grad_blocks[block], shape
            )
            grad_x[:, : own.shape[1]].add_(own.add_(through_hidden.view_as(own)))
        grad_state = below.index_select(0, inverse).view(-1, shape.width)
        if grad_weight is not None:
            grad_weight = grad_weight.index_select(0, inverse).squeeze(1)
        return grad_state, grad_weight, *grad_stacks, None, None


def _runs(expert: Tensor, blocks: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Windows in the order of their blocks, and runs of one block each, not too long: (block, begin, end)."""
    runs, begin = [], 0
    for block, count in enumerate(torch.bincount(expert, minlength=blocks).tolist()):
        end = begin + count
        runs += [(block, at, min(end, at + _WINDOWS_AT_ONCE)) for at in range(begin, end, _WINDOWS_AT_ONCE)]
        begin = end
    return expert.argsort(stable=True), runs


def _of_blocks(*stacks: Tensor) -> list[Packed]:
    """Stacks taken apart."""
    return [Packed(*block) for block in zip(*stacks, strict=True)]


def _run_block(x: Tensor, block: Packed, shape: Shape) -> _Kept:
    """E(x) - x of one block, and what its backward pass needs."""
    normed, scale = _normalize(x, shape.eps)
    turned = _split_heads(normed @ block.qkv.t(), shape)
    query, key, value = turned
    probability = _attend(query[:, : shape.wanted], key, shape)
    joined = _join_heads(torch.bmm(probability, value), shape.heads)
    attention = joined @ block.out.t()
    first = x.view(-1, shape.length, shape.width)[:, : shape.wanted]
    hidden = (first + attention.view_as(first)).view_as(attention)
    hidden_normed, hidden_scale = _normalize(hidden, shape.eps)
    gate_and_up = block.gate_up @ hidden_normed.t()
    gate, up = gate_and_up.chunk(2)
    swish = F.silu(gate)
    gated = swish * up
    update = torch.addmm(attention, gated.t(), block.down.t())
    return _Kept(
        normed, scale, turned, probability, joined, hidden_normed, hidden_scale, gate_and_up, swish, gated, update
    )


def _run_back(grad: Tensor, grad_x: Tensor, kept: _Kept, block: Packed, grads: Packed, shape: Shape) -> Tensor:
    """Add to the gradients of a block's matrices, write that of x by way of the first norm, and return that of the
    wanted rows by way of the second."""
    gate, up = kept.gate_and_up.chunk(2)
    grads.down.addmm_(grad.t(), kept.gated.t())
    grad_gated = block.down.t() @ grad.t()
    grad_gate_and_up = torch.empty_like(kept.gate_and_up)
    grad_gate, grad_up = grad_gate_and_up.chunk(2)
    torch.mul(grad_gated, kept.swish, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad_gated.mul_(up), gate, grad_input=grad_gate)
    grads.gate_up.addmm_(grad_gate_and_up, kept.hidden_normed)
    grad_hidden = _normalize_back(grad_gate_and_up.t() @ block.gate_up, kept.hidden_normed, kept.hidden_scale)

    grad_attention = grad + grad_hidden
    grads.out.addmm_(grad_attention.t(), kept.joined)
    grad_parts = _attend_back(grad_attention @ block.out, kept.turned, kept.probability, shape)
    grads.qkv.addmm_(grad_parts.t(), kept.normed)
    _normalize_back(grad_parts @ block.qkv, kept.normed, kept.scale, out=grad_x)
    return grad_hidden


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, and one over that root mean square."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scale, scale


def _normalize_back(grad: Tensor, normed: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient of x; takes `grad` over."""
    along = (grad * normed).sum(-1, keepdim=True)
    return torch.mul(grad.addcmul_(normed, along, value=-1 / grad.shape[-1]), scale, out=out)


@cache
def _turns(length: int, head: int, theta: float, dtype: torch.dtype) -> Complex[Tensor, "c one one n half_h"]:
    """What queries and keys are multiplied with to be turned, and one for the values."""
    angles = rotary_angles(torch.arange(length), head, theta, dtype)
    turn = torch.complex(angles.cos[:, : head // 2], angles.sin[:, head // 2 :])
    return torch.stack([turn, turn, torch.ones_like(turn)])[:, None, None]


def _pairs(parts: Tensor, shape: Shape) -> Complex[Tensor, "c K H n half_h"]:
    """(T, c·d), seen as heads of complex numbers."""
    pairs = parts.view(-1, shape.length, 3, shape.heads, shape.width // shape.heads // 2, 2)
    return torch.view_as_complex(pairs).permute(2, 0, 3, 1, 4)


def _split_heads(parts: Tensor, shape: Shape) -> Tensor:
    """(T, c·d) → (c, K·H, m, h), queries and keys turned, tokens filled up with zeros."""
    head = shape.width // shape.heads
    turns = _turns(shape.length, head, shape.rope_theta, parts.dtype)
    filled = -(-shape.length // _MULTIPLE) * _MULTIPLE
    turned = parts.new_empty(3, parts.shape[0] // shape.length, shape.heads, filled, head)
    turned[:, :, :, shape.length :].zero_()
    torch.mul(_pairs(parts, shape), turns, out=_complex(turned)[:, :, :, : shape.length])
    return turned.flatten(1, 2)


def _split_heads_back(grad_query: Tensor, grad_key_value: Tensor, shape: Shape) -> Tensor:
    """(K·H, w, h), (2, K·H, m, h) → (T, c·d), queries and keys turned back."""
    turns_back = _turns(shape.length, shape.width // shape.heads, shape.rope_theta, grad_query.dtype).conj()
    query, key_value = (_complex(grad.unflatten(-3, (-1, shape.heads))) for grad in (grad_query, grad_key_value))
    parts = grad_query.new_empty(query.shape[0] * shape.length, 3 * shape.width)
    pairs = _pairs(parts, shape)
    torch.mul(query, turns_back[0, :, :, : shape.wanted], out=pairs[0, :, :, : shape.wanted])
    if shape.wanted < shape.length:
        pairs[0, :, :, shape.wanted :].zero_()
    torch.mul(key_value[:, :, :, : shape.length], turns_back[1:], out=pairs[1:])
    return parts


def _complex(heads: Tensor) -> Tensor:
    """Pairs of channels, seen as complex numbers."""
    return torch.view_as_complex(heads.unflatten(-1, (-1, 2)))


def _join_heads(x: Tensor, heads: int) -> Tensor:
    """(K·H, w, h) → (K·w, d)."""
    return x.unflatten(0, (-1, heads)).transpose(1, 2).reshape(-1, heads * x.shape[-1])


def _attend(query: Tensor, key: Tensor, shape: Shape) -> Tensor:
    """(K·H, w, h), (K·H, m, h) → (K·H, w, m): what each query takes of each key, nothing of those that fill up.

    The softmax is written out: torch's own takes ten times as long on rows this short. (Measured on Sapphire Rapids
    with torch 2.13.)
    """
    scores = torch.bmm(query, key.transpose(1, 2))
    # The maximum of each row takes longer than anything else here, and hardly ever matters.
    lowest, highest = scores.aminmax()
    if max(-lowest, highest) > _LARGEST:
        hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
        hidden[:, shape.length :] = True
        if shape.is_causal:
            hidden |= torch.ones_like(hidden).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
        scores.sub_(scores.amax(-1, keepdim=True))
    scores.exp_()
    scores[:, :, shape.length :].zero_()
    if shape.is_causal:
        scores.tril_()
    return scores.div_(scores.sum(-1, keepdim=True))


def _attend_back(grad_joined: Tensor, turned: Tensor, probability: Tensor, shape: Shape) -> Tensor:
    """(T, c·d): the gradient of queries, keys and values before the heads are split."""
    grad = grad_joined.view(-1, shape.wanted, shape.heads, turned.shape[-1]).transpose(1, 2).flatten(0, 1)
    query, key, value = turned
    grad_key_value = torch.empty_like(turned[1:])
    grad_key, grad_value = grad_key_value
    torch.bmm(probability.transpose(1, 2), grad, out=grad_value)
    grad_scores = torch.bmm(grad, value.transpose(1, 2)).mul_(probability)
    grad_scores.addcmul_(probability, grad_scores.sum(-1, keepdim=True), value=-1)
    torch.bmm(grad_scores.transpose(1, 2), query[:, : shape.wanted], out=grad_key)
    return _split_heads_back(torch.bmm(grad_scores, key), grad_key_value, shape)
