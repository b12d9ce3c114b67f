"""What a model costs: parameters stored and active, and what decoding keeps, from the configuration alone."""

from dataclasses import dataclass

import torch

from lol.errors import UserError
from lol.model.config import LoLConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model. `embedding` is the token embedding, the untied head and the filler embedding."""

    block: int
    """One transformer block."""
    embedding: int
    stored: int
    """Everything but `embedding`: the number that the paper matches models by."""
    active: int
    """Of `stored`, what one token meets on its way: a block counts as often as it runs."""

    @property
    def total(self) -> int:
        return self.embedding + self.stored


def count_parameters(config: LoLConfig) -> ParameterCounts:
    """Count a model's parameters; the balancing bias is a buffer and counts as none."""
    d, hidden, experts, depths = config.hidden_size, config.mlp_size, config.num_experts, config.num_routed_depths
    block = 4 * d * d + 3 * d * hidden + 2 * d
    fixed = config.num_prelude_layers + config.num_coda_layers
    embedding = config.vocab_size * d * (1 if config.tie_word_embeddings else 2) + d * config.router_only_tokens
    other = d
    if config.routing == "learned":
        routers = 1 if config.tie_router else depths
        other += routers * (d * experts + experts**2 + 2 * experts) + depths * d
    if config.depth_film:
        other += 4 * depths * d
    if config.input_injection == "diagonal":
        other += 3 * d
    return ParameterCounts(
        block=block,
        embedding=embedding,
        stored=(fixed + experts) * block + other,
        active=(fixed + depths) * block + other,
    )


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
    width, float32, int64 = config.hidden_size, 4, 8
    keys_and_values = 2 * config.core_window * width * dtype.itemsize
    # Running sum, sum of earlier means, router-only embeddings; weight; count, position, block.
    state = 3 * width * float32 + float32 + 3 * int64
    return config.num_routed_depths * batch * (keys_and_values + state)
