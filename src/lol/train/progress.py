"""What training shows while it runs: a bar on a terminal, plain lines anywhere else."""

import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

_SPEED_SECONDS = 10.0
_LINE_SECONDS = 10.0
_LINE_SHARE = 0.05
# Lines get rarer in a long run: never more than about a hundred for each factor e in running time.
_LINE_GROWTH = 0.01
_BAR_FROM_WIDTH = 96
_SPENT_FROM_WIDTH = 128
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


class Progress:
    """Shows `update`s on standard output; a context manager.

    total_steps: optimizer steps of the whole run; start_step: done before (a resumed run).
    enabled: True draws the bar, False writes plain lines, None decides by whether the console is a terminal.
    work: relative cost of the step with 0-based index t, in any unit; without it all steps cost alike. The time left is
    the remaining work over this process's work per second (evaluations and checkpoints included, the first step, which
    warms up, not), so it stays right while the core grows and steps get slower. (Decided here.)
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        enabled: bool | None = None,
        work: Callable[[int], float] | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._console = console or Console()
        self._clock = clock
        costs = (1.0 if work is None else work(step) for step in range(total_steps))
        self._work_until = list(accumulate(costs, initial=0.0))
        self._heldout: float | None = None
        self._tokens = 0
        self._recent: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._began = clock()
        self._warm: tuple[float, float] | None = None
        self._line_time, self._line_step = -float("inf"), start_step
        drawn = self._console.is_terminal and not self._console.is_dumb_terminal if enabled is None else enabled
        self._bar = self._make_bar() if drawn else None
        self._task = self._bar.add_task("", total=total_steps, completed=start_step, text="") if self._bar else None

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens: int,
        depth: int,
        depths: int,
        spent: str = "",
        heldout: float | None = None,
    ) -> None:
        """Report that `step` steps are done (1..total_steps), the last one at this loss (nats) on `tokens` tokens.

        depth of depths routed depths were run. spent: what the run has used up so far, in words; a bar on a narrow
        terminal has no room for it. heldout: a new held-out loss (nats); the last one stays on show.
        """
        now = self._clock()
        self._heldout = self._heldout if heldout is None else heldout
        self._tokens += tokens
        if self._warm is None:
            self._warm = (now, self._work_until[step])
        self._recent.append((now, self._tokens))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _SPEED_SECONDS:
            self._recent.popleft()
        if self._bar is None and not self._line_is_due(step, now):
            return
        parts = [f"loss {loss:.2f}"]
        if self._heldout is not None:
            parts.append(f"held-out {self._heldout:.2f}")
        parts.append(f"depth {depth}/{depths}")
        if spent and (self._bar is None or self._console.width >= _SPENT_FROM_WIDTH):
            parts.append(spent)
        parts.append(f"{self._tokens_per_second(now):,.0f} tokens/s")
        left = self.seconds_left(step)
        if left is not None:
            parts.append(f"{duration(left)} left")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, text=("  " if self._is_wide() else " ").join(parts))
        else:
            self._print("  ".join([f"step {step}/{self._total}", *parts]))
            self._line_time, self._line_step = now, step

    def seconds_left(self, step: int) -> float | None:
        """Seconds until the last step is done, from the work and time since the first update; None until the second."""
        remaining = self._work_until[-1] - self._work_until[step]
        if remaining <= 0:
            return 0.0
        if self._warm is None:
            return None
        began, work_before = self._warm
        work = self._work_until[step] - work_before
        return remaining * (self._clock() - began) / work if work > 0 else None

    def note(self, text: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        self._print(text)

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _make_bar(self) -> RichProgress:
        bar = [BarColumn(bar_width=None)] if self._is_wide() else []
        return RichProgress(
            TextColumn("step {task.completed}/{task.total}", markup=False),
            *bar,
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            expand=bool(bar),
        )

    def _is_wide(self) -> bool:
        # On a narrow terminal the words need the room.
        return self._console.width >= _BAR_FROM_WIDTH

    def _line_is_due(self, step: int, now: float) -> bool:
        pause = max(_LINE_SECONDS, _LINE_GROWTH * (now - self._began))
        enough = step - self._line_step >= _LINE_SHARE * self._total or now - self._line_time >= pause
        return step >= self._total or enough

    def _tokens_per_second(self, now: float) -> float:
        before, tokens = self._recent[0]
        return (self._tokens - tokens) / max(now - before, 1e-9)

    def _print(self, text: str) -> None:
        # Paths and losses are text: no markup, no colours, no line breaks at the console's width.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def shorten(number: int | float, unit: str = "") -> str:
    """Three digits and a prefix: 17_300_000 is "17.3 M", 1.73e19 with the unit FLOP "17.3 EFLOP"."""
    place = 0
    while number >= 999.5 and place < len(_PREFIXES) - 1:
        number, place = number / 1000, place + 1
    return f"{number:.3g} {_PREFIXES[place]}{unit}".rstrip()


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours where there are some: "2:05", "1:02:05"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"
