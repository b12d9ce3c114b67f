"""What a model costs, from the configuration alone: parameters, FLOPs, and what decoding keeps.

A FLOP is one multiplication or one addition, so a product of (a, b) with (b, c) costs 2abc. Only matrix products are
counted, as in `torch.utils.flop_counter`: norms, rotations, activations and softmax are not. Conventions of attention
(decided here, and asserted against that counter):

- Every query counts against every key of its window: W² pairs a window, the parts of windows at both ends of a text
  as what they are, n² pairs where the whole text is one window. The half that a causal mask hides is not taken off.
- A sliding window counts the W keys that a query may see. The kernel that runs it here computes all n² and masks
  (`kernel=True` counts that).
- Backward, attention computes its scores again: 2.5 times its forward cost; a product with weights costs twice.
"""

from dataclasses import dataclass, fields

import torch

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.windows import count_windows


@dataclass(frozen=True)
class FeedForward:
    """What follows attention in a layer: one SwiGLU, or a router (no bias) that gives each token `top_k` of several."""

    hidden: int
    """Hidden width of each SwiGLU."""
    experts: int = 1
    top_k: int = 1

    def router(self, width: int) -> int:
        """Parameters of the router."""
        return width * self.experts if self.experts > 1 else 0


def fixed_feed_forward(config: LoLConfig) -> FeedForward:
    """The feed-forward part of the prelude's and coda's layers."""
    if config.moe_num_experts is None:
        return FeedForward(config.mlp_size)
    return FeedForward(config.moe_size, config.moe_num_experts, config.moe_top_k)


@dataclass(frozen=True)
class Size:
    """Parameters of a part of the model."""

    stored: int = 0
    active: int = 0
    """What one token meets on its way; a block counts as often as it runs."""
    matrices: int = 0
    """Of `stored`, the matrices of attention and SwiGLU."""
    active_matrices: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(Size)))

    def __mul__(self, times: int) -> "Size":
        return Size(*(getattr(self, item.name) * times for item in fields(Size)))


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model."""

    block: int
    """One block of the library."""
    parts: dict[str, Size]
    """embedding (with the filler), prelude, library, router (with the depth embeddings), coda, other (FiLM, injection,
    final norm), head; in the order in which a token meets them. A tied head stores nothing of its own."""

    @property
    def body(self) -> Size:
        """Everything but embedding and head. The paper matches models by `matrices` and `active_matrices` of this:
        its figures leave out norms and routers (seen by computing them)."""
        return sum((size for name, size in self.parts.items() if name not in ("embedding", "head")), Size())

    @property
    def embedding(self) -> int:
        """The token embedding, the untied head and the filler embedding."""
        return self.parts["embedding"].stored + self.parts["head"].stored

    @property
    def stored(self) -> int:
        """Everything but `embedding`."""
        return self.body.stored

    @property
    def active(self) -> int:
        """Of `stored`, what one token meets on its way: a block counts as often as it runs."""
        return self.body.active

    @property
    def total(self) -> int:
        return self.embedding + self.stored


def count_parameters(config: LoLConfig) -> ParameterCounts:
    """Count a model's parameters; the balancing bias is a buffer and counts as none."""
    d, depths = config.hidden_size, config.num_routed_depths
    # Without a depth there is no core.
    experts = config.num_experts if depths else 0
    block = _layer_size(d, FeedForward(config.mlp_size))
    layer = _layer_size(d, fixed_feed_forward(config))
    library = block * experts
    passed = block * depths
    router = other = Size()
    if config.routing == "learned" and depths:
        one = d * experts + experts**2 + 2 * experts
        # A tied router is shared by all depths, and active once as well: it runs per window, not per token.
        router = _met_once((1 if config.tie_router else depths) * one + depths * d)
    if config.depth_film:
        other += _met_once(4 * depths * d)
    if config.input_injection == "diagonal" and depths:
        other += _met_once(3 * d)
    vocabulary = config.vocab_size * d
    parts = {
        "embedding": Size(vocabulary + d * config.router_only_tokens, d),
        "prelude": layer * config.num_prelude_layers,
        "library": Size(library.stored, passed.active, library.matrices, passed.active_matrices),
        "router": router,
        "coda": layer * config.num_coda_layers,
        "other": other + _met_once(d),
        "head": Size(0 if config.tie_word_embeddings else vocabulary, vocabulary),
    }
    return ParameterCounts(block.stored, parts)


def _layer_size(width: int, feed_forward: FeedForward) -> Size:
    attention, norms, one = 4 * width**2, 2 * width, 3 * width * feed_forward.hidden
    matrices, active = attention + feed_forward.experts * one, attention + feed_forward.top_k * one
    rest = norms + feed_forward.router(width)
    return Size(matrices + rest, active + rest, matrices, active)


def _met_once(parameters: int) -> Size:
    return Size(parameters, parameters)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass of some part."""

    products: int = 0
    """Of the products with weights."""
    attention: int = 0
    """Of queries with keys, and of probabilities with values."""

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.products + other.products, self.attention + other.attention)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.products * times, self.attention * times)

    @property
    def forward(self) -> int:
        return self.products + self.attention

    @property
    def training(self) -> int:
        """Forward and backward, of which nothing is computed again (no activation checkpointing)."""
        return 3 * self.products + 7 * self.attention // 2


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of a model on one text, by part."""

    prelude: Flops
    depths: tuple[Flops, ...]
    """The block of each depth."""
    routers: tuple[Flops, ...]
    """The router at each depth, without its training noise."""
    noise: Flops
    """The router's noise at all depths: training alone draws it."""
    coda: Flops
    head: Flops

    @property
    def core(self) -> Flops:
        """All blocks, without the router."""
        return sum(self.depths, Flops())

    @property
    def router(self) -> Flops:
        return sum(self.routers, Flops())

    @property
    def total(self) -> Flops:
        """Of an evaluation."""
        return self.prelude + self.core + self.router + self.coda + self.head

    @property
    def forward(self) -> int:
        """Of an evaluation."""
        return self.total.forward

    @property
    def training(self) -> int:
        """Of a forward and backward pass in training."""
        return (self.total + self.noise).training


def count_flops(
    config: LoLConfig,
    num_tokens: int,
    num_depths: int | None = None,
    *,
    kernel: bool = False,
) -> ModelFlops:
    """Count what the model computes on a text of `num_tokens` tokens, with the logits of every place.

    A packed row counts as one text of its length, so that the count does not depend on the data (decided here); where
    documents are short, attention needs less.

    Args:
        config: The model.
        num_tokens: n, in one document without padding.
        num_depths: Depths that run (growing). Default: all.
        kernel: Count attention as the kernel runs it; see the head of this file.
    """
    d, experts, n = config.hidden_size, config.num_experts, num_tokens
    depths = range(config.num_routed_depths if num_depths is None else num_depths)
    layer = _layer_flops(d, n, fixed_feed_forward(config), pairs=n * n)
    own = FeedForward(config.mlp_size)
    pairs = [_pairs(config, n, config.window_shift(depth), kernel) for depth in depths]
    # The router works once per window.
    windows = [count_windows(n, config.window_shift(depth), config.core_window) for depth in depths]
    is_learned = config.routing == "learned"
    is_noisy = is_learned and config.router_noise_max > 0
    return ModelFlops(
        prelude=layer * config.num_prelude_layers,
        depths=tuple(_layer_flops(d, n, own, pairs=of_depth) for of_depth in pairs),
        routers=tuple(Flops(2 * count * d * experts if is_learned else 0) for count in windows),
        noise=Flops(2 * sum(windows) * experts**2 if is_noisy else 0),
        coda=layer * config.num_coda_layers,
        head=Flops(2 * n * d * config.vocab_size),
    )


def training_flops(
    config: LoLConfig,
    num_tokens: int,
    num_depths: int | None = None,
    *,
    backprop_depth: int | None = None,
    first_window: bool = False,
) -> int:
    """Count a forward and backward pass in training; truncated backprop spares the backward half of some depths.

    Args:
        config: The model.
        num_tokens: As `count_flops` takes them, like the next.
        num_depths: Depths that run. Default: all.
        backprop_depth: Only the last so many of them have a backward pass; default: all.
        first_window: The first window has one at every depth; a row counts as one text here too.
    """
    flops = count_flops(config, num_tokens, num_depths)
    # Where a window is a whole text, it is a first one.
    if backprop_depth is None or (first_window and config.core_window is None):
        return flops.training
    total, own = flops.training, FeedForward(config.mlp_size)
    for depth in range(max(0, len(flops.depths) - backprop_depth)):
        constant = flops.depths[depth] + flops.routers[depth]
        total -= constant.training - constant.forward
        if first_window:
            length = window_lengths(num_tokens, config.window_shift(depth), config.core_window)[0]
            kept = _layer_flops(config.hidden_size, length, own, pairs=length**2)
            total += kept.training - kept.forward
    return total


def _layer_flops(width: int, num_tokens: int, feed_forward: FeedForward, pairs: int) -> Flops:
    weights = _layer_size(width, feed_forward).active_matrices + feed_forward.router(width)
    return Flops(2 * num_tokens * weights, 4 * pairs * width)


def _pairs(config: LoLConfig, num_tokens: int, shift: int, kernel: bool) -> int:
    """Pairs of a query and a key at one depth of the core."""
    if config.core_attention == "sliding" and not kernel:
        return num_tokens * min(config.window_size, num_tokens)
    return sum(length**2 for length in window_lengths(num_tokens, shift, config.core_window))


def window_lengths(num_tokens: int, shift: int, window_size: int | None) -> list[int]:
    """Tokens in each window of a document of `num_tokens` tokens; `window_size=None` makes it one window."""
    if window_size is None:
        return [num_tokens]
    borders = [*range(window_size - shift, num_tokens, window_size), num_tokens]
    return [end - begin for begin, end in zip([0, *borders], borders, strict=False)]


def core_cache_bytes(config: LoLConfig, batch: int, dtype: torch.dtype) -> int:
    """Bytes that decoding keeps for the routed depths, however long the text: `RoutedLayer.num_bytes` over all depths.

    Args:
        config: A model with `core_attention="windowed"`.
        batch: Rows.
        dtype: Of the model.

    Raises:
        UserError: other core attention, which keeps the whole text.
    """
    if config.core_window is None:
        raise UserError(
            f"core_attention={config.core_attention!r} keeps every token, so its cache has no size of its own: only "
            "'windowed' is bounded"
        )
    return _depths_cache_bytes(config, config.core_window, batch, dtype)


def cache_bytes(config: LoLConfig, num_tokens: int, batch: int, dtype: torch.dtype) -> int:
    """Bytes that a cache of texts of `num_tokens` tokens holds: prelude and coda keep every token, a windowed core the
    tokens of one window. Other cores keep every token too, in steps of some room that is not counted here.

    Args:
        config: The model.
        num_tokens: Tokens that the cache has seen in each row.
        batch: Rows.
        dtype: Of the model.
    """
    fixed = config.num_prelude_layers + config.num_coda_layers
    kept = num_tokens if config.core_window is None else config.core_window
    return fixed * batch * _keys_and_values(config, num_tokens, dtype) + _depths_cache_bytes(config, kept, batch, dtype)


def _depths_cache_bytes(config: LoLConfig, kept: int, batch: int, dtype: torch.dtype) -> int:
    width, float32, int64 = config.hidden_size, 4, 8
    # Running sum, sum of earlier means, router-only embeddings; weight; count, position, block.
    state = 3 * width * float32 + float32 + 3 * int64
    return config.num_routed_depths * batch * (_keys_and_values(config, kept, dtype) + state)


def _keys_and_values(config: LoLConfig, num_tokens: int, dtype: torch.dtype) -> int:
    return 2 * num_tokens * config.hidden_size * dtype.itemsize
