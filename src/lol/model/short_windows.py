"""A routed depth for many short windows of one length, with its backward pass written out: what `Dispatch` runs on a
packed shelf.

With windows of a dozen tokens and narrow blocks, the time of the grouped form goes into the many small operations
around the matrix products, and into attention kernels made for long rows. Here each norm's scale is folded into the
projections behind it, projections that read the same tokens are one product, attention is two batched products, and
the backward pass keeps and makes no more than it needs. What is computed is `block_update`, and tests hold it and its
gradients equal to `Dispatch.form = "loop"`. Letters: T tokens, K windows, n tokens of a window, d width, f width of
the MLP, H heads, h head size, L blocks.
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
    @staticmethod
    def forward(
        ctx: Any, state: Tensor, qkv: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, shape: Shape
    ) -> Tensor:
        order = expert.argsort(stable=True)
        counts = (torch.bincount(expert, minlength=qkv.shape[0]) * shape.length).tolist()
        x = _take_windows(state, order)
        normed, scale = _normalize(x, shape.eps)
        parts = _split_heads(_multiply(normed, counts, qkv), shape)
        angles = rotary_angles(torch.arange(shape.length), parts.shape[-1], shape.rope_theta, x.dtype)
        turned = rotate(parts[:2], angles)
        probability = _attend(turned, shape)
        joined = _join_heads(torch.bmm(probability, parts[2].flatten(0, 1)), shape)
        attention = _multiply(joined, counts, out)
        hidden_normed, hidden_scale = _normalize(x.add_(attention), shape.eps)
        gate_and_up = _multiply(hidden_normed, counts, gate_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        swish = gate * sigmoid
        gated = swish * up
        update = _multiply(gated, counts, down).add_(attention)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        ctx.save_for_backward(
            qkv, out, gate_up, down, order, inverse, normed, scale, turned, parts, probability, joined, hidden_normed,
            hidden_scale, up, sigmoid, swish, gated,
        )  # fmt: skip
        ctx.counts, ctx.shape, ctx.angles = counts, shape, angles
        return _take_windows(update, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, out, gate_up, down, order, inverse, normed, scale, turned, parts, probability, joined, hidden_normed,
         hidden_scale, up, sigmoid, swish, gated) = ctx.saved_tensors  # fmt: skip
        counts, shape, angles = ctx.counts, ctx.shape, ctx.angles
        grad = _take_windows(grads[0], order)

        grad_gated, grad_down = _multiply_back(grad, gated, counts, down)
        grad_gate_and_up = grad.new_empty(grad.shape[0], gate_up.shape[1])
        grad_gate, grad_up = grad_gate_and_up.chunk(2, dim=-1)
        torch.mul(grad_gated, swish, out=grad_up)
        slope = torch.addcmul(swish, swish, sigmoid, value=-1).add_(sigmoid)
        torch.mul(grad_gated.mul_(up), slope, out=grad_gate)
        grad_normed, grad_gate_up = _multiply_back(grad_gate_and_up, hidden_normed, counts, gate_up)
        grad_hidden = _normalize_back(grad_normed, hidden_normed, hidden_scale)

        grad_joined, grad_out = _multiply_back(grad + grad_hidden, joined, counts, out)
        grad_parts = _attend_back(_split_heads(grad_joined, shape)[0], turned, parts, probability, angles)
        grad_normed, grad_qkv = _multiply_back(_join_heads(grad_parts, shape), normed, counts, qkv)
        grad_state = grad_hidden.add_(_normalize_back(grad_normed, normed, scale))
        return _take_windows(grad_state, inverse), grad_qkv, grad_out, grad_gate_up, grad_down, None, None


def _take_windows(stream: Tensor, windows: Tensor) -> Tensor:
    """The windows of a stream in another order."""
    rows = stream.reshape(windows.numel(), -1).index_select(0, windows)
    return rows.view(-1, stream.shape[-1])


def _multiply(x: Tensor, counts: list[int], weights: Tensor) -> Tensor:
    """Run after run of rows, each times its block's matrix."""
    result = x.new_empty(x.shape[0], weights.shape[1])
    for rows, part, weight in zip(x.split(counts), result.split(counts), weights.unbind(0), strict=True):
        torch.mm(rows, weight.t(), out=part)
    return result


def _multiply_back(grad: Tensor, x: Tensor, counts: list[int], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `_multiply` for the rows and the matrices; that of a matrix without rows is zero."""
    grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
    runs = zip(
        grad.split(counts), x.split(counts), grad_x.split(counts), weights.unbind(0), grad_weights.unbind(0),
        strict=True,
    )  # fmt: skip
    for grad_rows, rows, grad_x_rows, weight, grad_weight in runs:
        torch.mm(grad_rows, weight, out=grad_x_rows)
        torch.mm(grad_rows.t(), rows, out=grad_weight)
    return grad_x, grad_weights


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


def _attend_back(grad: Tensor, turned: Tensor, parts: Tensor, probability: Tensor, angles: Rotary) -> Tensor:
    """The gradient of queries, keys and values before their turn, as `parts` has them."""
    grad = grad.flatten(0, 1)
    query, key = turned.flatten(1, 2)
    result = torch.empty_like(parts)
    torch.bmm(probability.transpose(1, 2), grad, out=result[2].flatten(0, 1))
    grad_scores = torch.bmm(grad, parts[2].flatten(0, 1).transpose(1, 2)).mul_(probability)
    grad_scores.addcmul_(probability, grad_scores.sum(-1, keepdim=True), value=-1).mul_(query.shape[-1] ** -0.5)
    grad_turned = torch.empty_like(turned)
    torch.bmm(grad_scores, key, out=grad_turned[0].flatten(0, 1))
    torch.bmm(grad_scores.transpose(1, 2), query, out=grad_turned[1].flatten(0, 1))
    result[:2] = rotate(grad_turned, Rotary(angles.cos, -angles.sin))
    return result
