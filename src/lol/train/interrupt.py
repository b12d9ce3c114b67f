"""Ctrl-C and SIGTERM as a flag that the training loop reads once per step."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNALS = tuple(number.name for number in _SIGNALS)
"""Names of the signals that stop a run."""


class Interrupt:
    """Within the block, the first SIGINT or SIGTERM sets `requested`; a Ctrl-C after that raises KeyboardInterrupt.

        with Interrupt() as interrupt:
            for step in range(steps):
                ...
                if interrupt.requested:
                    save(); break

    `signal` names the first signal ("SIGINT", "SIGTERM"), None before. The handlers of before are back after the block.
    Python lets only the main thread set handlers: in another thread the block changes nothing. (Decided here.)
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: a handler that C code had set, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A worker forked within the block inherits the handler; it has no loop that reads the flag, so its parent
            # could never end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            self.signal = self.signal or signal.Signals(number).name
