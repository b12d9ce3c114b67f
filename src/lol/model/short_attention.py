"""Attention of many short windows of one length, forward and backward, for `short_windows.py`.

Queries and keys lie in pairs of channels that turn together, which is one complex product, and windows are filled up to
a length that the matrix products like. Letters as there: T tokens, K windows, n tokens of a window (m when filled up),
w of them wanted, d width, H heads, h head size, c parts (queries, keys, values).
"""

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from lol.model.layers import rotary_angles

_MULTIPLE = 4
"""Scores of twelve keys take half of the time that those of eleven take. (Measured on Zen 4 with torch 2.13.)"""
_LARGEST = 80.0
"""Up to here the exponential function is a normal number of float32, and so is the sum of a thousand."""


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


@cache
def _turns(length: int, head: int, theta: float, dtype: torch.dtype) -> Complex[Tensor, "n half_h"]:
    """What queries and keys are multiplied with to be turned."""
    angles = rotary_angles(torch.arange(length), head, theta, dtype)
    return torch.complex(angles.cos[:, : head // 2], angles.sin[:, head // 2 :])


def _heads(parts: Tensor, shape: Shape) -> Tensor:
    """(T, c·d), seen as (c, K, H, n, h)."""
    return parts.view(-1, shape.length, 3, shape.heads, shape.width // shape.heads).permute(2, 0, 3, 1, 4)


def split_heads(parts: Float[Tensor, "T c_times_d"], shape: Shape) -> Float[Tensor, "c KH m h"]:
    """Queries and keys turned, tokens filled up with zeros."""
    apart = _heads(parts, shape)
    filled = -(-shape.length // _MULTIPLE) * _MULTIPLE
    turned = parts.new_empty(*apart.shape[:3], filled, apart.shape[-1])
    turned[..., : shape.length, :].copy_(apart)
    turned[..., shape.length :, :].zero_()
    _complex(turned[:2]).mul_(_turns(filled, apart.shape[-1], shape.rope_theta, parts.dtype))
    return turned.flatten(1, 2)


def _split_heads_back(grad: Tensor, shape: Shape) -> Tensor:
    """(c, K·H, m, h) → (T, c·d), queries and keys turned back; takes `grad` over."""
    grad = grad.unflatten(1, (-1, shape.heads))
    _complex(grad[:2]).mul_(_turns(*grad.shape[-2:], shape.rope_theta, grad.dtype).conj())
    parts = grad.new_empty(grad.shape[1] * shape.length, 3 * shape.width)
    _heads(parts, shape).copy_(grad[..., : shape.length, :])
    return parts


def _complex(heads: Tensor) -> Tensor:
    """Pairs of channels, seen as complex numbers."""
    return torch.view_as_complex(heads.unflatten(-1, (-1, 2)))


def join_heads(x: Float[Tensor, "KH w h"], heads: int) -> Float[Tensor, "Kw d"]:
    """Heads side by side again."""
    return x.unflatten(0, (-1, heads)).transpose(1, 2).reshape(-1, heads * x.shape[-1])


def attend(query: Float[Tensor, "KH w h"], key: Float[Tensor, "KH m h"], shape: Shape) -> Float[Tensor, "KH w m"]:
    """What each query takes of each key, nothing of those that fill up.

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


def attend_back(
    grad_joined: Float[Tensor, "Kw d"],
    turned: Float[Tensor, "c KH m h"],
    probability: Float[Tensor, "KH w m"],
    shape: Shape,
) -> Float[Tensor, "T c_times_d"]:
    """The gradient of queries, keys and values before the heads are split."""
    grad = grad_joined.view(-1, shape.wanted, shape.heads, turned.shape[-1]).transpose(1, 2).flatten(0, 1)
    query, key, value = turned
    grad_turned = torch.empty_like(turned)
    grad_query, grad_key, grad_value = grad_turned
    torch.bmm(probability.transpose(1, 2), grad, out=grad_value)
    grad_scores = torch.bmm(grad, value.transpose(1, 2)).mul_(probability)
    grad_scores.addcmul_(probability, grad_scores.sum(-1, keepdim=True), value=-1)
    torch.bmm(grad_scores.transpose(1, 2), query[:, : shape.wanted], out=grad_key)
    # Written into a part of `grad_query`, it would be a loop over the windows.
    grad_query[:, : shape.wanted] = torch.bmm(grad_scores, key)
    grad_query[:, shape.wanted :].zero_()
    return _split_heads_back(grad_turned, shape)
