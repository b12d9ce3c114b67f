"""Timing steps side by side in one process, so that the machine's mood falls on all of them alike, and their memory."""

import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lol.errors import UserError

Step = Callable[[], object]


def bench_device() -> torch.device:
    """Where benchmarks run: the GPU if there is one, as training does.

    It is a context too, in which models are made there. Nothing is timed inside of it: every operation pays for it.
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(
    steps: dict[str, Step], repeats: int, warm_up: bool = True, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every step in every round; a round runs each step once, and the first, untimed, warms up.

    With `clock=time.process_time` they are seconds of this process's work, whatever else the machine does.

    Raises:
        UserError: not even one round.
    """
    if repeats < 1:
        raise UserError(f"{repeats} rounds measure nothing: --repeats 1 is the least")
    if warm_up:
        for step in steps.values():
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            _wait()
            began = clock()
            step()
            _wait()
            seconds[name].append(clock() - began)
    return seconds


def _wait() -> None:
    """Until the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(step: Step) -> int:
    """The most bytes that tensors made inside a step hold at one time, beyond those that were there before.

    A GPU's allocator knows. On a CPU tensors are counted as operations return them, each storage once and until it is
    freed; what a kernel takes and gives back by itself is not seen. (Decided here: a process of its own for every step,
    and its resident size, would count the allocator's habits too and take longer than the measurement.)
    """
    if torch.cuda.is_available():
        _wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        _wait()
        return torch.cuda.max_memory_allocated() - before
    with _CountBytes() as count:
        step()
    return count.peak


class _CountBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is None or storage in self._known or storage.data_ptr() in given:
                continue
            self._known.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self.now -= size


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The median of each step."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def conditions(options: Any) -> dict[str, Any]:
    """What the numbers were measured with: the benchmark's options, the device, threads, torch."""
    return {
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
