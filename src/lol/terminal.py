"""`lol generate` at the terminal: text to standard output as it comes, the path it takes to standard error.

A prompt is continued once. A terminal without a prompt becomes a conversation with one document: what is typed is added
to the text where it stands, the model goes on from there, and only new tokens are run.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from lol.decoding import GivenPath, seeded
from lol.errors import UserError, is_whole_text
from lol.generate import Document, Piece, Sampling, Window
from lol.model.lm import LoLForCausalLM
from lol.paths.colors import block_colors
from lol.train.interrupt import Interrupt

HELP = """\
What you type is added to the text where it stands, and the model goes on from there.
  (only Enter)    the model goes on; a stop by Ctrl-C is no obstacle
  text\\           a line break: the next line belongs to the same text
  /new            begin a new document
  /path 0 1 2     force these blocks, one per depth, in windows that begin from here
                  on; -1 leaves a depth to the router
  /path free      force nothing more
  /help           show this
  \\/text          text that begins like a command
Ctrl-C stops the model, or leaves; Ctrl-D leaves."""

# Paths of files and comments of code begin with a slash too, and are text.
COMMAND = re.compile(r"/[a-z]+(\s|$)")

LEGEND = "windows that begin, as depth:block weight (not part of the text)"


@dataclass
class Screen:
    """Where pieces are shown.

    With `show_path`, the line of a window stands in front of the text of its first token. Where text and path share a
    terminal (or a file, by 2>&1), a path line breaks the text; anywhere else the text is left as it is.
    """

    num_experts: int
    show_path: bool = False
    _open: bool = False
    """Whether something was shown since the last `end`."""
    _column: int = 0
    """Characters of text in the current line."""
    _held: str = ""
    """Text of the last piece, while it is not known which windows begin with it."""
    _colors: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._colors = block_colors(self.num_experts)
        if self.show_path:
            print(LEGEND, file=sys.stderr)

    def show(self, piece: Piece) -> None:
        """Show one piece; with `show_path` its text comes with the next one, or with `end`."""
        self._open = True
        if not self.show_path:
            return self._print(piece.text)
        self._print_windows(window for window in piece.windows if window.start < piece.position)
        self._print(self._held)
        self._print_windows(window for window in piece.windows if window.start >= piece.position)
        self._held = piece.text
        return None

    def end(self) -> None:
        """Show what is held, and end the line."""
        if self._open:
            self._print(f"{self._held}\n")
        self._held, self._open, self._column = "", False, 0

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)
        _, broken, last = text.rpartition("\n")
        self._column = len(last) + (0 if broken else self._column)

    def _print_windows(self, windows: Iterable[Window]) -> None:
        for start, begun in groupby(windows, key=lambda window: window.start):
            if self._column and _is_one_place():
                self._print("\n")
            sys.stderr.write(path_lines(start, list(begun), self._colors))
            sys.stderr.flush()


def path_lines(start: int, windows: list[Window], colors: list[str]) -> str:
    """The windows that begin with the token at `start`, as many to a line as fit: "   token 16 | 0:2 0.41  2:0 0.38".

    Blocks have their colours where standard error is a terminal and NO_COLOR is not set.
    """
    console = Console(stderr=True, highlight=False)
    head, rule = f"{f'token {start}':>11}", " | "
    lines, room = [Text(head + rule)], 0
    for window in windows:
        cell = Text(f"{window.depth}:")
        cell.append(str(window.expert), style=f"bold {colors[window.expert]}")
        cell.append(f" {window.weight:.2f}  ")
        if room and len(lines[-1]) + len(cell) - 2 > console.width:
            lines.append(Text(" " * len(head) + rule))
        lines[-1].append_text(cell)
        room = len(lines[-1])
    # Printed by Python: rich would end the process itself where the reader of the output has left.
    with console.capture() as shown:
        for line in lines:
            line.rstrip()
            console.print(line, soft_wrap=True)
    return shown.get()


def generate(
    model: LoLForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | None,
    *,
    sampling: Sampling,
    seed: int,
    path: GivenPath | None = None,
    path_weight: float | None = None,
    show_path: bool = False,
) -> int:
    """Continue a prompt, or, where there is none, what standard input holds: the whole of a pipe as one prompt (a line
    break at its end is the shell's and is left out), the lines of a terminal as a conversation.

    Returns:
        The exit code.

    Raises:
        UserError: input that is no text, and what the model refuses.
    """
    generator = seeded(seed, model.device)

    def begin(path: GivenPath | None) -> Document:
        return Document(model, tokenizer, path=path, path_weight=path_weight, generator=generator)

    document = begin(path)
    if prompt is None and sys.stdin.isatty():
        return converse(document, begin, sampling, Screen(model.config.num_experts, show_path))
    pieces = document.write(_read_pipe() if prompt is None else prompt, sampling)
    screen = Screen(model.config.num_experts, show_path)
    try:
        for piece in pieces:
            screen.show(piece)
    finally:
        screen.end()
    return 0


def converse(
    document: Document, begin: Callable[[GivenPath | None], Document], sampling: Sampling, screen: Screen
) -> int:
    """Read lines and go on from each, until the input ends; returns the exit code.

    Args:
        document: What the first line begins.
        begin: Makes another document, on a path.
    """
    _tell("type a beginning; /help says what else there is, Ctrl-D leaves")
    while True:
        try:
            line = _read_entry()
        except (EOFError, KeyboardInterrupt) as left:
            print(file=sys.stderr)
            return 130 if isinstance(left, KeyboardInterrupt) else 0
        try:
            match line.split() if COMMAND.match(line) else []:
                case ["/help"]:
                    print(HELP, file=sys.stderr)
                case ["/new"]:
                    document = begin(document.path)
                case ["/path", *blocks]:
                    document.path = _read_path(blocks)
                case [word, *_]:
                    raise UserError(f"there is no command {word} like this; /help lists them, and \\{word} is text")
                case _:
                    code = _go_on(document, line[line.startswith("\\/") :], sampling, screen)
                    if code:
                        return code
        except UserError as error:
            _tell(str(error))
        if document.ended:
            _tell("the document has ended; what you type next begins a new one")
            document = begin(document.path)


def _go_on(document: Document, text: str, sampling: Sampling, screen: Screen) -> int:
    """Write until the model has, or a signal stops it between two tokens; returns 0, or the exit code to leave with."""
    _check_text(text)
    with Interrupt() as interrupt:
        pieces = document.write(text, sampling)
        try:
            for piece in pieces:
                # What was typed is on the screen already; among path lines it is shown in its windows.
                if screen.show_path or not piece.given:
                    screen.show(piece)
                if interrupt.requested:
                    break
        finally:
            screen.end()
    if interrupt.signal == "SIGTERM":
        return 143
    if interrupt.requested:
        _tell("stopped; Enter goes on, Ctrl-D leaves")
    return 0


def _read_entry() -> str:
    """A line, or several where lines end in a backslash."""
    lines = [_read_line("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(_read_line(". "))
    return "\n".join(lines)


def _read_line(sign: str) -> str:
    if sys.stdout.isatty():
        # Line editing and history, where Python has it: importing it is enough.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        return input(sign)
    print(sign, end="", file=sys.stderr, flush=True)
    return input()


def _read_pipe() -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text ({error}): write it in UTF-8") from error
    _check_text(text)
    return text.removesuffix("\n")


def _check_text(text: str) -> None:
    if not is_whole_text(text):
        raise UserError("the input is not UTF-8 text: write it in UTF-8")


def _read_path(words: list[str]) -> list[int] | None:
    if words == ["free"]:
        return None
    try:
        path = [int(word) for word in words]
    except ValueError:
        path = []
    if not path:
        raise UserError("give one block per depth, as in /path 0 1 2, or /path free")
    return path


def _is_one_place() -> bool:
    """Whether standard output and standard error are the same terminal, pipe or file."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def _tell(message: str) -> None:
    print(f"lol: {message}", file=sys.stderr, flush=True)
