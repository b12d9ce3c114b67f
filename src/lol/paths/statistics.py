"""Statistics of the paths in a table: how mixed, how repetitive, how alike those of two models or two labels are.

Use of blocks per depth, entropy and the number of paths are in `record.py`, where the report needs them too; here are
the ones that compare. Letters: D depths, L blocks, P labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from lol.errors import UserError
from lol.paths.extra import need
from lol.paths.figure import draw_matrix
from lol.paths.mode import mean_probabilities
from lol.paths.record import PathStatistics, path_statistics, utilisation

__all__ = [
    "BlockAgreement",
    "PathStatistics",
    "block_agreement",
    "draw_utilisation",
    "label_distances",
    "path_statistics",
    "reused_share",
    "utilisation",
]


def reused_share(statistics: PathStatistics) -> float:
    """The share of a path's steps whose block ran at an earlier depth of the same path, mean over tokens.

    0 where no path comes back to a block, (D − 1)/D where every path runs one block over and over.
    """
    total = sum(statistics.tokens_of_path.values())
    again = sum(tokens * (1 - len(set(path)) / len(path)) for path, tokens in statistics.tokens_of_path.items())
    return again / total


@dataclass(frozen=True)
class BlockAgreement:
    """How far two models route alike, once the blocks of one are named as those of the other."""

    matching: tuple[int, ...]
    """Per block of the first model, that of the second which runs most where it does; -1 where the second has fewer."""
    share: float
    """Windows, over all depths, that run matched blocks."""
    by_chance: float
    """What that share would be, with this matching and each model's use of blocks at each depth, if choices at a depth
    had nothing to do with each other."""


def block_agreement(one: pd.DataFrame, other: pd.DataFrame) -> BlockAgreement:
    """Match the blocks of two models, one to one, such that most windows run matched blocks (Hungarian method).

    The matching holds for all depths together, as a library's blocks do.

    Args:
        one: The table of one model on some text.
        other: That of another model on the same text, with the same depths and windows; libraries may differ in size.

    Raises:
        UserError: the tables are not of the same windows, or scipy is not installed.
    """
    places = ["document", "depth", "window", "start", "end"]
    if len(one) != len(other) or not np.array_equal(one[places].to_numpy(), other[places].to_numpy()):
        raise UserError("the two tables are not of the same windows: record the same text, at the same window size")
    sizes = [len(table["probabilities"].iloc[0]) for table in (one, other)]
    depth, first, second = one["depth"].to_numpy(), one["expert"].to_numpy(), other["expert"].to_numpy()
    together = np.zeros(sizes)
    np.add.at(together, (first, second), 1)
    blocks, partners = need("scipy.optimize").linear_sum_assignment(together, maximize=True)
    matching = np.full(sizes[0], -1)
    matching[blocks] = partners
    uses = [utilisation(table, size) for table, size in zip((one, other), sizes, strict=True)]
    apart = np.einsum("d,dl,dm->lm", np.bincount(depth), *uses)
    return BlockAgreement(
        tuple(matching.tolist()),
        float(together[blocks, partners].sum() / len(one)),
        float(apart[blocks, partners].sum() / len(one)),
    )


def label_distances(
    table: pd.DataFrame, labels: Mapping[int, str] | Sequence[str]
) -> tuple[tuple[str, ...], Float[np.ndarray, "P P"]]:
    """How far the mean paths of labels lie apart: the total variation distance of the mean router probabilities of two
    labels at a depth, mean over depths. 0 where they route alike, 1 where they have no block in common at any depth.

    Args:
        table: What `record_paths` returned.
        labels: The label of each document, by its number in the table.

    Returns:
        (labels in order of their names, distances).
    """
    means, _ = mean_probabilities(table, labels)
    stacked = np.stack(list(means.values()))
    distances = np.abs(stacked[:, None] - stacked[None]).sum(-1).mean(-1) / 2
    return tuple(means), distances


def draw_utilisation(shares: Float[np.ndarray, "D L"], file: Path, title: str = "") -> None:
    """Draw the share of the windows of each depth (row) that ran each block (column), as an SVG figure."""
    num_depths, num_experts = shares.shape
    draw_matrix(
        shares,
        file,
        rows=[str(depth) for depth in range(num_depths)],
        columns=[str(block) for block in range(num_experts)],
        names=("depth", "block"),
        title=title or "share of the windows of a depth that run a block",
        most=1.0,
    )
