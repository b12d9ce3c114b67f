"""Timing steps side by side in one process, so that the machine's mood falls on all of them alike."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], object]


def measure(
    steps: dict[str, Step], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every step in every round; a round runs each step once, and the first, untimed, warms up.

    With `clock=time.process_time` they are seconds of this process's work, whatever else the machine does.
    """
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = clock()
            step()
            seconds[name].append(clock() - began)
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The median of each step."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def conditions(options: Any) -> dict[str, Any]:
    """What the numbers were measured with: the benchmark's options, threads, torch."""
    return {
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
