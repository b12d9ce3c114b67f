"""The loader: batches of rows, from workers or without, whose place in the data can be saved."""

import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from lol.data.mixture import MixedRows
from lol.data.packing import PackedDocuments, Row
from lol.errors import UserError


class PackedLoader(StatefulDataLoader):
    """Batches of rows, each entry (batch, n); its state is JSON and holds for the same number of workers only."""

    @property
    def epochs(self) -> dict[str, int]:
        """Passes over the documents of each source that every worker of this process has completed."""
        place = super().state_dict()
        parts = [place] if self.num_workers == 0 else place["_snapshot"]["_worker_snapshots"].values()
        least: dict[str, int] = {}
        for part in parts:
            state = part["dataset_state"]
            for stream in state.get("sources", [state]):
                name, epoch = stream["made_with"]["source"], stream["cursor"]["block"]["epoch"]
                least[name] = min(epoch, least.get(name, epoch))
        return least

    @property
    def epoch(self) -> int:
        """Passes over the documents that every worker has completed, of the source that has the fewest."""
        return min(self.epochs.values())

    def __iter__(self) -> Any:  # an Iterator[Row], which torch types as a class of its own
        batches = super().__iter__()
        return _with_clear_errors(batches) if self.num_workers else batches

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was given out."""
        return {"num_workers": self.num_workers, "batch_size": self.batch_size, "loader": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved place with the next iterator.

        Raises:
            UserError: the number of workers or the batch size differs, or what `PackedDocuments` checks.
        """
        for name, value in (("num_workers", self.num_workers), ("batch_size", self.batch_size)):
            if state_dict[name] != value:
                raise UserError(
                    f"the saved place in the data was made with {name} {state_dict[name]}, this run has {value};"
                    f" resume with {name} {state_dict[name]}"
                )
        super().load_state_dict(state_dict["loader"])


def make_loader(packed: PackedDocuments | MixedRows, batch_size: int, num_workers: int = 0) -> PackedLoader:
    """A loader over packed rows: an endless iterator of batches, to be taken once per run.

    With workers, each reads and packs its own part of the documents; a script that asks for them needs the usual
    `if __name__ == "__main__":`. The loader draws from a generator of its own and leaves the global one as it is.

    Raises:
        UserError: the batch size is below 1 or the number of workers below 0.
    """
    if batch_size < 1 or num_workers < 0:
        raise UserError(f"the batch size is {batch_size} and the workers {num_workers}; at least 1 and 0 are needed")
    with warnings.catch_warnings():
        # torchdata 0.11 sets a torch "vital" that torch 2.13 calls deprecated; nothing here can keep it from that.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return PackedLoader(
            packed,
            batch_size=batch_size,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(packed.seed),
            multiprocessing_context=_worker_context() if num_workers else None,
            worker_init_fn=_leave_ctrl_c_to_the_parent,
        )


def _with_clear_errors(batches: Iterator[Row]) -> Iterator[Row]:
    """The batches; a worker's UserError, which arrives as a traceback in one string, is raised as its message."""
    try:
        yield from batches
        return
    except UserError as error:
        message = str(error).rsplit(f"{UserError.__module__}.{UserError.__qualname__}: ", 1)[-1]
        # The traceback refers to itself and holds the workers: found by the garbage collector only, they are not told
        # to stop, and 5 seconds go by for each.
        error.__traceback__ = None
    raise UserError(message.strip())


def _worker_context() -> BaseContext:
    """Workers come from a fork server that has imported this module once.

    A plain fork would lose the threads that torch and the tokenizer hold by then, and every spawned worker would
    spend seconds on the imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _leave_ctrl_c_to_the_parent(_worker: int) -> None:
    """The terminal sends Ctrl-C to workers too; one that died of it would end the run before its last checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
