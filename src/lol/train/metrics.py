"""metrics.jsonl: one JSON object a line, appended while training, cut back on resume.

JSON has no NaN and no infinity, and a strict reader rejects the file that holds one, so the three are written as the
strings "nan", "inf" and "-inf", and read back as floats.
"""

import json
import math
import os
from collections.abc import Mapping
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
    records = []
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            records.append(_from_json(json.loads(line)))
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is not JSON; delete that line to read the rest") from error
    return records


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
