"""Commands of `lol` side by side, each in a process of its own with one thread."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lol.errors import UserError
from lol.train.progress import duration

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """A command: what it is called, and what follows `lol` in it."""

    name: str
    args: tuple[str, ...]


def run_side_by_side(jobs: Sequence[Job], at_once: int) -> int:
    """Do all of them, `at_once` at a time, and print what each says last with the time left; how many failed.

    Ctrl-C and SIGTERM stop those that run, too.

    Raises:
        UserError: not even one at a time.
    """
    if at_once < 1:
        raise UserError(f"{at_once} runs side by side would never end: --jobs 1 is the least")
    waiting, line = list(jobs), _Line()
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        while waiting or line.running:
            while waiting and len(line.running) < at_once:
                line.start(waiting.pop(0))
            line.reap(len(waiting))
            time.sleep(_POLL_SECONDS)
    finally:
        line.stop()
        signal.signal(signal.SIGTERM, before)
    return line.failed


def _leave(number: int, *_: Any) -> NoReturn:
    raise SystemExit(128 + number)


@dataclass
class _Line:
    """The jobs under way."""

    running: dict[subprocess.Popen, Job] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    failed: int = 0

    def start(self, job: Job) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "lol", *job.args],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running[process] = job

    def reap(self, waiting: int) -> None:
        for process in [process for process in self.running if process.poll() is not None]:
            job = self.running.pop(process)
            self.done += 1
            said = process.communicate()[0].strip()
            if process.returncode:
                self.failed += 1
                said = f"{job.name}: failed (its error is above)"
            each = (time.monotonic() - self.began) / self.done
            left = duration(each * (waiting + len(self.running) * 0.5))
            print(f"{said}  ({self.done}/{self.done + len(self.running) + waiting}, {left} left)", flush=True)

    def stop(self) -> None:
        for process in self.running:
            process.terminate()
        for process in self.running:
            process.wait()
