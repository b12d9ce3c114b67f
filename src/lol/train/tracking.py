"""TensorBoard and Weights & Biases, for who wants them beside metrics.jsonl: a run's records, written there too.

A tracker gets what the log gets, record for record, under the log's own names: `train/loss`, `train/grad_norm`,
`eval/loss`, `eval/losses/SOURCE`, `summary/held_out_loss`. Of the windows that ran each block there are the shares of
the blocks over all depths (`load/block_00`, …; `moe_load/expert_0`, …) at every step, and at every evaluation a picture
of depths by blocks (`load`): a curve for each block of each depth would be 726 of them in the multilingual run.
(Decided here.)

metrics.jsonl stays the one place that holds everything. A tracker that is new to a run, or was behind it when the run
was killed, is given from there what it lacks.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from lol.errors import UserError
from lol.train.config import Tracker, TrainConfig, as_json
from lol.train.metrics import FILE, read_metrics
from lol.train.tracking_values import draw_load


@runtime_checkable
class Sink(Protocol):
    """Where records go. `since`: the last step of which it has all."""

    since: int

    @property
    def place(self) -> str:
        """What a user does to see it."""
        ...

    def write(self, record: Mapping[str, Any], picture: UInt8[np.ndarray, "height width 3"] | None) -> None:
        """Take a record of the log and, with some, the picture of the load of the step before."""
        ...

    def flush(self) -> None:
        """Have on the disk what came before."""
        ...

    def close(self, failed: bool) -> None:
        """The run ends here; failed: by an error."""
        ...


class Tracking:
    """The trackers of a run as one. Made by `open_tracking`.

    A tracker that breaks is left, with a line to standard error: it must not take the training with it, and the next
    `--resume` gives it what it missed.
    """

    def __init__(self, sinks: dict[Tracker, Sink]) -> None:
        self._sinks = sinks
        self._load: Any = []

    @property
    def places(self) -> list[str]:
        """A line for each, of what a user does to see it."""
        return [sink.place for sink in self._sinks.values()]

    def write(self, record: Mapping[str, Any]) -> None:
        """Give a record to the trackers that do not have its step yet; a summary, which is a run's last, always."""
        step, event = record["step"], record.get("event")
        picture = None
        if event == "train":
            self._load = record.get("load", [])
        elif event == "eval":
            picture = draw_load(self._load)
        for name, sink in list(self._sinks.items()):
            if step > sink.since or event == "summary":
                try:
                    sink.write(record, picture)
                except Exception as error:  # whatever it is, the training goes on
                    self._leave(name, error)

    def flush(self) -> None:
        for sink in self._sinks.values():
            sink.flush()

    def close(self, failed: bool) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                sink.close(failed)
            except Exception as error:  # as above: the run itself is whole
                self._leave(name, error)

    def _leave(self, name: Tracker, error: Exception) -> None:
        sink = self._sinks.pop(name)
        with suppress(Exception):  # it is broken already
            sink.close(failed=True)
        print(
            f"lol: {name} is no longer written ({type(error).__name__}: {error}); {FILE} is, and --resume fills it in",
            file=sys.stderr,
        )


def check_trackers(names: Sequence[Tracker]) -> None:
    """Raise UserError for a tracker whose package is not installed."""
    for name in names:
        try:
            # torch's own writer raises ImportError of its own for a missing tensorboard.
            __import__("torch.utils.tensorboard" if name == "tensorboard" else "wandb.sdk")
        except ImportError as error:
            raise UserError(
                f"--tracking {name} needs {name}, which cannot be imported ({error}): pip install "
                f"library-of-layers[{name}]"
            ) from None


@contextmanager
def open_tracking(config: TrainConfig, run: Path, step: int) -> Iterator[Tracking]:
    """The trackers that the configuration names, in the run's folder, given all records up to `step` that they lack.

    Args:
        config: The run; `config.tracking` names them.
        run: The run folder; its metrics.jsonl ends at `step`.
        step: Steps that are done.

    Raises:
        UserError: a package is missing, or W&B does not start; nothing is left behind then.
    """
    check_trackers(config.tracking)
    sinks: dict[Tracker, Sink] = {}
    tracking, failed = Tracking(sinks), True
    try:
        for name in dict.fromkeys(config.tracking):
            existed = (run / name).exists()
            try:
                sinks[name] = _open(name, config, run, step)
            except BaseException:
                if not existed:
                    shutil.rmtree(run / name, ignore_errors=True)
                raise
        if any(sink.since < step for sink in sinks.values()):
            for record in read_metrics(run):
                tracking.write(record)
        yield tracking
        failed = False
    finally:
        tracking.close(failed)


def _open(name: Tracker, config: TrainConfig, run: Path, step: int) -> Sink:
    if name == "tensorboard":
        from lol.train.tracking_tensorboard import TensorBoard

        return TensorBoard(run / name, as_json(config), step)
    from lol.train.tracking_wandb import WandB

    return WandB(run, as_json(config))
