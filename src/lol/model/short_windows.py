"""A routed depth for many short windows of one length, with its backward pass written out: what `Dispatch` runs on a
packed shelf.

With windows of a dozen tokens and narrow blocks, much of a depth's time goes into the small operations around the
matrix products, and into attention kernels made for long rows. Here each norm's scale is folded into the projections
behind it, projections that read the same tokens are one product, attention is two batched products, and the backward
pass makes no more than it needs. What is computed is `block_update`; tests hold it and its gradients equal to
`Dispatch.form = "loop"`. Letters: T tokens, K windows, n tokens of a window, d width, f width of the MLP, H heads,
h head size, L blocks, c parts (queries, keys, values).
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lol.model.layers import Rotary, rotary_angles, rotate


class Packed(NamedTuple):
    """The blocks' weights as the products want them; made once per forward pass of the model."""

    qkv: Float[Tensor, "L three_d d"]
    out: Float[Tensor, "L d d"]
    gate_up: Float[Tensor, "L two_f d"]
    down: Float[Tensor, "L d f"]


class Shape(NamedTuple):
    """What the windows and their attention are like."""

    length: int
    width: int
    heads: int
    rope_theta: float
    is_causal: bool
    eps: float


def pack(shelf: dict[str, tuple[Tensor, ...]]) -> Packed:
    """Put weights together and fold the norms' scales into them."""
    stacked = {name: torch.stack(weights) for name, weights in shelf.items()}
    qkv = torch.cat([stacked[name] for name in ("q_proj", "k_proj", "v_proj")], dim=1)
    gate_up = torch.cat([stacked["gate_proj"], stacked["up_proj"]], dim=1)
    return Packed(
        qkv * stacked["attn_norm"][:, None],
        stacked["o_proj"],
        gate_up * stacked["mlp_norm"][:, None],
        stacked["down_proj"],
    )


def short_window_update(
    state: Float[Tensor, "T d"], packed: Packed, expert: Int[Tensor, "K"], shape: Shape
) -> Float[Tensor, "T d"]:
    """E(s) - s of every window's own block.

    Args:
        state: The stream, window after window, each of `shape.length` tokens.
        packed: What `pack` made of the shelf.
        expert: The block of each window.
        shape: What the windows and their attention are like.
    """
    return _ShortWindows.apply(state, *packed, expert, shape)  # pyright: ignore[reportReturnType]


class _ShortWindows(torch.autograd.Function):
    """One block after the other, each on all of its windows: what it makes on the way stays in the cache."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, qkv: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, shape: Shape
    ) -> Tensor:
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=qkv.shape[0])
        runs = (counts * shape.length).tolist()
        x = _take_windows(state, order)
        update = torch.empty_like(x)
        angles = rotary_angles(torch.arange(shape.length), shape.width // shape.heads, shape.rope_theta, x.dtype)
        kept: list[Tensor] = []
        for rows, part, *weights in zip(x.split(runs), update.split(runs), qkv, out, gate_up, down, strict=True):
            if rows.shape[0]:
                kept += _run_block(rows, part, Packed(*weights), angles, shape)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        ctx.save_for_backward(qkv, out, gate_up, down, order, inverse, *kept)
        ctx.runs, ctx.shape, ctx.angles = runs, shape, angles
        return _take_windows(update, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, gate_up, down, order, inverse, *kept = ctx.saved_tensors
        grad = _take_windows(grads[0], order)
        grad_state = torch.empty_like(grad)
        stacks = (qkv, out, gate_up, down)
        grad_stacks = [torch.empty_like(stack) for stack in stacks]
        turned_back = Rotary(ctx.angles.cos, -ctx.angles.sin)
        for block, (above, below) in enumerate(zip(grad.split(ctx.runs), grad_state.split(ctx.runs), strict=True)):
            grad_weights = Packed(*(stack[block] for stack in grad_stacks))
            if above.shape[0]:
                mine, kept = kept[:_KEPT], kept[_KEPT:]
                weights = Packed(*(stack[block] for stack in stacks))
                _run_back(above, below, mine, weights, grad_weights, turned_back, ctx.shape)
            else:
                for weight in grad_weights:
                    weight.zero_()
        return _take_windows(grad_state, inverse), *grad_stacks, None, None


_KEPT = 10
"""How many tensors `_run_block` returns."""


def _run_block(x: Tensor, update: Tensor, block: Packed, angles: Rotary, shape: Shape) -> tuple[Tensor, ...]:
    """Write E(x) - x of one block, and return what its backward pass needs."""
    normed, scale = _normalize(x, shape.eps)
    parts = _split_heads(normed @ block.qkv.t(), shape)
    turned = rotate(parts[:2], angles)
    value = parts[2]
    probability = _attend(turned, shape)
    joined = _join_heads(torch.bmm(probability, value.flatten(0, 1)), shape)
    attention = joined @ block.out.t()
    hidden_normed, hidden_scale = _normalize(x + attention, shape.eps)
    gate_and_up = hidden_normed @ block.gate_up.t()
    gate, up = gate_and_up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    torch.addmm(attention, (gate * sigmoid).mul_(up), block.down.t(), out=update)
    return normed, scale, turned, value, probability, joined, hidden_normed, hidden_scale, gate_and_up, sigmoid


def _run_back(
    grad: Tensor, grad_x: Tensor, kept: list[Tensor], block: Packed, grads: Packed, turned_back: Rotary, shape: Shape
) -> None:
    """Write the gradients of `_run_block` for its rows and its matrices."""
    normed, scale, turned, value, probability, joined, hidden_normed, hidden_scale, gate_and_up, sigmoid = kept
    gate, up = gate_and_up.chunk(2, dim=-1)
    swish = gate * sigmoid
    torch.mm(grad.t(), swish * up, out=grads.down)
    grad_gated = grad @ block.down
    grad_gate_and_up = torch.empty_like(gate_and_up)
    grad_gate, grad_up = grad_gate_and_up.chunk(2, dim=-1)
    torch.mul(grad_gated, swish, out=grad_up)
    slope = swish.addcmul_(swish, sigmoid, value=-1).add_(sigmoid)
    torch.mul(grad_gated.mul_(up), slope, out=grad_gate)
    torch.mm(grad_gate_and_up.t(), hidden_normed, out=grads.gate_up)
    grad_hidden = _normalize_back(grad_gate_and_up @ block.gate_up, hidden_normed, hidden_scale)

    grad_attention = grad + grad_hidden
    torch.mm(grad_attention.t(), joined, out=grads.out)
    grad_joined = _split_heads(grad_attention @ block.out, shape)[0]
    grad_parts = _join_heads(_attend_back(grad_joined, turned, value, probability, turned_back), shape)
    torch.mm(grad_parts.t(), normed, out=grads.qkv)
    torch.add(grad_hidden, _normalize_back(grad_parts @ block.qkv, normed, scale), out=grad_x)


def _take_windows(stream: Tensor, windows: Tensor) -> Tensor:
    """The windows of a stream in another order."""
    rows = stream.reshape(windows.numel(), -1).index_select(0, windows)
    return rows.view(-1, stream.shape[-1])


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, and one over that root mean square."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scale, scale


def _normalize_back(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """The gradient of x; takes `grad` over."""
    along = (grad * normed).mean(-1, keepdim=True)
    return grad.addcmul_(normed, along, value=-1).mul_(scale)


def _split_heads(x: Tensor, shape: Shape) -> Tensor:
    """(T, c·d) → (c, K, H, n, h), contiguous."""
    length, heads = shape.length, shape.heads
    head = shape.width // heads
    return x.view(-1, length, x.shape[1] // shape.width, heads, head).permute(2, 0, 3, 1, 4).contiguous()


def _join_heads(x: Tensor, shape: Shape) -> Tensor:
    """(K·H, n, h) or (c, K, H, n, h) → (T, c·d)."""
    if x.ndim == 3:
        x = x.unflatten(0, (1, -1, shape.heads))
    return x.permute(1, 3, 0, 2, 4).reshape(-1, x.shape[0] * shape.heads * x.shape[-1])


def _attend(turned: Tensor, shape: Shape) -> Tensor:
    """(2, K, H, n, h) → (K·H, n, n): what each query takes of each key. The softmax is written out: torch's own takes
    ten times as long on rows this short. (Measured on Sapphire Rapids with torch 2.13.)"""
    query, key = turned.flatten(1, 2)
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(query.shape[-1] ** -0.5)
    if shape.is_causal:
        later = torch.ones(shape.length, shape.length, dtype=torch.bool).triu(1)
        scores.masked_fill_(later, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return scores.div_(scores.sum(-1, keepdim=True))


def _attend_back(grad: Tensor, turned: Tensor, value: Tensor, probability: Tensor, turned_back: Rotary) -> Tensor:
    """(3, K, H, n, h): the gradient of queries and keys before their turn, and of values."""
    grad, value = grad.flatten(0, 1), value.flatten(0, 1)
    query, key = turned.flatten(1, 2)
    result = turned.new_empty(3, *turned.shape[1:])
    torch.bmm(probability.transpose(1, 2), grad, out=result[2].flatten(0, 1))
    grad_scores = torch.bmm(grad, value.transpose(1, 2)).mul_(probability)
    grad_scores.addcmul_(probability, grad_scores.sum(-1, keepdim=True), value=-1).mul_(query.shape[-1] ** -0.5)
    grad_turned = torch.empty_like(turned)
    torch.bmm(grad_scores, key, out=grad_turned[0].flatten(0, 1))
    torch.bmm(grad_scores.transpose(1, 2), query, out=grad_turned[1].flatten(0, 1))
    result[:2] = rotate(grad_turned, turned_back)
    return result
