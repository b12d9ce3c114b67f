"""A command as somebody at a terminal sees it."""

import contextlib
import os
import pty
import subprocess
import sys
import termios
import time

from small_run import environment


class Session:
    """`lol …` on a pseudo terminal."""

    def __init__(self, *args: object):
        self.master, slave = pty.openpty()
        self.resize(80, 24)
        surroundings = environment() | {"TERM": "xterm-256color"}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            surroundings.pop(name, None)
        command = [sys.executable, "-m", "lol", *map(str, args)]
        ends = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.child = subprocess.Popen(command, env=surroundings, start_new_session=True, **ends)
        os.close(slave)
        self.seen = ""

    def resize(self, columns: int, lines: int) -> None:
        termios.tcsetwinsize(self.master, (lines, columns))

    def wait_for(self, text: str) -> str:
        """Read until the text comes; returns what came with it."""
        came, until = "", time.monotonic() + 120
        while text not in came:
            assert time.monotonic() < until, came
            came += os.read(self.master, 4096).decode(errors="replace")
        self.seen += came
        return came

    def end(self) -> tuple[str, int]:
        """Read until the program ends; returns what came and its exit code."""
        came = ""
        # Linux has an error where a terminal's last writer has left.
        with contextlib.suppress(OSError):
            while part := os.read(self.master, 4096):
                came += part.decode(errors="replace")
        os.close(self.master)
        return came, self.child.wait(timeout=60)

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def leave(self, keys: str) -> int:
        self.type(keys)
        code = self.child.wait(timeout=60)
        os.close(self.master)
        return code
