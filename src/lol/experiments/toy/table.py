"""The toy's tables and figures, from the records of its runs and beside the article's numbers."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lol.errors import UserError
from lol.experiments.toy.config import CHOICE_MODELS, CHOICES, CHOSEN_MODELS, MODELS, choice_name
from lol.experiments.toy.discovery.figures import draw_forming, draw_lengths
from lol.experiments.toy.discovery.table import discovery_section, read_discoveries
from lol.experiments.toy.figures import draw_held_out, draw_routing, draw_separation
from lol.experiments.toy.orderings import orderings_section
from lol.experiments.toy.records import Record, by_function, mean_of, primitives_of, read_records, split_of
from lol.experiments.toy.task import ARTICLE as ARTICLE_PRIMITIVES

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
    """Folder that is written: table.md, held-out.svg, unsaid.svg, separation.svg, routing.svg, forming.svg,
    lengths.svg."""


def toy_table(command: ToyTable) -> str:
    """Write the files; returns the table's text. Raises UserError without records."""
    records = read_records(command.runs, list(MODELS))
    if not records:
        raise UserError(f"there are no records in {command.runs}: start some with `lol toy all --out {command.runs}`")
    main = [record for record in records if record["model"] not in CHOSEN_MODELS]
    groups = _group(main)
    sections = [_section(name, group) for name, group in groups.items()]
    if groups:
        sections.append(orderings_section(groups))
    if len(main) < len(records):
        chosen = [record for record in records if record["model"] in CHOSEN_MODELS]
        sections += [_unsaid_section(split, records) for split in sorted({split_of(record) for record in chosen})]
    discoveries = read_discoveries(command.discovery)
    command.out.mkdir(parents=True, exist_ok=True)
    if discoveries:
        sections.append(discovery_section(discoveries))
        draw_forming(discoveries[0], command.out / "forming.svg")
        draw_lengths(discoveries, command.out / "lengths.svg")
    text = "\n".join(sections)
    (command.out / "table.md").write_text(text, encoding="utf-8")
    _draw(main, records, command.out)
    return text


def _group(records: Sequence[Record]) -> dict[str, Sequence[Record]]:
    """The records by primitives and split, under what the heading says of them."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=_place_of):
        kind, number = split_of(record).split()
        held_out = {"programs": "any programs held out", "functions": "whole functions held out"}[kind]
        groups.setdefault(f"{primitives_of(record)}, {held_out} (split {number})", []).append(record)
    return dict(groups)


def _place_of(record: Record) -> tuple[bool, bool, str]:
    """The article's primitives come first, and its kind of split."""
    config = record["config"]
    return tuple(config["primitives"]) != ARTICLE_PRIMITIVES, config["split"] != "programs", split_of(record)


def _draw(main: Sequence[Record], records: Sequence[Record], out: Path) -> None:
    if main:
        draw_held_out(main, out / "held-out.svg")
        draw_separation(main, out / "separation.svg")
        draw_routing(main, out / "routing.svg")
    if len(main) < len(records):
        kinds = {record["config"]["split"] for record in records if record["model"] in CHOSEN_MODELS}
        own = [record for record in records if record["config"]["split"] in kinds]
        by_model = [name for model in CHOICE_MODELS for name in (model, *(choice_name(model, c) for c in CHOICES))]
        compared = [record for name in by_model for record in own if record["model"] == name]
        draw_held_out(compared, out / "unsaid.svg")


def _section(name: str, records: Sequence[Record]) -> str:
    lines = [
        f"## {name[0].upper()}{name[1:]}",
        "",
        "| model | held out %, mean | every seed | article | known functions %, mean | new functions %, every seed |"
        " trained % | separation | depth concentration | mode path forced % | kept soft % |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(record["model"] for record in records):
        lines.append(_row(model, [record for record in records if record["model"] == model]))
    return "\n".join([*lines, "", f"From `lol toy all`, one line each: `{records[0]['command']}`.", ""])


def _row(model: str, records: Sequence[Record]) -> str:
    def mean(side: str, key: str, digits: int) -> str:
        value = mean_of(records, side, key)
        return "" if value is None else f"{value:.{digits}f}"

    cells = [
        model,
        f"**{mean('held_out', 'accuracy', 1)}**",
        _every_seed(records),
        ARTICLE.get(model, "–"),
        f"{statistics.mean(known):.1f}" if (known := _of_functions(records, "known")) else "–",
        _listed(_of_functions(records, "new")),
        mean("trained", "accuracy", 1),
        mean("trained", "separation", 2),
        mean("trained", "depth_concentration", 2),
        mean("held_out", "mode_path_accuracy", 1),
        mean("held_out", "soft_accuracy", 1),
    ]
    return "| " + " | ".join(cells) + " |"


def _unsaid_section(split: str, records: Sequence[Record]) -> str:
    """A row for each way to fill what the article leaves unsaid that was run, ours first; a column for each model."""
    own = [record for record in records if split_of(record) == split]
    lines = [
        f"## What the article leaves unsaid (split {split})",
        "",
        "Held out %: mean (every seed); of these, programs that compute a new function: every seed.",
        "",
        f"| choice | {' | '.join(CHOICE_MODELS)} |",
        f"|---|{'---|' * len(CHOICE_MODELS)}",
        f"| article | {' | '.join(ARTICLE[model] for model in CHOICE_MODELS)} |",
    ]
    for choice in ("ours", *CHOICES):
        names = CHOICE_MODELS if choice == "ours" else [choice_name(model, choice) for model in CHOICE_MODELS]
        runs = [[record for record in own if record["model"] == name] for name in names]
        if any(runs):
            lines.append(f"| {choice} | {' | '.join(map(_cell, runs))} |")
    return "\n".join([*lines, ""])


def _cell(records: Sequence[Record]) -> str:
    mean = mean_of(records, "held_out", "accuracy")
    new = _listed(_of_functions(records, "new"))
    return "–" if mean is None else f"**{mean:.1f}** ({_every_seed(records)}); {new}"


def _every_seed(records: Sequence[Record]) -> str:
    return _listed([record["held_out"]["accuracy"] for record in records])


def _of_functions(records: Sequence[Record], kind: str) -> list[float]:
    return [accuracy[kind] for accuracy in map(by_function, records) if kind in accuracy]


def _listed(percents: Sequence[float]) -> str:
    return ", ".join(f"{percent:.1f}" for percent in percents) or "–"
