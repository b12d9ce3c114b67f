"""A path with a name, as a file: what `lol studio` saves and `lol generate --path-file` reads.

FOLDER/NAME.json: {"name", "model", "path", "path_weight", "note"}. `path` is one block per depth, or per depth a row of
one block per window; -1 leaves a window to the router. `path_weight` is the weight of a forced block's update, null the
router's own probability of it.
"""

import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lol.errors import UserError

Blocks = list[int] | list[list[int]]
NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"
_LARGEST = 2**31
_FIELDS = {"name", "model", "path", "path_weight", "note"}


@dataclass(frozen=True)
class SavedPath:
    """A path that was given a name."""

    name: str
    """Letters, digits, points, dashes and underscores, no point in front."""
    model: str
    """Of which model it is, as the studio calls it; for reading only."""
    path: Blocks
    path_weight: float | None = None
    note: str = ""


def is_name(name: str) -> bool:
    """Whether a path may be called this."""
    return re.fullmatch(NAME, name) is not None


def read_saved_path(file: Path) -> SavedPath:
    """Read a file.

    Raises:
        UserError: there is none, or it holds no path.
    """
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): give a path that lol studio has saved") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}): save the path again, or repair the file") from None
    return _parse(values, str(file))


def write_saved_path(saved: SavedPath, file: Path) -> None:
    """Write a file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as opened:
        json.dump(asdict(saved), opened, ensure_ascii=False, allow_nan=False)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)


def _parse(values: Any, where: str) -> SavedPath:
    if not isinstance(values, dict) or "path" not in values:
        raise UserError(f'{where} holds no path: it must be a JSON object with a list of blocks as "path"')
    if odd := sorted(values.keys() - _FIELDS):
        raise UserError(f"{where} has a field {odd[0]!r} that no saved path has: leave it out")
    path, weight = values["path"], values.get("path_weight")
    rows = path if isinstance(path, list) else None
    if not rows or not (_are_blocks(rows) or all(isinstance(row, list) and _are_blocks(row) for row in rows)):
        raise UserError(
            f"{where}: path must be a list with one block per depth, or a list per depth with one block per window "
            "(-1 leaves the router free)"
        )
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float) or not _finite(weight)):
        raise UserError(f"{where}: path_weight must be null (the router's own) or a number")
    texts = {name: values.get(name, "") for name in ("name", "model", "note")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"{where}: {name} must be a text")
    return SavedPath(**texts, path=rows, path_weight=None if weight is None else float(weight))


def _are_blocks(row: list[Any]) -> bool:
    return all(type(block) is int and -1 <= block < _LARGEST for block in row)


def _finite(number: float) -> bool:
    return math.isfinite(number) and abs(number) < 1e30
