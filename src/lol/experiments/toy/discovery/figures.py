"""Figures of discoveries: a routing table that forms, and programs of other lengths than the trained ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lol.experiments.toy.figures import save_figure
from lol.experiments.toy.records import LENGTHS, Record, by_row, mean_at_length, tested_on_lengths

_PICTURES = 6


def draw_forming(record: Record, file: Path) -> None:
    """What each instruction's choice would be while training goes on: probability of each block, at some steps.

    Rows are the instructions of a step after those of the step before; of `mix` they are read for the step they name.
    """
    toy, history = record["config"]["toy"], record["history"]
    shown = [history[round(place * (len(history) - 1) / (_PICTURES - 1))] for place in range(_PICTURES)]
    figure = Figure(figsize=(1.6 * _PICTURES, 0.8 + 0.17 * toy["steps"] * len(toy["primitives"])), layout="constrained")
    grid = figure.subplots(1, _PICTURES, sharey=True)
    labels = [f"{name} {step + 1}" for step in range(toy["steps"]) for name in toy["primitives"]]
    for axes, moment in zip(grid, shown, strict=True):
        axes.imshow(_rows(moment, record["config"]["rule"]), cmap="Greys", vmin=0, vmax=1, aspect="auto")
        axes.set_title(f"step {moment['step']:,}", fontsize=8)
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.set_xticks(range(toy["num_blocks"]))
        axes.tick_params(length=0, labelsize=7)
        for step in range(1, toy["steps"]):
            axes.axhline(step * len(toy["primitives"]) - 0.5, color="#d1495b", linewidth=0.8)
    figure.supxlabel("block", fontsize=8)
    save_figure(figure, file)


def _rows(moment: dict[str, Any], rule: str) -> list[list[float]]:
    """Steps × primitives rows of L probabilities."""
    scores = moment["scores"]
    if rule == "mix":
        scores = [step[own] for own, step in enumerate(scores)]
    return [row for step in scores for row in step]


def draw_lengths(records: Sequence[Record], file: Path) -> None:
    """Share of random programs of each length that are right, mean over seeds: a row for each discovery and split, a
    panel for each way to hand the state on. Grey where nothing was measured; no figure where none was."""
    tested, lengths = tested_on_lengths(records)
    if not tested:
        return
    rows = by_row(tested)
    figure = Figure(figsize=(11, 0.9 + 0.24 * len(rows)), layout="constrained")
    grid = figure.subplots(1, len(LENGTHS), sharey=True)
    for axes, (kind, title) in zip(grid, LENGTHS.items(), strict=True):
        shares = np.full((len(rows), len(lengths)), np.nan)
        for y, own in enumerate(rows.values()):
            for x, length in enumerate(lengths):
                share = mean_at_length(own, kind, length)
                if share is not None:
                    shares[y, x] = share
                    color = "white" if share > 60 else "#333333"
                    axes.text(x, y, f"{share:.0f}", ha="center", va="center", fontsize=6, color=color)
        axes.set_facecolor("#dddddd")
        axes.imshow(shares, cmap="Greens", vmin=0, vmax=100, aspect="auto")
        axes.set_title(f"state handed on {title}", fontsize=9)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(rows)), [f"{name}, {split}" for name, split in rows])
        axes.tick_params(length=0, labelsize=7)
        axes.set_xlabel("steps of the program", fontsize=8)
    save_figure(figure, file)
