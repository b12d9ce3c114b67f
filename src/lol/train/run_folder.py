"""The run folder: who may write into it, and with which configuration.

RUN/config.json      the resolved configuration        RUN/metrics.jsonl   metrics.py
RUN/checkpoints/     checkpoint.py                      RUN/tokenizer/      a transformers tokenizer
RUN/.lock            held while a process trains here
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lol.errors import UserError
from lol.train import metrics
from lol.train.config import TrainConfig, from_json

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
_LOCK = ".lock"
_CONFIG_PARTIAL = f".{CONFIG}.partial"
_MARKS = (CONFIG, metrics.FILE, CHECKPOINTS)
_ABSENT = object()


class RunFolder:
    """A run folder that this process alone may train in, until `close` or its death. Made by `open_run`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    def discard(self) -> None:
        """Take config.json back: a start that failed is no run, and the corrected command may use the folder."""
        (self.path / CONFIG).unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes in; harmless a second time."""
        if self._lock is not None:
            # Unlocked by name, not by closing alone: forked loader workers hold copies of the descriptor.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_run(run: Path, config: Mapping[str, Any], *, resume: bool, may_differ: Sequence[str] = ()) -> RunFolder:
    """Make a run folder, or with `resume` open the one that is there; in both cases lock it and write config.json.

    config: the resolved configuration as nested mappings of JSON values (paths and the like are written as text).
    may_differ: dotted fields ("steps_per_log", or "eval" for everything below it) that a resumed run may change;
    config.json then takes the new values.

    Raises UserError when the folder already holds a run or other files (resume off), holds no run (resume on), was made
    with another configuration (every field is named), cannot be made, or is being trained in by another process; the
    folder's files are as before then. (Decided here.)
    """
    _check_contents(run, resume)
    try:
        run.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(run, _take_lock(run))
    except OSError as error:
        raise UserError(f"the run folder {run} cannot be written ({error.strerror}); choose another --run") from error
    try:
        # Again, now that nobody else can write: two processes may have found the folder empty.
        _check_contents(run, resume)
        wanted = _plain(config)
        if resume:
            _check_config(run, wanted, may_differ)
        _write_config(run / CONFIG, wanted)
    except BaseException:
        folder.close()
        raise
    return folder


def is_trained_in(run: Path) -> bool | None:
    """Whether the process that last locked the folder lives; None where that cannot be told from this machine.

    The lock itself is left alone: who tries it, if only for a moment, keeps a starting run out.
    """
    try:
        holder = (run / _LOCK).read_text(errors="replace").split()
        process, host = int(holder[1]), holder[3]
    except (OSError, ValueError, IndexError):
        return None
    if host != socket.gethostname():
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_config(run: Path) -> TrainConfig:
    """The configuration that a run folder was made with.

    Raises:
        UserError: the folder holds no run, or its config.json is damaged or of another version.
    """
    try:
        return from_json(json.loads((run / CONFIG).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run} holds no run: give the folder that lol train wrote") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{run / CONFIG} is not JSON ({error}); restore it") from error


def _check_contents(run: Path, resume: bool) -> None:
    if run.exists() and not run.is_dir():
        raise UserError(f"{run} is a file; choose a folder as --run")
    found = {entry.name for entry in run.iterdir()} if run.is_dir() else set()
    if resume and CONFIG not in found and found.intersection(_MARKS):
        raise UserError(f"{run} holds a run without its {CONFIG}; restore that file, or start again in another --run")
    if resume and CONFIG not in found:
        raise UserError(f"{run} holds no run to continue; drop --resume to start one there, or correct --run")
    if not resume and found.intersection(_MARKS):
        raise UserError(f"{run} already holds a run; pass --resume to continue it, or another --run")
    if not resume and found - {_LOCK, _CONFIG_PARTIAL}:
        raise UserError(f"{run} holds other files and no run; choose an empty or a new folder as --run")


def _take_lock(run: Path) -> int:
    lock = os.open(run / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 200, 0).decode(errors="replace") or "unknown"
        os.close(lock)
        raise UserError(
            f"another process ({holder}) is training in {run}; wait for it, stop it, or choose another --run"
        ) from error
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return lock


def _check_config(run: Path, wanted: Mapping[str, Any], may_differ: Sequence[str]) -> None:
    path = run / CONFIG
    try:
        saved = json.loads(path.read_bytes())
        if not isinstance(saved, dict):
            raise ValueError
    except ValueError as error:
        raise UserError(f"{path} is not a JSON object; restore it, or start again in another --run") from error
    before, now = dict(_leaves(saved)), dict(_leaves(wanted))
    differing = [
        f"  {field}: {_shown(before, field)} in the run, {_shown(now, field)} now"
        for field in dict.fromkeys([*before, *now])
        if before.get(field, _ABSENT) != now.get(field, _ABSENT)
        and not any(field == name or field.startswith(f"{name}.") for name in may_differ)
    ]
    if differing:
        raise UserError(
            f"{run} was started with another configuration; give these fields the run's values, or start a new run in "
            "another --run:\n" + "\n".join(differing)
        )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(leaves: Mapping[str, Any], field: str) -> str:
    return json.dumps(leaves[field], ensure_ascii=False) if field in leaves else "absent"


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    # Through JSON and back, so that a tuple equals the list it was saved as.
    return json.loads(json.dumps(metrics.json_safe(config), default=str))


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    partial = path.with_name(_CONFIG_PARTIAL)
    with partial.open("w", encoding="utf-8") as file:
        json.dump(config, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
