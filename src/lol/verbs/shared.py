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
    result = verb(command)
    if command.json is not None and result is not None:
        command.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0
