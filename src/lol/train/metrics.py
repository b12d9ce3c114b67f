"""metrics.jsonl: one JSON object a line, appended while training, cut back on resume.

JSON has no NaN and no infinity, and a strict reader rejects the file that holds one, so the three are written as the
strings "nan", "inf" and "-inf", and read back as floats.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from lol.errors import UserError

FILE = "metrics.jsonl"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@runtime_checkable
class Listener(Protocol):
    """What gets every record that a log writes."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...


class MetricsLog:
    """Appends records to RUN/metrics.jsonl; a context manager.

    Every record has an int "step". Write a step's records *before* its checkpoint: `trim_metrics` keeps what is at or
    before the checkpoint's step. Each line goes to the operating system at once, so a killed process loses nothing;
    call `sync` at a checkpoint, so that a power cut loses nothing before it either. Where several processes train
    together, one writes. `also` gets every record that is written.
    """

    def __init__(self, run: Path, writes: bool = True, also: Listener | None = None) -> None:
        self._also = also
        self._file = (run / FILE).open("a", encoding="utf-8") if writes else None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record of JSON values. Raises ValueError without an int "step", TypeError for what JSON lacks."""
        if not isinstance(record.get("step"), int):
            raise ValueError(
                f'a metrics record needs an int "step", without which a resumed run cannot cut it: {record}'
            )
        if self._file is None:
            return
        self._file.write(json.dumps(json_safe(record), allow_nan=False) + "\n")
        self._file.flush()
        if self._also is not None:
            self._also.write(record)

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if self._also is not None:
            self._also.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All records of a run, oldest first; a last line that is still being written is left out.

    Raises UserError when the file is missing or a line is not JSON.
    """
    path = run / FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); give the folder of a run that has trained"
        ) from error
    return _parse(path, text.split(b"\n")[:-1], 1)


class MetricsTail:
    """Reads a metrics.jsonl that grows, that may not be there yet, and that a resumed run may cut back."""

    def __init__(self, run: Path) -> None:
        self._path = run / FILE
        self._begin()

    def _begin(self) -> None:
        self._place, self._lines, self._last = 0, 0, b""

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """The records since the last call, and whether they replace all before: the file was cut or is another one.

        Raises UserError when a line is not JSON.
        """
        try:
            with self._path.open("rb") as file:
                # The last line read stands where it stood, or what was read is no longer there.
                file.seek(self._place - len(self._last))
                again = file.read(len(self._last)) != self._last
                if again:
                    self._begin()
                    file.seek(0)
                text = file.read()
        except FileNotFoundError:
            again = self._place > 0
            self._begin()
            return [], again
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        records = _parse(self._path, lines, self._lines + 1)
        self._place, self._lines = self._place + len(whole), self._lines + len(lines)
        self._last = lines[-1] if lines else self._last
        return records, again


def trim_metrics(run: Path, step: int) -> int:
    """Cut metrics.jsonl after the last record at or before `step`, a half-written line too; returns the records cut.

    A summary is cut too: a run that goes on writes it when it comes to its end.

    What a killed run logged after its last checkpoint is trained again on resume; with this, the resumed run's file
    equals an uninterrupted one's. Without the file there is nothing to do. (Decided here.)
    """
    path = run / FILE
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        kept = cut = 0
        for line in file:
            if cut or not _is_record_until(line, step):
                cut += 1
            else:
                kept += len(line)
        file.truncate(kept)
        os.fsync(file.fileno())
    return cut


def json_safe(value: Any) -> Any:
    """The tree with NaN and infinities as strings, tuples as lists and keys as strings; other values are kept."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def _parse(path: Path, lines: Sequence[bytes], first: int) -> list[dict[str, Any]]:
    """The records of whole lines, of which the first has number `first` in the file."""
    records = []
    for number, line in enumerate(lines, start=first):
        try:
            records.append(_from_json(json.loads(line)))
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is not JSON; delete that line to read the rest") from error
    return records


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _is_record_until(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
    except ValueError:
        return False
    if not isinstance(record, dict) or record.get("event") == "summary":
        return False
    return isinstance(record.get("step"), int) and record["step"] <= step
