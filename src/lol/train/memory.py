"""What a training run needs in a GPU's memory under FSDP2, from the configuration alone: an estimate.

On each of N GPUs, with P parameters:

- weights, gradients and AdamW's two moments, in float32 slices: 4, 4 and 8 bytes x P / N. Muon keeps one moment of
  its matrices: 4 bytes of those less.
- gathered: what FSDP2 holds whole, in the products' dtype. The embedding, the head, the library and the small rest stay
  from the forward to the backward pass; of prelude and coda two layers at a time, the next one beside the one that
  runs. The library is gathered once, whatever the depth. Its gradient is whole before it is reduced, twice: as the
  blocks' own and their stack, or as the stack and the float32 buffer of the reduction. Alone (N = 1) weights are there
  whole already: products in bfloat16 need copies of them, and the blocks' own gradients lie beside the stack.
- activations: bytes that the backward pass needs of each token, c · d + e · h of a layer or depth with width d and
  hidden width h. c and e were read off autograd's saved tensors on a CPU (tests/train/test_memory.py does it again):
  `_KEPT` below. Depths without gradients keep nothing, but for the share W / n of first windows that have them. With
  activation checkpointing a layer keeps its input, 4 d, and one layer at a time all of it.
- logits: 12 V a token (the logits, their softmax and its gradient in float32), and 12 d of the last norm.

Not counted: what the allocator, the kernels and NCCL take. Take 10 to 20 % more. (Decided here.)
"""

from dataclasses import dataclass, fields

from lol.model.config import LoLConfig
from lol.model.cost import count_parameters
from lol.train.config import TrainConfig


@dataclass(frozen=True)
class _Kept:
    """Bytes of a token that a layer keeps for its backward pass."""

    layer: int
    """Per channel of the stream, in a layer of prelude or coda."""
    hidden: int
    """Per channel inside SwiGLU."""
    fixed_depth: int
    """Per channel, in a depth whose block is the same for all windows."""
    routed_depth: int
    """Per channel, in a depth whose windows are brought into the order of their blocks."""
    pick: int
    """Per channel, for each expert that a token of a mixture-of-experts layer takes."""


# By the bytes of a number in the products.
_KEPT = {
    4: _Kept(layer=40, hidden=16, fixed_depth=41, routed_depth=51, pick=8),
    2: _Kept(layer=34, hidden=8, fixed_depth=35, routed_depth=42, pick=6),
}
_STREAM = 4
"""Bytes of a channel of the stream between layers, which is float32 in both."""
_FILM, _INJECTION = 8, 4
"""Bytes of a token per channel that they add to a depth."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each GPU."""

    weights: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


def training_memory(
    config: TrainConfig, world_size: int, rows: int, *, bf16: bool = False, checkpointing: bool = False
) -> TrainingMemory:
    """Estimate the memory of a GPU in the middle of a step; the head of this file says how.

    Args:
        config: The run.
        world_size: N, GPUs that share the weights.
        rows: Rows of a forward pass on one GPU.
        bf16: Products in bfloat16 (mixed precision); otherwise float32.
        checkpointing: Layers and depths compute their activations again.
    """
    counts, size = count_parameters(config.model), 2 if bf16 else 4
    # Rounded up: the GPU with the largest slice.
    share = -(-counts.total // world_size)
    tokens = rows * config.data.context_length
    of_muon = 0
    if config.optim.name == "muon":
        of_muon = sum(counts.parts[part].matrices for part in ("prelude", "library", "coda")) // world_size
    return TrainingMemory(
        weights=4 * share,
        gradients=4 * share,
        moments=8 * share - 4 * of_muon,
        gathered=_gathered(config.model, world_size, size),
        activations=round(tokens * kept_bytes(config, size, checkpointing)),
        logits=tokens * 12 * (config.model.vocab_size + config.model.hidden_size),
    )


def _gathered(model: LoLConfig, world_size: int, size: int) -> int:
    """Bytes of whole weights and gradients beside the slices."""
    counts = count_parameters(model)
    library = counts.parts["library"].stored
    fixed = counts.parts["prelude"].stored + counts.parts["coda"].stored
    if world_size == 1:
        return (size * counts.total if size == 2 else 0) + 4 * library
    layers = model.num_prelude_layers + model.num_coda_layers
    two_layers = fixed * min(2, layers) // max(1, layers)
    return size * (counts.total - fixed + two_layers) + (size + max(size, 4)) * library


def kept_bytes(config: TrainConfig, size: int, checkpointing: bool = False) -> float:
    """Bytes that the backward pass needs of one token, without the head's.

    Args:
        config: The run.
        size: Bytes of a number in the products: 4 or 2.
        checkpointing: Layers and depths compute theirs again.
    """
    model, growth, kept = config.model, config.growth, _KEPT[size]
    d = model.hidden_size
    if model.moe_num_experts is None:
        layer = kept.layer * d + kept.hidden * model.mlp_size
    else:
        layer = kept.layer * d + model.moe_top_k * (kept.pick * d + kept.hidden * model.moe_size)
    fixed_layers = model.num_prelude_layers + model.num_coda_layers
    channels = kept.routed_depth if model.routing == "learned" else kept.fixed_depth
    channels += _FILM * model.depth_film + _INJECTION * (model.input_injection == "diagonal")
    depth = channels * d + kept.hidden * model.mlp_size
    depths = model.num_routed_depths
    whole = depths if growth.backprop_depth is None else min(growth.backprop_depth, depths)
    first = 0.0
    if growth.first_window_full_backprop:
        # A row counts as one document, as everywhere in the accounts.
        first = 1.0 if model.core_window is None else min(1.0, model.core_window / config.data.context_length)
    run = whole + first * (depths - whole)
    if checkpointing:
        largest = max(layer if fixed_layers else 0, depth if depths else 0)
        return (fixed_layers + run) * _STREAM * d + largest
    return fixed_layers * layer + run * depth
