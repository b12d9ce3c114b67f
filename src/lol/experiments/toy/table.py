"""The toy's tables and figures, from the records of its runs and beside the article's numbers."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lol.errors import UserError
from lol.experiments.toy.config import MODELS
from lol.experiments.toy.discover_table import discovery_section, draw_forming, read_discoveries
from lol.experiments.toy.figures import draw_held_out, draw_routing, draw_separation

Record = dict[str, Any]

ARTICLE: dict[str, str] = {
    "dense": "25.5 (13.9-33.8; round one 9.8)",
    "looped": "8.0 (round one)",
    "given": "38.4 (29.8-49.0; round one 44.0)",
    "given-step-primitive": "60.0 (40.4-76.4)",
    "given-relabelled": "15.2 (6.2-21.3)",
    "given-program": "0.0",
    "given-blind": "–",
    "learned": "12.3 (2.9-20.7; round one 4.2)",
    "learned-untied": "8.3 (round one)",
    "learned-8": "6.6 (round one)",
    "router-only": "14.8 (round one)",
    "router-only-untied": "16.5 (round one)",
    "learned-sequence-balance": "12.4",
    "learned-balance-per-depth": "11.2",
    "learned-soft": "0.2 (soft 15.1)",
    "learned-gumbel": "1.3 (soft 17.5)",
    "dense-lr1e-3": "12.8",
    "given-lr1e-3": "19.4",
    "learned-lr1e-3": "9.0",
    "dense-wd0.1": "23.8",
    "given-wd0.1": "40.5",
}
"""Held-out accuracy in percent that the article reports: mean, and range where it gives one."""


@dataclass(frozen=True)
class ToyTable:
    """Write the toy's table and figures from the records that are there.

    Example: lol toy table --out results/toy
    """

    runs: Path = Path("results/toy/runs")
    """Folder of the records."""
    discovery: Path = Path("results/toy/discovery")
    """Folder of the records of `lol toy discover`; it may be missing."""
    out: Path = Path("results/toy")
    """Folder that is written: table.md, held-out.svg, separation.svg, routing.svg, forming.svg."""


def toy_table(command: ToyTable) -> str:
    """Write the files; returns the table's text. Raises UserError without records."""
    records = read_records(command.runs)
    if not records:
        raise UserError(f"there are no records in {command.runs}: start some with `lol toy all --out {command.runs}`")
    text = "\n".join(_section(split, records) for split in sorted({split_of(record) for record in records}))
    command.out.mkdir(parents=True, exist_ok=True)
    discoveries = read_discoveries(command.discovery)
    if discoveries:
        text += "\n" + discovery_section(discoveries)
        draw_forming(discoveries[0], command.out / "forming.svg")
    (command.out / "table.md").write_text(text, encoding="utf-8")
    draw_held_out(records, command.out / "held-out.svg")
    draw_separation(records, command.out / "separation.svg")
    draw_routing(records, command.out / "routing.svg")
    return text


def read_records(folder: Path) -> list[Record]:
    """All records of a folder, in the order of the article's models, then of split and seed."""
    order = list(MODELS)
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return sorted(records, key=lambda record: (order.index(record["model"]), split_of(record), record["seed"]))


def split_of(record: Record) -> str:
    """Name of the split: its kind and number."""
    return f"{record['config']['split']}-{record['config']['split_number']}"


def _section(split: str, records: Sequence[Record]) -> str:
    kind, number = split.split("-")
    what = "any programs held out" if kind == "programs" else "whole functions held out"
    lines = [
        f"## Split {number}: {what}",
        "",
        "| model | held out %, mean | every seed | article | trained % | separation | depth concentration |"
        " mode path forced % | kept soft % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(record["model"] for record in records):
        own = [record for record in records if record["model"] == model and split_of(record) == split]
        if own:
            lines.append(_row(model, own))
    return "\n".join([*lines, "", f"From `lol toy all`, one line each: `{own_commands(records, split)}`.", ""])


def own_commands(records: Sequence[Record], split: str) -> str:
    """The command of the first run of a split; the others differ in model and seed."""
    return next(record["command"] for record in records if split_of(record) == split)


def _row(model: str, records: Sequence[Record]) -> str:
    def mean(side: str, key: str, digits: int) -> str:
        values = [record[side][key] for record in records if key in record[side]]
        return f"{statistics.mean(values):.{digits}f}" if values else ""

    seeds = ", ".join(f"{record['held_out']['accuracy']:.1f}" for record in records)
    cells = [
        model,
        f"**{mean('held_out', 'accuracy', 1)}**",
        seeds,
        ARTICLE[model],
        mean("trained", "accuracy", 1),
        mean("trained", "separation", 2),
        mean("trained", "depth_concentration", 2),
        mean("held_out", "mode_path_accuracy", 1),
        mean("held_out", "soft_accuracy", 1),
    ]
    return "| " + " | ".join(cells) + " |"
