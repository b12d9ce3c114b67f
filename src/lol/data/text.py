"""Sources of text as one stream of documents, and the split into training and held-out documents.

Every source becomes a `datasets.IterableDataset` with two string columns: `text`, one document, and `group`, which
decides the side of the split; and with a third, `router_only`, where one is asked for: what of the document only the
router may read; likewise `label`, for measuring. Documents of one group are always on the same side:

| source                     | documents                               | group             |
|----------------------------|-----------------------------------------|-------------------|
| `stdlib`                   | the standard library's files, cut       | top-level module  |
| a text file                | the file, cut                           | hash of the text  |
| a folder                   | its text files whole, its rows          | path or hash      |
| `.jsonl`, `.parquet`       | its rows                                | hash of the text  |
| `hf:NAME[:CONFIG][:SPLIT]` | its rows, streamed                      | hash of the text  |

Reading is lazy and in a fixed order. Documents of white space only are left out, everything else arrives unchanged
(line ends as "\\n"). Nothing is unpickled and no code that comes with data is run.
"""

import hashlib
import itertools
import json
import os
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
from datasets import Features, IterableDataset, Value, load_dataset

from lol.data.stdlib import stdlib_files
from lol.errors import UserError

# What a folder's files must end in to count as text; a file named directly may end in anything.
# fmt: off
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".css", ".xml", ".csv", ".tsv",
    ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".py", ".pyi", ".js", ".ts", ".c", ".h", ".cc", ".cpp",
    ".hpp", ".cs", ".go", ".rs", ".java", ".kt", ".scala", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs",
    ".ml", ".lisp", ".el", ".sh", ".sql",
})
# fmt: on
ROW_SUFFIXES = frozenset({".jsonl", ".parquet"})
# Files are dealt into at most this many shards: enough to shuffle and to share among workers, few enough to open.
_MAX_SHARDS = 64
# A document without a blank line is cut at a line's end once it is this many times longer than asked for.
_PATIENCE = 4


class _Columns(NamedTuple):
    """The columns of rows that are read."""

    text: str
    router_only: str | None
    label: str | None = None

    @property
    def others(self) -> dict[str, str]:
        """The columns beside the text that are asked for, by our names."""
        named = {"router_only": self.router_only, "label": self.label}
        return {ours: column for ours, column in named.items() if column is not None}

    @property
    def names(self) -> list[str]:
        # A label may be what the router reads.
        return list(dict.fromkeys([self.text, *self.others.values()]))

    @property
    def features(self) -> Features:
        return Features({name: Value("string") for name in ("text", "group", *self.others)})


class _File(NamedTuple):
    """One file to read: `kind` is "whole", "cut", "code" (cut, in the encoding it declares), ".jsonl" or ".parquet"."""

    path: str
    kind: str
    group: str | None


def open_documents(
    source: str,
    *,
    text_column: str = "text",
    document_chars: int = 2000,
    router_only_column: str | None = None,
    label_column: str | None = None,
) -> IterableDataset:
    """Open a source of text as a stream of documents.

    Args:
        source: `stdlib`, a text file, a folder, a `.jsonl` or `.parquet` file, or `hf:NAME[:CONFIG][:SPLIT]`. In a
            folder every file below it counts that ends in one of `TEXT_SUFFIXES` (one document each), `.jsonl` or
            `.parquet` (one document per row); names that begin with a dot are skipped, folders too. The parts after
            `hf:` are told apart by the colons: the first is the name on the Hub or a local folder, the second the
            configuration (empty: the default one), the third the split (default: `train`), so `hf:NAME::test` gives
            only a split.
        text_column: the column of rows that holds the text.
        document_chars: a text file and the standard library's files are cut at the first blank line after this many
            characters; where none comes in four times as many, at the end of a line, and a line longer than that
            within it. The last document takes in a shorter rest.
        router_only_column: the column of rows that holds what only the router may read of the row's document (it may be
            empty); text files have none.
        label_column: likewise, the column that says what the row's document is: a text, a whole number, true or false.

    Raises:
        UserError: the path is missing, nothing is in it, it is not UTF-8 text, a row cannot be read or lacks a column,
            a column is asked for of a text file. What is further down a source is read, and complained of, when the
            stream gets there.
    """
    if document_chars < 1:
        raise UserError(f"document_chars is {document_chars}; it must be at least 1")
    if text_column == router_only_column:
        raise UserError(f"{text_column!r} is the column of the text, which everything reads: name another one")
    columns = _Columns(text_column, router_only_column, label_column)
    if source.startswith("hf:"):
        documents = _open_hub(source, columns)
    else:
        files = _list_files(source)
        plain = next((file.path for file in files if file.kind not in ROW_SUFFIXES), None)
        if columns.others and plain is not None:
            asked = " or ".join(repr(column) for column in columns.others.values())
            raise UserError(
                f"{plain}: a text file has no column {asked}; give documents as rows of .jsonl or"
                " .parquet files, or name no column but the text's"
            )
        shards = [tuple(files[k::_MAX_SHARDS]) for k in range(min(_MAX_SHARDS, len(files)))]
        settings = {"shards": shards, "columns": columns, "document_chars": document_chars}
        documents = IterableDataset.from_generator(_read_shards, gen_kwargs=settings, features=columns.features)
    if next(iter(documents), None) is None:
        raise UserError(f"{source}: there is no text in it; give a file, folder or data set that holds some")
    return documents


def split_documents(
    documents: IterableDataset, held_out_fraction: float = 0.05
) -> tuple[IterableDataset, IterableDataset]:
    """Split documents into (training, held out) by a hash of their group.

    A group is held out if the first 8 bytes of its SHA-256, read as a fraction of 2^64, lie below
    `held_out_fraction`. So the side depends on the group's name only: not on the order, the machine, the Python
    version or what else is in the source. The fraction is one of groups; of tokens it is met on average only.

    Raises:
        UserError: the fraction is not between 0 and 1, or one of the two sides has no document.
    """
    if not 0 < held_out_fraction < 1:
        raise UserError(f"the held-out fraction is {held_out_fraction}; it must lie between 0 and 1")
    sides = []
    for held_out, name, fix in ((False, "training", "lower"), (True, "held-out", "raise")):
        settings = {"fraction": held_out_fraction, "held_out": held_out}
        side = documents.filter(_is_on_side, input_columns=["group"], fn_kwargs=settings)
        if next(iter(side), None) is None:
            raise UserError(
                f"no {name} document is left at a held-out fraction of {held_out_fraction}: {fix} it, or give more"
                " documents (a text file is cut into more of them with a smaller document_chars; a folder counts"
                " each text file as one)"
            )
        sides.append(side)
    return sides[0], sides[1]


def cut_text(readline: Callable[[int], str], document_chars: int) -> Iterator[str]:
    """Cut a text into documents of at least `document_chars` characters; joined they are the text again.

    `readline(limit)` is that of an open text file. The cut lies after the first blank line past that length, or after
    a line's end where four times as many characters brought no blank line. A shorter rest belongs to the last
    document. Source: decided here.
    """
    longest = _PATIENCE * document_chars
    waiting = ""
    pieces: list[str] = []
    size = 0
    while line := readline(longest):
        pieces.append(line)
        size += len(line)
        if size >= longest or (size >= document_chars and not line.strip()):
            if waiting:
                yield waiting
            waiting, pieces, size = "".join(pieces), [], 0
    rest = "".join(pieces)
    if waiting and size >= document_chars:
        yield waiting
        waiting = ""
    if waiting or rest:
        yield waiting + rest


def _is_on_side(group: str, fraction: float, held_out: bool) -> bool:
    place = int.from_bytes(hashlib.sha256(group.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    return (place < fraction * 2**64) == held_out


def _hash_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _list_files(source: str) -> list[_File]:
    """The files behind a source that is not on the Hub, in order of their path."""
    if source == "stdlib":
        return [_File(str(path), "code", module) for module, path in stdlib_files()]
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"{source}: no such file or folder (a data set on the Hugging Face Hub is written hf:NAME)")
    if path.is_dir():
        files = _list_folder(path)
        if not files:
            raise UserError(
                f"{source}: no text file in this folder; it counts files that end in .jsonl, .parquet or one of"
                f" {' '.join(sorted(TEXT_SUFFIXES))}"
            )
        return files
    if not path.is_file():
        raise UserError(f"{source}: neither a file nor a folder; give the path of one")
    suffix = path.suffix.lower()
    return [_File(str(path), suffix if suffix in ROW_SUFFIXES else "cut", None)]


def _list_folder(folder: Path) -> list[_File]:
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            suffix = path.suffix.lower()
            group = path.relative_to(folder).as_posix()
            if suffix in ROW_SUFFIXES and path.is_file():
                files.append((group, _File(str(path), suffix, None)))
            elif suffix in TEXT_SUFFIXES and path.is_file():
                files.append((group, _File(str(path), "whole", group)))
    return [file for _, file in sorted(files)]


def _read_shards(shards: list[tuple[_File, ...]], columns: _Columns, document_chars: int) -> Iterator[dict[str, str]]:
    for file in itertools.chain.from_iterable(shards):
        if file.kind == ".jsonl":
            rows = _read_jsonl(file.path, columns)
        elif file.kind == ".parquet":
            rows = _read_parquet(file.path, columns)
        else:
            rows = ({"text": text} for text in _read_text(file, document_chars))
        for row in rows:
            if row["text"].strip():
                yield row | {"group": _hash_of(row["text"]) if file.group is None else file.group}


def _read_text(file: _File, document_chars: int) -> Iterator[str]:
    try:
        with tokenize.open(file.path) if file.kind == "code" else open(file.path, encoding="utf-8-sig") as handle:
            for text in [handle.read()] if file.kind == "whole" else cut_text(handle.readline, document_chars):
                if "\0" in text:
                    raise UserError(f"{file.path}: a binary file (it holds a zero byte); give a text file")
                yield text
    except UnicodeDecodeError as error:
        raise UserError(f"{file.path}: not UTF-8 text ({error.reason}); convert it to UTF-8 or leave it out") from error
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read ({error.strerror}); check its permissions") from error


def _read_jsonl(path: str, columns: _Columns) -> Iterator[dict[str, str]]:
    try:
        with open(path, "rb") as handle:
            for number, line in enumerate(handle, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: not JSON ({error}); mend or remove the line") from error
                if not isinstance(row, dict):
                    raise UserError(f'{path}, line {number}: not a JSON object; write {{"{columns.text}": …}}')
                yield _document_of(row, columns, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def _read_parquet(path: str, columns: _Columns) -> Iterator[dict[str, str]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_columns(file.schema_arrow.names, columns, path)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=columns.names):
                for row in batch.to_pylist():
                    number += 1
                    yield _document_of(row, columns, f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({error}); write the file again") from error


def _require_columns(found: Iterable[str], columns: _Columns, place: str) -> None:
    held = {columns.text: "the text", columns.label: "the label", columns.router_only: "what only the router reads"}
    for wanted in columns.names:
        if wanted not in found:
            raise UserError(
                f"{place}: there is no column {wanted!r}; name the one that holds {held[wanted]}, of:"
                f" {', '.join(found)}"
            )


def _document_of(row: dict, columns: _Columns, place: str) -> dict[str, str]:
    """A row's columns under our names; a null text is an empty document."""
    _require_columns(row, columns, place)
    text = row[columns.text]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{place}: the column {columns.text!r} holds {type(text).__name__}, not text; name another column"
        )
    others = {ours: row[column] for ours, column in columns.others.items()}
    if "label" in others:
        others["label"] = _label_of(others["label"], columns, place)
    hidden = others.get("router_only", "")
    if not isinstance(hidden, str):
        # A null too: a row whose strategy was forgotten would train a router that knows of none.
        raise UserError(
            f"{place}: the column {columns.router_only!r} holds {'null' if hidden is None else type(hidden).__name__},"
            ' not text; write "" where the router is to be told nothing'
        )
    return {"text": text or "", **others}


def _label_of(label: object, columns: _Columns, place: str) -> str:
    if not isinstance(label, str | int) or label == "":
        raise UserError(
            f"{place}: the column {columns.label!r} holds {'nothing' if label in (None, '') else type(label).__name__},"
            " not a text or a whole number; give the row a label, or leave it out"
        )
    return str(label)


def _open_hub(source: str, columns: _Columns) -> IterableDataset:
    parts = source.removeprefix("hf:").split(":")
    if len(parts) > 3 or not parts[0]:
        raise UserError(f"{source}: write hf:NAME, hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT or hf:NAME::SPLIT")
    name, config, split = (*parts, "", "")[:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
        first = next(iter(rows), None)
    except Exception as error:  # datasets lets through its own errors, the Hub's and the HTTP client's
        raise UserError(
            f"{source}: cannot be opened ({error}); check the name, the configuration and the split"
            " (hf:NAME:CONFIG:SPLIT, hf:NAME::SPLIT) and, for the Hub, the connection"
        ) from error
    if first is not None:
        _document_of(first, columns, source)
    settings = {"columns": columns, "source": source}
    rows = rows.select_columns(columns.names)
    rows = rows.map(_as_document, fn_kwargs=settings, remove_columns=columns.names, features=columns.features)
    return rows.filter(_has_text, input_columns=["text"])


def _as_document(row: dict, columns: _Columns, source: str) -> dict[str, str]:
    document = _document_of(row, columns, source)
    return document | {"group": _hash_of(document["text"])}


def _has_text(text: str) -> bool:
    return bool(text.strip())
