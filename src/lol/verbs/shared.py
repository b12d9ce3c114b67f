"""What several verbs do alike."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lol.errors import UserError


@contextmanager
def needs_extra(verb: str) -> Iterator[None]:
    """A missing package as a mistake whose fix is named."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "lol":
            raise
        raise UserError(
            f"lol {verb} needs {error.name}, which is not installed: pip install library-of-layers[{verb}]"
        ) from None


def write_numbers(command: Any, verb: Callable[[Any], dict[str, Any] | None]) -> int:
    """Do what a command asks for, and write its numbers where `--json` says: a folder that is not there is said first.

    Raises:
        UserError: there is no such folder.
    """
    if command.json is not None and not command.json.parent.is_dir():
        raise UserError(f"there is no folder {command.json.parent} for --json: make it, or choose another")
    result = verb(command)
    if command.json is not None and result is not None:
        command.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0
