"""Attention of the core: inside windows, causal in a language model.

Rotary angles count from the window's first token: attention only sees differences of positions, and small angles keep
their precision in a long document. Letters: T tokens, d width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.layers import float32_on_cpu, rotary_angles, rotate
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
    is_causal: bool = True
    """Whether a query sees only what comes before it in its window; a language model's does."""

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
    """Attention inside each window.

    Raises:
        UserError: attention that is not causal, over windows of different lengths.
    """
    if not shape.is_causal and windows.equal_length is None:
        raise UserError("attention in both directions needs windows of one length: what fills up shorter ones is seen")
    return float32_on_cpu(partial(_attend_windows, windows=windows, shape=shape), query, key, value)


def _attend_windows(query: Tensor, key: Tensor, value: Tensor, windows: Windows, shape: AttentionShape) -> Tensor:
    def attend(parts: Sequence[Tensor], count: int, length: int) -> Tensor:
        q, k, v = (part.view(count, length, shape.num_heads, -1).transpose(1, 2) for part in parts)
        angles = rotary_angles(torch.arange(length, device=q.device), q.shape[-1], shape.rope_theta, q.dtype)
        mask = None
        if shape.sliding is not None and shape.sliding < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - shape.sliding)
        joined = F.scaled_dot_product_attention(
            rotate(q, angles), rotate(k, angles), v, attn_mask=mask, is_causal=mask is None and shape.is_causal
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
