"""The parts of a transformer block, and the one definition of what a block computes.

`block_update` is used by the prelude's and coda's layers, whose parts are modules, and by the library, whose parts
are stacked tensors (`library.py`). Letters: B batch, n tokens, d width, H heads, h head size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from lol.model.config import LoLConfig

Part = Callable[[Tensor], Tensor]


@runtime_checkable
class AttentionParts(Protocol):
    """The first five parts of a block, each a function of (…, channels)."""

    @property
    def attn_norm(self) -> Part: ...
    @property
    def q_proj(self) -> Part: ...
    @property
    def k_proj(self) -> Part: ...
    @property
    def v_proj(self) -> Part: ...
    @property
    def o_proj(self) -> Part: ...


@runtime_checkable
class BlockParts(AttentionParts, Protocol):
    """All nine parts of a block."""

    @property
    def mlp_norm(self) -> Part: ...
    @property
    def gate_proj(self) -> Part: ...
    @property
    def up_proj(self) -> Part: ...
    @property
    def down_proj(self) -> Part: ...


class Film(NamedTuple):
    """Scale and shift after each norm of a routed block, at one depth; each (d,)."""

    attn_scale: Tensor
    attn_shift: Tensor
    mlp_scale: Tensor
    mlp_shift: Tensor


def block_update(
    parts: BlockParts,
    x: Float[Tensor, "*tokens d"],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    film: Film | None = None,
    gate: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Float[Tensor, "*tokens d"]:
    """E(x) - x of the pre-norm block E(x) = h + SwiGLU(norm(h)), h = x + Attn(norm(x)).

    Args:
        parts: The block's norms and projections.
        x: The residual stream.
        attend: Maps projected queries, keys and values (*tokens, d) to the heads' joined outputs (*tokens, d).
        film: Modulation of both norms, or `None`.
        gate: `swiglu` in another form; `None` is itself.
    """
    attention = attention_update(parts, x, attend, film)
    normed = parts.mlp_norm(x + attention)
    if film is not None:
        normed = normed * (1 + film.mlp_scale) + film.mlp_shift
    return attention + parts.down_proj((gate or swiglu)(parts.gate_proj(normed), parts.up_proj(normed)))


def swiglu(gate: Float[Tensor, "*tokens h"], up: Float[Tensor, "*tokens h"]) -> Float[Tensor, "*tokens h"]:
    """SwiGLU between its projections."""
    return F.silu(gate) * up


def attention_update(
    parts: AttentionParts,
    x: Float[Tensor, "*tokens d"],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    film: Film | None = None,
) -> Float[Tensor, "*tokens d"]:
    """Attn(norm(x)), the first half of `block_update`."""
    normed = parts.attn_norm(x)
    if film is not None:
        normed = normed * (1 + film.attn_scale) + film.attn_shift
    return parts.o_proj(attend(parts.q_proj(normed), parts.k_proj(normed), parts.v_proj(normed)))


def rms_normalize(x: Float[Tensor, "*tokens d"], eps: float) -> Float[Tensor, "*tokens d"]:
    """x / sqrt(mean(x²) + eps), computed in at least float32, returned in x's dtype."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def float32_on_cpu(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """`attend`'s result; where it would be bfloat16's on a CPU and has a gradient, in float32: the backward pass of
    attention takes 2 to 9 times as long in bfloat16 there. (Measured on Sapphire Rapids with torch 2.13.)"""
    # Rotary angles may have made float32 of two of them, which autocast would undo.
    if query.device.type != "cpu" or value.dtype != torch.bfloat16 or not value.requires_grad:
        return attend(query, key, value)
    with torch.autocast("cpu", enabled=False):
        return attend(query.float(), key.float(), value.float()).to(value.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*tokens d"]) -> Float[Tensor, "*tokens d"]:
        return rms_normalize(x, self.eps) * self.weight


class OutputLinear(nn.Linear):
    """A projection that writes into the residual stream; its weights start smaller (`LoLPreTrainedModel`)."""


class Rotary(NamedTuple):
    """Of the rotary angles, each (…, n, h)."""

    cos: Tensor
    sin: Tensor
    """With the sign of the rotation: negative in the first half of the channels."""


def rotary_angles(position: Int[Tensor, "*shape"], head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Rotary angles at `position`, in Llama's convention: channel i turns together with channel i + h/2.

    Computed in float32 (float64 where that is the dtype) on every call: nothing is stored, so nothing can be lost.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=position.device, dtype=wide) / head_dim)
    angle = position[..., None].to(wide) * frequency
    cos, sin = angle.cos(), angle.sin()
    return Rotary(torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype))


def rotate(x: Float[Tensor, "*batch n h"], rotary: Rotary) -> Float[Tensor, "*batch n h"]:
    """Turn queries or keys by their angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * rotary.cos, torch.cat((second, first), dim=-1), rotary.sin)


class FixedLayer(GradientCheckpointingLayer):
    """What all layers of prelude and coda share: full causal attention inside the document.

    It goes through transformers' attention interface, so `attn_implementation` chooses eager, sdpa, flash or flex
    attention as for any of its models.
    """

    num_key_value_groups = 1
    is_causal = True

    def __init__(self, config: LoLConfig, layer_idx: int):
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.head_dim**-0.5
        self.attn_norm = RMSNorm(d, config.rms_norm_eps)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.o_proj = OutputLinear(d, d, bias=False)
        self.mlp_norm = RMSNorm(d, config.rms_norm_eps)

    def attend(
        self,
        query: Float[Tensor, "B n d"],
        key: Float[Tensor, "B n d"],
        value: Float[Tensor, "B n d"],
        rotary: Rotary,
        attention_mask: Any,
        position_ids: Int[Tensor, "B n"],
        cache: Cache | None,
    ) -> Float[Tensor, "B n d"]:
        """The heads' joined outputs."""
        query, key, value = (
            part.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for part in (query, key, value)
        )
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation,  # pyright: ignore[reportArgumentType]
            eager_attention_forward,
        )
        query, key = rotate(query, rotary), rotate(key, rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        def join(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return interface(
                self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, position_ids=position_ids
            )[0]

        # With a cache, widening would copy all that it holds for every token.
        joined = join(query, key, value) if cache is not None else float32_on_cpu(join, query, key, value)
        return joined.flatten(-2)


class Block(FixedLayer):
    """An ordinary layer of the prelude or coda: attention, then SwiGLU."""

    def __init__(self, config: LoLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        d, hidden = config.hidden_size, config.mlp_size
        self.gate_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.down_proj = OutputLinear(hidden, d, bias=False)

    def forward(
        self,
        x: Float[Tensor, "B n d"],
        rotary: Rotary,
        attention_mask: Any,
        position_ids: Int[Tensor, "B n"],
        cache: Cache | None = None,
    ) -> Float[Tensor, "B n d"]:
        return self.compute(x, rotary, attention_mask, position_ids, cache)

    def compute(
        self,
        x: Float[Tensor, "B n d"],
        rotary: Rotary,
        attention_mask: Any,
        position_ids: Int[Tensor, "B n"],
        cache: Cache | None,
    ) -> Float[Tensor, "B n d"]:
        """The layer itself. By itself, because `forward` is what activation checkpointing and FSDP2 wrap, and
        `lol.train.compiled` compiles what is inside of it."""
        attend = partial(
            self.attend, rotary=rotary, attention_mask=attention_mask, position_ids=position_ids, cache=cache
        )
        return x + block_update(self, x, attend)


class Float32Bias(nn.Module):
    """A module whose buffer `expert_bias` stays float32 when the module is cast.

    The balancing bias moves by 0.001 a step: in bfloat16 it would stop moving at 0.25. Casting moves it between devices
    and leaves its bits alone.
    """

    expert_bias: Tensor | None

    def _apply(self, fn, recurse=True):
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(device=self.expert_bias.device, dtype=torch.float32)
        return self


class FilmTable(nn.Module):
    """FiLM parameters of all depths: zero at the start, so that switching them on changes nothing. (Article.)"""

    def __init__(self, num_depths: int, width: int):
        super().__init__()
        self.attn_scale = nn.Parameter(torch.zeros(num_depths, width))
        self.attn_shift = nn.Parameter(torch.zeros(num_depths, width))
        self.mlp_scale = nn.Parameter(torch.zeros(num_depths, width))
        self.mlp_shift = nn.Parameter(torch.zeros(num_depths, width))

    def forward(self, depth: int) -> Film:
        return Film(self.attn_scale[depth], self.attn_shift[depth], self.mlp_scale[depth], self.mlp_shift[depth])


class DiagonalInjection(nn.Module):
    """Mixes the prelude's output p back into the state: s ← exp(-Δ A) s + Δ B p, per channel.

    Δ = softplus(`delta`), A = exp(`log_decay`), B = `input_scale`. At the start A = B = 1 and the decay exp(-Δ A) is
    sqrt(1/5). (The article names it, the form is Parcae's; the three take no weight decay: decided here.)
    """

    START_DELTA = math.log(math.expm1(math.log(5) / 2))

    def __init__(self, width: int):
        super().__init__()
        self.delta = nn.Parameter(torch.empty(width))
        self.log_decay = nn.Parameter(torch.empty(width))
        self.input_scale = nn.Parameter(torch.empty(width))

    def forward(self, state: Float[Tensor, "T d"], prelude: Float[Tensor, "T d"]) -> Float[Tensor, "T d"]:
        step = F.softplus(self.delta)
        decay = torch.exp(-step * torch.exp(self.log_decay))
        return decay * state + step * self.input_scale * prelude
