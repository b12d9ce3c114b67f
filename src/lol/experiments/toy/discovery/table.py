"""The tables of discoveries."""

from collections.abc import Sequence
from pathlib import Path

import torch

from lol.experiments.toy.discovery.runs import DISCOVERIES
from lol.experiments.toy.records import (
    LENGTHS,
    Record,
    by_row,
    mean_at_length,
    mean_of,
    read_records,
    tested_on_lengths,
)
from lol.paths.agreement import separation_over_depths


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
    lines += [_row(name, split, own) for (name, split), own in by_row(records).items()]
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
    tested, lengths = tested_on_lengths(records)
    if not tested:
        return []
    lines = [
        "### Programs of other lengths",
        "",
        "Mean over seeds, % of random programs of a length: the state as it is / written between the blocks as the mean"
        " of all digits under the head's probabilities / as the most probable digits.",
        "",
        "| router | split | seeds | " + " | ".join(f"{length} steps" for length in lengths) + " |",
        "|---|---|---|" + "---|" * len(lengths),
    ]
    for (name, split), own in by_row(tested).items():
        cells = [" / ".join(_one_decimal(mean_at_length(own, kind, length)) for kind in LENGTHS) for length in lengths]
        lines.append(f"| {name} | {split} | {len(own)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _one_decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _row(name: str, split: str, records: Sequence[Record]) -> str:
    def mean(side: str, key: str = "accuracy") -> str:
        return _one_decimal(mean_of(records, side, key))

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
