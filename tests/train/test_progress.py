"""A bar on a terminal, lines elsewhere, and a time left that knows that later steps cost more."""

import io
import os
import pty
import re
import select
from collections.abc import Callable

import pytest
from rich.console import Console

from lol.train.progress import Progress, shorten


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(
    steps: int, seconds: Callable[[int], float], start: int = 0, work: Callable[[int], float] | None = None
) -> list[str]:
    """Lines of a run whose step with index t takes seconds(t)."""
    clock, out = Clock(), io.StringIO()
    with Progress(steps, start, work=work, console=Console(file=out, width=30), clock=clock) as progress:
        for step in range(start, steps):
            clock.now += seconds(step)
            heldout = 5.5 if step == 1 else None
            progress.update(step + 1, loss=5.125, tokens=1_000, depth=3, depths=6, heldout=heldout)
    return out.getvalue().splitlines()


def test_plain_lines_say_it_all_on_one_line_however_narrow() -> None:
    lines = run(100, lambda _: 0.5)
    assert lines[0] == "step 1/100  loss 5.12  depth 3/6  2,000 tokens/s"
    assert lines[1] == "step 6/100  loss 5.12  held-out 5.50  depth 3/6  2,000 tokens/s  0:47 left"
    assert lines[-1] == "step 100/100  loss 5.12  held-out 5.50  depth 3/6  2,000 tokens/s  0:00 left"
    assert len(lines) == 21


def test_slow_runs_get_a_line_every_ten_seconds_and_long_ones_fewer() -> None:
    assert [int(line.split()[1].split("/")[0]) for line in run(1000, lambda _: 3.0)][:4] == [1, 5, 9, 13]
    a_day = run(86_400 // 4, lambda _: 4.0)
    assert 200 < len(a_day) < 700


@pytest.mark.parametrize("start", [0, 40])
def test_time_left_counts_the_work_that_is_left(start: int) -> None:
    def cost(step: int) -> float:
        return 1.0 if step < 50 else 3.0

    clock = Clock()
    progress = Progress(100, start, work=cost, console=Console(file=io.StringIO()), clock=clock)
    assert progress.seconds_left(start) is None
    for step in range(start, 50):
        # The first step compiles and warms up; it says nothing about the others.
        clock.now += 60.0 if step == start else cost(step) / 2
        progress.update(step + 1, loss=1.0, tokens=1, depth=1, depths=2)
    assert progress.seconds_left(50) == pytest.approx(50 * 3 / 2)
    assert progress.seconds_left(100) == 0


def test_long_times_have_hours() -> None:
    assert run(10_000, lambda _: 3.0)[1].endswith("  8:19:45 left")


def test_speed_is_that_of_the_last_ten_seconds() -> None:
    lines = run(400, lambda step: 1.0 if step < 200 else 0.1)
    assert "  1,000 tokens/s  " in lines[-2 - 10]
    assert "  10,000 tokens/s  " in lines[-1]


def test_notes_are_plain_text_on_one_line() -> None:
    out = io.StringIO()
    text = "checkpoint [bold]runs/a[0]/step-00000100[/bold] " + "x" * 60
    Progress(10, console=Console(file=out, width=30)).note(text)
    assert out.getvalue() == text + "\n"


def test_a_terminal_gets_a_bar_that_notes_do_not_break() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        console = Console(file=terminal, width=100, _environ={"TERM": "xterm"})
        with Progress(20, console=console) as progress:
            for step in range(1, 11):
                progress.update(step, loss=4.0, tokens=10, depth=2, depths=6, heldout=4.5)
                if step == 5:
                    progress.note("saved [step 5]")
        written = ""
        while select.select([master], [], [], 0.2)[0]:
            written += os.read(master, 1 << 20).decode()
    os.close(master)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    shown = [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]
    assert "saved [step 5]" in shown
    assert re.match(r"step 10/20 ━+[╸╺━]+ +loss 4.00  held-out 4.50  depth 2/6  [\d,]+ tokens/s  0:00 left$", shown[-1])


def drawn(width: int, environment: dict[str, str], enabled: bool | None, terminal: bool = True) -> str:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, _environ=environment)
    with Progress(60_000, enabled=enabled, console=console, clock=clock) as progress:
        clock.now += 1
        progress.update(12_000, loss=5.12, tokens=14_200, depth=3, depths=6, heldout=5.5)
        clock.now += 1
        progress.update(12_001, loss=5.12, tokens=14_200, depth=3, depths=6)
    return out.getvalue()


def test_a_dumb_terminal_and_a_pipe_get_lines_unless_told() -> None:
    assert drawn(120, {"TERM": "dumb"}, None).startswith("step 12000/60000  loss")
    assert drawn(120, {"TERM": "xterm"}, False).startswith("step 12000/60000  loss")
    assert "━" in drawn(120, {"TERM": "xterm"}, None)
    assert "━" in drawn(120, {"TERM": "xterm"}, True, terminal=False)


def test_eighty_columns_show_everything_without_the_bar() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn(80, {"TERM": "xterm"}, None))
    assert "━" not in text
    assert "step 12001/60000 loss 5.12 held-out 5.50 depth 3/6 14,200 tokens/s 13:19:59 left" in text


@pytest.mark.parametrize(("terminal", "width", "shown"), [(False, 40, True), (True, 130, True), (True, 110, False)])
def test_what_is_used_up_stands_where_there_is_room(terminal: bool, width: int, shown: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
    with Progress(20, enabled=terminal, console=console) as progress:
        progress.update(3, loss=4.0, tokens=10, depth=2, depths=6, spent="1.2 M tokens, 3 TFLOP")
    assert ("depth 2/6  1.2 M tokens, 3 TFLOP  " in out.getvalue()) == shown
    assert "depth 2/6  " in out.getvalue()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (999.6, "1 k"), (1234, "1.23 k"), (17_300_000, "17.3 M"), (10**27, "1e+06 Z")],
)
def test_numbers_are_shortened_to_three_digits(number: float, text: str) -> None:
    assert shorten(number) == text


def test_a_unit_follows_the_prefix() -> None:
    assert shorten(1.73e19, "FLOP") == "17.3 EFLOP"
    assert shorten(12, "B") == "12 B"
