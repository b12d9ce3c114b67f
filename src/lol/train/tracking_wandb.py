"""A run in Weights & Biases, under RUN/wandb: offline unless WANDB_MODE says otherwise. Imported only when asked for.

W&B's own service, another process, writes the file and, online, sends it. It ends with the run.
"""

import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from jaxtyping import UInt8
from wandb.proto import wandb_internal_pb2 as protocol

from lol.errors import UserError
from lol.train.tracking_values import scalars

PROJECT = "library-of-layers"
"""The project of runs where WANDB_PROJECT names no other."""
_BLOCK = 32768
_HEAD = struct.Struct("<IHB")
_FILE_HEAD = 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


class WandB:
    """A W&B run by optimizer step; a resumed one goes on under the same id.

    W&B takes no step twice, and its service may lose the last ones when it is killed. So a resumed run reads from the
    run's files which steps arrived, and goes on behind them.

    Raises:
        UserError: W&B does not start.
    """

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            # Its service sends reports of its own use, offline too.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Where a library that calls models over the network is imported, it advertises its tracing of such calls.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        files = sorted((run / "wandb").glob("*run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)
        self.since = max((last_step(file) for file in files), default=0)
        (run / "wandb").mkdir(exist_ok=True)
        try:
            self._run = wandb.init(
                dir=run,
                mode=mode,  # pyright: ignore[reportArgumentType]
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.resolve().name,
                id=files[-1].stem.removeprefix("run-") if files else secrets.token_hex(4),
                resume="allow",
                config=dict(config),
                # Another run of the same process stays as it is.
                reinit="create_new",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise UserError(
                f"W&B does not start ({error}): run wandb login, or set WANDB_MODE=offline to write files alone"
            ) from error

    @property
    def place(self) -> str:
        if self._run.offline:
            return f"W&B, offline: wandb sync {Path(self._run.dir).parent}"
        return f"W&B: {self._run.url}"

    def write(self, record: Mapping[str, Any], picture: UInt8[np.ndarray, "height width 3"] | None) -> None:
        found: dict[str, Any] = dict(scalars(record))
        if record.get("event") == "summary":
            self._run.summary.update(found)
            return
        if picture is not None:
            found["load"] = wandb.Image(picture)
        self._run.log(found, step=record["step"])

    def flush(self) -> None:
        """W&B writes when it does; `since` finds what is missing."""

    def close(self, failed: bool) -> None:
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            # The service would stay until the interpreter ends; it is left to who else has a run in it.
            if wandb.setup().most_recent_active_run in (None, self._run):
                wandb.teardown()


def last_step(file: Path) -> int:
    """The last step in a .wandb file, 0 for none.

    The file is LevelDB's log of protocol buffers, W&B's for `wandb sync`; a torn end is what a killed service leaves.
    """
    last = 0
    for message in _messages(file.read_bytes()):
        record = protocol.Record()  # pyright: ignore[reportAttributeAccessIssue]
        record.ParseFromString(message)
        if record.WhichOneof("record_type") == "history":
            last = max(last, record.history.step.num)
    return last


def _messages(data: bytes) -> Iterator[bytes]:
    """The whole messages: pieces of at most a block, none across two, each with checksum, length and kind before it."""
    place, message = _FILE_HEAD, b""
    while place + _HEAD.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEAD.size:
            place += left
            continue
        _, length, kind = _HEAD.unpack_from(data, place)
        end = place + _HEAD.size + length
        if not _WHOLE <= kind <= _LAST or end > len(data):
            return
        piece = data[place + _HEAD.size : end]
        message = piece if kind in (_WHOLE, _FIRST) else message + piece
        if kind in (_WHOLE, _LAST):
            yield message
        place = end
