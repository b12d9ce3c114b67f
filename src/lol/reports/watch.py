"""`lol watch`: a run drawn in the terminal while it trains."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.live import Live

from lol.reports.watch_screen import lines, screen
from lol.reports.watch_state import Follower, check_run
from lol.train.interrupt import Interrupt

_SECONDS = 0.5
"""Between two looks at the folder."""


@dataclass(frozen=True)
class Watch:
    """Draw a run while it trains: losses, depth, use of the blocks, speed, memory, time left.

    It follows a run that has not begun yet, or that is stopped and resumed, until the run is finished or Ctrl-C; a run
    that is finished is drawn once. Where the output is no terminal, the newest state is printed as plain lines.

    Example: lol watch runs/demo
    """

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder."""
    once: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Draw the newest state and end."""


def watch(command: Watch) -> int:
    """Watch until the run is finished; returns the exit code: 130 or 143 where Ctrl-C or SIGTERM ended it.

    Raises:
        UserError: a damaged file; with `once` or without a terminal, a folder without steps.
    """
    follower, console = Follower(command.run), Console(highlight=False)
    state = follower.poll()
    if not console.is_terminal or console.is_dumb_terminal:
        check_run(state)
        print("\n".join(lines(state)))
        return 0
    signal = None
    if not command.once and state.status != "finished":
        signal = _follow(follower, console)
    if command.once:
        check_run(state)
    if follower.state.step:
        console.print(screen(follower.state, console))
    return {None: 0, "SIGINT": 130}.get(signal, 143)


def _follow(follower: Follower, console: Console) -> str | None:
    """Draw on a screen of its own, and give the terminal back as it was; the name of the signal that ended it."""
    with Interrupt() as interrupt, Live(console=console, screen=True, auto_refresh=False) as live:
        while not interrupt.requested:
            state = follower.poll()
            if state.status == "finished":
                break
            # Every time, for the terminal's size and the time may have changed.
            live.update(screen(state, console, console.height), refresh=True)
            time.sleep(_SECONDS)
    return interrupt.signal
