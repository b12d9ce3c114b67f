"""The results on the disk as pages: tables, figures, records, confusions, and the commands that made them.

results/NAME/ is what the verbs write: `lol experiment` results.json, section.md and figures; `lol toy` table.md,
figures and a record for each run in runs/ and discovery/; `lol bench` a JSON file for each bench. Nothing here is
executed: JSON is read, Markdown sent as text, and pictures as pictures.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lol.serve.errors import NotFound
from lol.studio.folders import files, subfolders

MAX_COMMANDS = 200
MAX_FILE_BYTES = 2**20
MAX_DATA_BYTES = 2**18
MAX_FIGURE_BYTES = 16 * 2**20
MAX_RECORDS = 2000
_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
Kind = Literal["run", "discovery"]
_RECORDS: dict[str, Kind] = {"runs": "run", "discovery": "discovery"}


class ResultNotFound(NotFound):
    """A request names results that are not there."""

    param = "name"
    code = "result_not_found"


@dataclass(frozen=True)
class ResultSummary:
    name: str
    title: str
    files: int


@dataclass(frozen=True)
class ResultList:
    experiments: list[ResultSummary]


@dataclass(frozen=True)
class Document:
    file: str
    markdown: str


@dataclass(frozen=True)
class Figure:
    file: str
    caption: str


@dataclass(frozen=True)
class RunRecord:
    """A run of the toy: accuracies in percent."""

    model: str
    split: str
    split_number: int
    seed: int
    kind: Kind
    trained: float | None
    held_out: float | None
    separation: float | None


@dataclass(frozen=True)
class Confusion:
    """What was asked for (rows) against what came out (columns), as shares of a row."""

    title: str
    labels: list[str]
    columns: list[str]
    matrix: list[list[float]]


@dataclass(frozen=True)
class DataFile:
    file: str
    json: Any


@dataclass(frozen=True)
class ResultsOf:
    name: str
    commands: list[str]
    documents: list[Document]
    figures: list[Figure]
    records: list[RunRecord] | None
    confusions: list[Confusion]
    data: list[DataFile]


class Results:
    """The folder of results."""

    def __init__(self, root: Path | None):
        self.root = root

    def listed(self) -> ResultList:
        """What there is, by name."""
        found = []
        for name, folder in self._folders().items():
            own = files(folder, ".md", ".json", *_KINDS)
            records = sum(len(files(inner, ".json")) for inner in _record_folders(folder).values())
            if own or records:
                found.append(ResultSummary(name, _title(name, folder), len(own) + records))
        return ResultList(found)

    def read(self, name: str) -> ResultsOf:
        """All of one experiment.

        Raises:
            ResultNotFound: there is none of this name.
        """
        folder = self._folder(name)
        documents = [Document(file, text) for file, path in files(folder, ".md").items() if (text := _text(path))]
        own = {file: value for file, path in files(folder, ".json").items() if (value := _json(path)) is not None}
        records: dict[Kind, list[dict[str, Any]]] = {
            kind: [value for path in files(inner, ".json").values() if isinstance(value := _json(path), dict)]
            for kind, inner in _record_folders(folder).items()
        }
        everything = [*own.items(), *(("", record) for some in records.values() for record in some)]
        return ResultsOf(
            name=name,
            commands=_commands(everything),
            documents=documents,
            figures=_figures(folder, documents),
            records=_run_records(records) or None,
            confusions=[one for file, value in own.items() for one in _confusions(file, value)],
            data=[
                DataFile(file, value) for file, value in own.items() if (folder / file).stat().st_size <= MAX_DATA_BYTES
            ],
        )

    def figure(self, name: str, file: str) -> tuple[bytes, str]:
        """A picture and its media type.

        Raises:
            ResultNotFound: there is none of this name.
        """
        path = files(self._folder(name), *_KINDS).get(file)
        if path is None or path.stat().st_size > MAX_FIGURE_BYTES:
            raise ResultNotFound(f"{name} has no figure {file!r}: choose one that /api/results/{name} lists")
        return path.read_bytes(), _KINDS[path.suffix]

    def _folders(self) -> dict[str, Path]:
        return {} if self.root is None else subfolders(self.root)

    def _folder(self, name: str) -> Path:
        folder = self._folders().get(name)
        if folder is None:
            raise ResultNotFound(f"there are no results {name!r}: choose some that /api/results lists")
        return folder


def _record_folders(folder: Path) -> dict[Kind, Path]:
    return {_RECORDS[name]: inner for name, inner in subfolders(folder).items() if name in _RECORDS}


def _title(name: str, folder: Path) -> str:
    """The first heading of what is written there, else the name."""
    for path in files(folder, ".md").values():
        heading = re.search(r"^# +(.+)$", _text(path), re.MULTILINE)
        if heading is not None:
            return heading[1].strip()
    return name.replace("-", " ").capitalize()


def _text(path: Path) -> str:
    try:
        return "" if path.stat().st_size > MAX_FILE_BYTES else path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> Any:
    """What a file holds; `None` where it is too large or no JSON."""
    text = _text(path)
    try:
        return _finite(json.loads(text)) if text else None
    except (ValueError, RecursionError):
        return None


def _finite(value: Any) -> Any:
    """Python reads NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _commands(values: list[tuple[str, Any]]) -> list[str]:
    """Of files and records, each once, in their order."""
    found = []
    for file, value in values:
        command = _mapping(value).get("command") or _bench_command(file, value)
        if isinstance(command, str):
            found.append(command)
    return list(dict.fromkeys(found))[:MAX_COMMANDS]


def _bench_command(file: str, value: Any) -> str | None:
    """A bench records its flags as options, and its file is called by the part that is timed."""
    options = _mapping(value).get("options")
    part = re.match(r"core|decode|train|toy|gpu", file)
    if part is None or not isinstance(options, dict):
        return None
    words = ["lol", "bench", part[0]]
    for name, given in options.items():
        words += [f"--{name.replace('_', '-')}", *(map(str, given) if isinstance(given, list) else [str(given)])]
    return shlex.join(words)


def _figures(folder: Path, documents: list[Document]) -> list[Figure]:
    """A figure is called as the text calls it, else by its file."""
    named = {file: alt for text in documents for alt, file in re.findall(r"!\[([^\]]+)\]\(([^)\s]+)\)", text.markdown)}
    return [
        Figure(file, named.get(file) or file.rpartition(".")[0].replace("-", " ").capitalize())
        for file in files(folder, *_KINDS)
    ]


def _run_records(records: Mapping[Kind, list[dict[str, Any]]]) -> list[RunRecord]:
    found = []
    for kind, some in records.items():
        for record in some:
            config, *sides = (_mapping(record.get(name)) for name in ("config", "trained", "held_out"))
            toy = config.get("toy", config)
            try:
                found.append(
                    RunRecord(
                        model=str(record["model"]),
                        split=str(toy["split"]),
                        split_number=int(toy["split_number"]),
                        seed=int(record["seed"]),
                        kind=kind,
                        trained=_number(sides[0].get("accuracy")),
                        held_out=_number(sides[1].get("accuracy")),
                        separation=_number(sides[0].get("separation")),
                    )
                )
            except (LookupError, TypeError, ValueError):
                # Not a record of the toy.
                continue
    return found[:MAX_RECORDS]


def _confusions(file: str, value: Any) -> Iterator[Confusion]:
    """Of an experiment with strategies: per run and weight, whose path was forced against what came out."""
    numbers = value.get("numbers") if isinstance(value, dict) else None
    for run, own in numbers.items() if isinstance(numbers, dict) else ():
        forced = own.get("forced") if isinstance(own, dict) else None
        for weight, counts in forced.items() if isinstance(forced, dict) else ():
            try:
                labels = [str(name) for name in own["strategies"]]
                rows = [
                    [*counts["matrix"][place], counts["tied"][place], counts["unsolved"][place]]
                    for place in range(len(labels))
                ]
                shares = [[float(cell) / max(sum(row), 1) for cell in row] for row in rows]
            except (LookupError, TypeError, ValueError):
                continue
            title = f"{run}: forced against written, weight {weight} ({file})"
            yield Confusion(title, labels, [*labels, "tied", "not solved"], shares)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
