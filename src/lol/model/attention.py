"""Attention of the core: causal, inside windows.

Rotary angles count from the window's first token: attention only sees differences of positions, and small angles keep
their precision in a long document. Letters: T tokens, K windows, M tokens of a window, C kept keys, d width, H heads,
h head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lol.model.config import LoLConfig
from lol.model.layers import rotary_angles, rotate
from lol.model.windows import Windows, take_rows


@dataclass(frozen=True)
class AttentionShape:
    """What the core's attention is like."""

    num_heads: int
    rope_theta: float
    window_size: int | None
    """Tokens in a window, or `None` where a window is a whole document."""
    sliding: int | None
    """Tokens that a query sees, itself included, or `None` for all of its window."""

    @classmethod
    def of(cls, config: LoLConfig) -> "AttentionShape":
        """That of a model."""
        return cls(
            num_heads=config.num_attention_heads,
            rope_theta=config.rope_theta,
            window_size=config.core_window,
            sliding=config.window_size if config.core_attention == "sliding" else None,
        )


def window_attention(
    query: Float[Tensor, "T d"],
    key: Float[Tensor, "T d"],
    value: Float[Tensor, "T d"],
    windows: Windows,
    shape: AttentionShape,
) -> Float[Tensor, "T d"]:
    """Causal attention inside each window."""

    def attend(parts: Sequence[Tensor], count: int, length: int) -> Tensor:
        q, k, v = (part.view(count, length, shape.num_heads, -1).transpose(1, 2) for part in parts)
        angles = rotary_angles(torch.arange(length, device=q.device), q.shape[-1], shape.rope_theta, q.dtype)
        mask = None
        if shape.sliding is not None and shape.sliding < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - shape.sliding)
        joined = F.scaled_dot_product_attention(
            rotate(q, angles), rotate(k, angles), v, attn_mask=mask, is_causal=mask is None
        )
        return joined.transpose(1, 2).reshape(count * length, -1)

    if (length := windows.equal_length) is not None:
        return attend((query, key, value), windows.start.shape[0], length)
    token, slot_of_token, is_real = windows.slots
    slots = [take_rows(part, token, slot_of_token) for part in (query, key, value)]
    sizes = [group.length * group.windows.numel() for group in windows.groups]
    joined = [
        attend(parts, group.windows.numel(), group.length)
        for group, *parts in zip(windows.groups, *(part.split(sizes) for part in slots), strict=True)
    ]
    return take_rows(torch.cat(joined), slot_of_token, token, is_real)


def continued_attention(
    query: Float[Tensor, "K M d"],
    key: Float[Tensor, "K M d"],
    value: Float[Tensor, "K M d"],
    kept_keys: Float[Tensor, "K H C h"],
    kept_values: Float[Tensor, "K H C h"],
    num_kept: Int[Tensor, "K"],
    shape: AttentionShape,
) -> Float[Tensor, "K M d"]:
    """Attention of windows whose first `num_kept` tokens have passed before; their keys are turned already.

    Tokens are at the left: what follows a window's last token repeats some other, and no real query sees it.
    """
    length, kept = query.shape[1], int(num_kept.max())
    q, k, v = (part.unflatten(-1, (shape.num_heads, -1)).transpose(1, 2) for part in (query, key, value))
    offset = num_kept[:, None] + torch.arange(length, device=q.device)
    angles = rotary_angles(offset[:, None], q.shape[-1], shape.rope_theta, q.dtype)
    place = torch.arange(kept, device=q.device).expand(len(num_kept), -1)
    # Kept places that are not a window's own lie after every query.
    place = torch.where(place < num_kept[:, None], place, torch.iinfo(torch.long).max)
    seen = torch.cat([place, offset], dim=1)[:, None, :]
    mask = seen <= offset[..., None]
    if shape.sliding is not None:
        mask &= seen > offset[..., None] - shape.sliding
    joined = F.scaled_dot_product_attention(
        rotate(q, angles),
        torch.cat([kept_keys[:, :, :kept], rotate(k, angles)], dim=2),
        torch.cat([kept_values[:, :, :kept], v], dim=2),
        attn_mask=mask[:, None],
    )
    return joined.transpose(1, 2).flatten(-2)
