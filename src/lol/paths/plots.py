"""Figures of a run, and the colours of the blocks.

A block has one colour in every figure and in the report. Colours 0 to 7 were searched for (decided here): the smallest
OKLab distance between any two, seen with normal, protan, deutan or tritan eyes, is 0.10, where well-known sets of eight
reach 0.03; their lightness keeps them visible on white and on black.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

BASE_COLORS = ("#4251c2", "#a97732", "#37d8f8", "#9c294e", "#cfcc50", "#618495", "#e19c9e", "#9691f7")
# Blocks 8 to 15 are mixed with white, 16 to 23 with black, and so on, further each time.
_MIXES = ((1.0, 0.0), (1.0, 0.35), (0.0, 0.35), (1.0, 0.6), (0.0, 0.6))


def block_colors(num_experts: int) -> list[str]:
    """The colour of each block, as "#rrggbb": eight hues, then their lighter and darker mixes.

    Past 40 blocks colours repeat; the block's number stands beside its colour wherever it is shown.
    """
    colors = []
    for block in range(num_experts):
        target, share = _MIXES[block // len(BASE_COLORS) % len(_MIXES)]
        red, green, blue = (
            (1 - share) * channel + share * target for channel in to_rgb(BASE_COLORS[block % len(BASE_COLORS)])
        )
        colors.append(to_hex((red, green, blue)))
    return colors


@dataclass(frozen=True)
class Curves:
    """What `metrics.jsonl` says about the losses, in nats per token."""

    train: list[tuple[float, float]]
    """(step, loss)."""
    held_out: list[tuple[float, float]]
    depth: list[tuple[int, int]]
    """(step, depths that ran)."""
    unigram: float | None
    bigram: float | None


def read_curves(metrics: Sequence[Mapping[str, Any]]) -> Curves:
    """Read the events of a run; losses that are not finite are left out, as no axis can hold them."""
    train = [event for event in metrics if event.get("event") == "train"]
    summary = find_summary(metrics)
    return Curves(
        train=_losses(train),
        held_out=_losses([event for event in metrics if event.get("event") == "eval"]),
        depth=[(int(event["step"]), int(event["depth"])) for event in train if event.get("depth") is not None],
        unigram=summary.get("unigram_loss"),
        bigram=summary.get("bigram_loss"),
    )


def find_summary(metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last summary of a run, empty while it has none."""
    return next((event for event in reversed(metrics) if event.get("event") == "summary"), {})


def _losses(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return [(float(event["step"]), float(event["loss"])) for event in events if math.isfinite(event["loss"])]


def thin(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: the means of neighbours."""
    if not points:
        return []
    pieces = np.array_split(np.array(points, dtype=float), min(most, len(points)))
    return [(float(step), float(loss)) for step, loss in (piece.mean(0) for piece in pieces)]


def loss_curve(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Train and held-out loss over steps, with the unigram and bigram losses as lines.

    Args:
        metrics: The events of `metrics.jsonl`.
    """
    curves = read_curves(metrics)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_columns(thin(curves.train, 240)), color="0.6", linewidth=1, label="train")
    axes.plot(*_columns(curves.held_out), color="#4251c2", marker="o", markersize=3, label="held-out")
    for name, loss in (("unigram", curves.unigram), ("bigram", curves.bigram)):
        if loss is not None:
            axes.axhline(loss, color="0.4", linewidth=0.8, linestyle="--")
            axes.annotate(name, (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def utilisation_heatmap(utilisation: Float[np.ndarray, "D L"]) -> Figure:
    """Share of windows per depth and block, with the number in each cell.

    Args:
        utilisation: What `lol.paths.record.utilisation` returns; each row adds up to 1.
    """
    num_depths, num_experts = utilisation.shape
    figure = Figure(figsize=(1.5 + 0.55 * num_experts, 1 + 0.38 * num_depths), layout="constrained")
    axes = figure.subplots()
    axes.imshow(utilisation, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for (depth, block), share in np.ndenumerate(utilisation):
        color = "white" if share > 0.6 else "black"
        axes.text(block, depth, f"{100 * share:.0f}", ha="center", va="center", color=color, fontsize=8)
    axes.set(xlabel="block", ylabel="depth", title="share of windows, %")
    axes.set_xticks(range(num_experts), [str(block) for block in range(num_experts)])
    axes.set_yticks(range(num_depths), [str(depth) for depth in range(num_depths)])
    for label, color in zip(axes.get_xticklabels(), block_colors(num_experts), strict=True):
        label.set_bbox({"facecolor": color, "edgecolor": "none", "boxstyle": "round,pad=0.15", "alpha": 0.55})
    return figure


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
