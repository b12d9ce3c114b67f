"""A run in TensorBoard's event files, under RUN/tensorboard. Imported only when asked for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch.utils.tensorboard.writer import SummaryWriter

from lol.train.tracking_values import scalars

_FLUSH_SECONDS = 10


class TensorBoard:
    """Scalars by optimizer step, the load as pictures, the configuration as text.

    A resumed run opens another file in the same folder, which begins by purging everything from its last step on: what
    a killed run wrote after its checkpoint is taken back, and that step is written again from metrics.jsonl. (A summary
    belongs to the last step, and would be there twice otherwise.)
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        goes_on = any(folder.glob("*tfevents*"))
        self.since = max(step - 1, 0) if goes_on else 0
        self._folder = folder
        self._writer = SummaryWriter(
            str(folder), purge_step=self.since + 1 if goes_on else None, flush_secs=_FLUSH_SECONDS
        )
        if not goes_on:
            self._writer.add_text("config", "```json\n" + json.dumps(config, indent=2, default=str) + "\n```", 0)

    @property
    def place(self) -> str:
        return f"TensorBoard: tensorboard --logdir {self._folder.parent}"

    def write(self, record: Mapping[str, Any], picture: UInt8[np.ndarray, "height width 3"] | None) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])
        if picture is not None:
            self._writer.add_image("load", picture, record["step"], dataformats="HWC")

    def flush(self) -> None:
        self._writer.flush()

    def close(self, failed: bool) -> None:
        del failed  # an event file has no place for it
        self._writer.close()
