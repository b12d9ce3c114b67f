"""How far the blocks of a path tell what a window is about: separations, purity, concentration, the mode path.

All take the blocks that ran and a label of what each step had to do, for N examples and D depths; L blocks, P labels.
(Article, "The toy".)
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def count_uses(
    experts: Int[Tensor, "N D"], labels: Int[Tensor, "N D"], num_experts: int, num_labels: int
) -> Int[Tensor, "D P L"]:
    """How often each block ran for each label at each depth."""
    depths = experts.shape[1]
    cell = (torch.arange(depths) * num_labels + labels) * num_experts + experts
    return torch.bincount(cell.flatten(), minlength=depths * num_labels * num_experts).view(depths, num_labels, -1)


def separation(uses: Int[Tensor, "D P L"]) -> float:
    """The share of examples whose block's most common label is their own, mean over depths.

    1/P where the blocks ignore the label and the labels are equally common, 1 where each block has one label.
    """
    return float((uses.amax(1).sum(-1) / uses.sum((1, 2))).mean())


def separation_over_depths(uses: Int[Tensor, "D P L"]) -> float:
    """Separation with all depths taken together: 1 where each block has one label wherever it runs. (Decided here.)

    `separation` is 1 also where a label changes its block from depth to depth.
    """
    return separation(uses.sum(0, keepdim=True))


def purity(uses: Int[Tensor, "D P L"]) -> Float[Tensor, "D"]:
    """The share of examples that run their label's most common block, per depth: 1 where the block follows from it."""
    return uses.amax(2).sum(-1) / uses.sum((1, 2))


def depth_concentration(uses: Int[Tensor, "D P L"]) -> float:
    """The share of each block's use at its busiest depth, mean over the blocks in use.

    1/D where a block is used evenly, 1 where it belongs to one depth.
    """
    by_depth = uses.sum(1)
    used = by_depth.sum(0) > 0
    return float((by_depth.amax(0)[used] / by_depth.sum(0)[used]).mean())


def mode_path(uses: Int[Tensor, "D P L"] | Float[Tensor, "D P L"]) -> Int[Tensor, "D P"]:
    """The most common block of each label at each depth, or the most probable; the lowest among equals."""
    return uses.argmax(2)
