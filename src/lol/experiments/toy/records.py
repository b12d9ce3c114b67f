"""Records of runs and discoveries, as the tables and figures read them."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lol.errors import UserError
from lol.experiments.toy.task import ARTICLE, DISTINCT, Program, Task

Record = dict[str, Any]

_SETS = {ARTICLE: "the article's primitives", DISTINCT: "primitives whose programs all differ"}

_PARTS = ("model", "command", "config", "seed", "trained", "held_out")

LENGTHS = {
    "lengths": "as it is",
    "lengths_as_digits": "as probabilities of digits",
    "lengths_as_hard_digits": "as hard digits",
}
"""The ways to hand the state on with which programs of other lengths are measured."""


def weights_of(record: Path) -> Path:
    """Where a run's weights are: beside its record, for `lol toy play`; git leaves them out."""
    return record.with_suffix(".safetensors")


def read_record(file: Path) -> Record:
    """The record of a run or a discovery.

    Raises:
        UserError: the file is none.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        missing = [name for name in _PARTS if name not in record]
        if missing or not isinstance(record, dict):
            raise ValueError(f"it has no {', '.join(missing)}")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file} is no record of a toy run ({error}): name a file that `lol toy run` or `lol toy discover` wrote"
        ) from None
    return record


def read_records(folder: Path, order: Sequence[str]) -> list[Record]:
    """All records of a folder, in this order of models, then of split and seed; none without a folder.

    Raises:
        UserError: a file is no record, or of a model that is not in the order, or of the same run as another.
    """
    records: dict[tuple[int, str, int], Record] = {}
    for file in sorted(folder.glob("*.json")):
        record = read_record(file)
        if record["model"] not in order:
            raise UserError(f"{file} is of {record['model']}, which has no row here: take it out of {folder}")
        run = (order.index(record["model"]), split_of(record), record["seed"])
        if run in records:
            raise UserError(f"{file} is a second record of `{record['command']}`: take one of them out of {folder}")
        records[run] = record
    return [records[run] for run in sorted(records)]


def toy_of(record: Record) -> dict[str, Any]:
    """The settings of the toy itself: a discovery has more around them."""
    return record["config"].get("toy", record["config"])


def split_of(record: Record) -> str:
    """Name of the split: its kind and number."""
    toy = toy_of(record)
    return f"{toy['split']} {toy['split_number']}"


def by_row(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """The records by what a row of a table is for: a model, or a discovery, on a split."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        rows.setdefault((record["model"], split_of(record)), []).append(record)
    return rows


def tested_on_lengths(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """The records that were tested on programs of other lengths than the trained ones, and these lengths."""
    tested = [record for record in records if "lengths" in record["held_out"]]
    return tested, list(dict.fromkeys(length for record in tested for length in record["held_out"]["lengths"]))


def primitives_of(record: Record) -> str:
    """What the set of primitives is called in a heading."""
    primitives = tuple(toy_of(record)["primitives"])
    return _SETS.get(primitives, f"{len(primitives)} primitives")


def by_function(record: Record) -> dict[str, float]:
    """Mean accuracy in percent of the held-out programs that compute what a trained one computes ("known"), and of the
    others ("new"); a key is missing where there are none."""
    toy = toy_of(record)
    task = Task(tuple(toy["primitives"]), toy["steps"])
    return split_by_function(task, record["trained"]["by_program"], record["held_out"]["by_program"])


def split_by_function(task: Task, trained: Iterable[str], accuracies: Mapping[str, float]) -> dict[str, float]:
    """The same of these trained programs and the accuracy of others; programs are written as in a record."""
    functions = _functions(task)
    known = {functions[program] for program in trained}
    kinds: dict[str, list[float]] = {}
    for program, accuracy in accuracies.items():
        kinds.setdefault("known" if functions[program] in known else "new", []).append(accuracy)
    return {kind: sum(own) / len(own) for kind, own in kinds.items()}


def written(program: Program) -> str:
    """A program as a record writes it."""
    return "".join(map(str, program))


@cache
def _functions(task: Task) -> dict[str, int]:
    return {written(program): number for program, number in task.functions.items()}


def mean_of(records: Sequence[Record], side: str, key: str) -> float | None:
    """The mean of what these records say of a side (trained, held_out); `None` where none says it."""
    return _mean_of_known([record[side].get(key) for record in records])


def mean_at_length(records: Sequence[Record], kind: str, length: str) -> float | None:
    """Mean over seeds of the share of random programs of a length; `None` where none of them measured it."""
    return _mean_of_known([record["held_out"].get(kind, {}).get(length) for record in records])


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None
