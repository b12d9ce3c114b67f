"""Figures of toy runs: a dot per seed, separation against depth concentration, and routing tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lol.paths.colors import block_colors
from lol.paths.figure import save_figure

_INK, _SOFT = "#1a1a1a", "#8a8a8a"
_SPLITS = {"programs": ("#2d6cdf", "any programs held out"), "functions": ("#d1495b", "whole functions held out")}


def draw_held_out(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Held-out accuracy by model: a dot per seed, a line at the mean."""
    models = list(dict.fromkeys(record["model"] for record in records))
    figure = Figure(figsize=(8, 0.6 + 0.42 * len(models)), layout="constrained")
    axes = _axes(figure)
    kinds = [kind for kind in _SPLITS if any(record["config"]["split"] == kind for record in records)]
    for place, kind in enumerate(kinds):
        color, label = _SPLITS[kind]
        for row, model in enumerate(models):
            values = [
                record["held_out"]["accuracy"]
                for record in records
                if record["model"] == model and record["config"]["split"] == kind
            ]
            height = row + 0.32 * (place - (len(kinds) - 1) / 2)
            axes.scatter(values, [height] * len(values), s=22, color=color, alpha=0.75, linewidths=0, zorder=3)
            if values:
                mean = sum(values) / len(values)
                axes.plot([mean, mean], [height - 0.14, height + 0.14], color=color, linewidth=2)
        axes.scatter([], [], s=22, color=color, label=label)
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(len(models) - 0.4, -0.6)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("held-out programs, % with all eight digits right; a dot per seed, a bar at the mean")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, fontsize=8)
    save_figure(figure, file)


def draw_separation(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Separation against depth concentration, a dot per run with a learned or given routing."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = _axes(figure)
    models = [m for m in dict.fromkeys(record["model"] for record in records) if not m.startswith(("dense", "looped"))]
    for place, model in enumerate(models):
        own = [record["trained"] for record in records if record["model"] == model]
        axes.scatter(
            [side["depth_concentration"] for side in own],
            [side["separation"] for side in own],
            s=30,
            marker="osD"[place // 8],
            color=block_colors(8)[place % 8],
            label=model,
            linewidths=0,
            alpha=0.85,
        )
    axes.set_xlabel("depth concentration: share of a block's use at its busiest step")
    axes.set_ylabel("separation: how far the block tells the primitive")
    axes.axhline(0.25, color=_SOFT, linewidth=0.8, linestyle=":")
    axes.axvline(1 / 3, color=_SOFT, linewidth=0.8, linestyle=":")
    axes.set_xlim(0.3, 1.03)
    axes.set_ylim(0.2, 1.03)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, file)


def draw_routing(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Step × primitive → share of each block, of every learned model's first seed."""
    chosen: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["config"]["routing"] == "learned":
            chosen.setdefault(record["model"], record)
    if not chosen:
        return
    figure = Figure(figsize=(7.2, 0.5 + 1.15 * len(chosen)), layout="constrained")
    grid = figure.subplots(len(chosen), 1, squeeze=False)[:, 0]
    for axes, (model, record) in zip(grid, chosen.items(), strict=True):
        names, uses = record["config"]["primitives"], record["trained"]["uses"]
        labels, left = [], 0.0
        colors = block_colors(record["config"]["num_blocks"])
        for step, by_primitive in enumerate(uses):
            for name, counts in zip(names, by_primitive, strict=True):
                bottom = 0.0
                for block, count in enumerate(counts):
                    share = count / max(1, sum(counts))
                    axes.bar(left, share, bottom=bottom, width=0.92, color=colors[block], linewidth=0)
                    bottom += share
                labels.append((left, name))
                left += 1
            if axes is grid[0]:
                middle = left - (len(names) + 1) / 2
                axes.text(middle, 1.06, f"step {step + 1}", ha="center", va="bottom", fontsize=8, color=_INK)
            left += 0.6
        axes.set_xticks([place for place, _ in labels], [name for _, name in labels], fontsize=6.5)
        axes.set_yticks([])
        axes.set_ylabel(model, rotation=0, ha="right", va="center", fontsize=8)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.suptitle("Share of each block (colour) by step and primitive; the first seed", fontsize=9)
    save_figure(figure, file)


def _axes(figure: Figure) -> Axes:
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, color=_SOFT, labelcolor=_INK)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes
