"""The table of discoveries, and the picture of a routing table that forms."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from lol.experiments.toy.discovery.runs import DISCOVERIES
from lol.experiments.toy.figures import save_figure
from lol.experiments.toy.records import Record, mean_of, read_records, split_of
from lol.paths.agreement import separation_over_depths

_PICTURES = 6
_LENGTHS = ("lengths", "lengths_as_digits", "lengths_as_hard_digits")


def read_discoveries(folder: Path) -> list[Record]:
    """All records of a folder, `ord` first, then in the order of `DISCOVERIES`, split, seed; none without a folder."""
    return read_records(folder, ["ord", *DISCOVERIES])


def discovery_section(records: Sequence[Record]) -> str:
    """A row for each discovery and split; held-out programs apart by whether a trained one computes the same."""
    lines = [
        "## Routers that look for the primitives",
        "",
        "| router | split | held out %, mean | every seed | known functions % | new functions % | validation % |"
        " trained % | separation, every seed | over all steps |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, split in dict.fromkeys((record["model"], split_of(record)) for record in records):
        lines.append(_row(name, split, [r for r in records if (r["model"], split_of(r)) == (name, split)]))
    lines += [
        "",
        "Separation is 1 where each block has one primitive at a step, be it another at the next; over all steps it is"
        " 1 where a block has one primitive wherever it runs.",
        "",
        f"From `lol toy discover`, one line each: `{records[0]['command']}`.",
        "",
    ]
    return "\n".join([*lines, *_lengths_section(records)])


def _lengths_section(records: Sequence[Record]) -> list[str]:
    """A row for each discovery and split that was tested on programs of other lengths than the trained ones."""
    tested = [record for record in records if "lengths" in record["held_out"]]
    if not tested:
        return []
    lengths = list(dict.fromkeys(length for record in tested for length in record["held_out"]["lengths"]))
    lines = [
        "### Programs of other lengths",
        "",
        "Mean over seeds, % of random programs of a length: the state as it is / written between the blocks as the mean"
        " of all digits under the head's probabilities / as the most probable digits.",
        "",
        "| router | split | seeds | " + " | ".join(f"{length} steps" for length in lengths) + " |",
        "|---|---|---|" + "---|" * len(lengths),
    ]
    for name, split in dict.fromkeys((record["model"], split_of(record)) for record in tested):
        own = [record["held_out"] for record in tested if (record["model"], split_of(record)) == (name, split)]
        cells = [
            " / ".join(_mean([side.get(kind, {}).get(length) for side in own]) for kind in _LENGTHS)
            for length in lengths
        ]
        lines.append(f"| {name} | {split} | {len(own)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.1f}" if known else "–"


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


def _row(name: str, split: str, records: Sequence[Record]) -> str:
    def mean(side: str, key: str = "accuracy") -> str:
        value = mean_of(records, side, key)
        return "–" if value is None else f"{value:.1f}"

    def every(key: str, digits: int) -> str:
        return ", ".join(f"{record['held_out'][key]:.{digits}f}" for record in records)

    cells = [
        name,
        split,
        f"**{mean('held_out')}**",
        every("accuracy", 1),
        mean("held_out", "known_functions"),
        mean("held_out", "new_functions"),
        mean("validation"),
        mean("trained"),
        every("separation", 2),
        ", ".join(f"{separation_over_depths(torch.tensor(r['trained']['uses'])):.2f}" for r in records),
    ]
    return "| " + " | ".join(cells) + " |"
