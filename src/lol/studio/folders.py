"""What lies in folders: runs, checkpoints, files. Links are never followed, so nothing outside a folder is listed."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from lol.studio.limits import MAX_RUN_LEVELS, MAX_RUNS, MAX_SCANNED_FOLDERS
from lol.train.checkpoint import find_damage
from lol.train.metrics import FILE as METRICS
from lol.train.run_folder import CHECKPOINTS, CONFIG

_CHECKPOINT = re.compile(r"step-(\d+)")


def run_folders(root: Path) -> dict[str, Path]:
    """The runs below a folder by their path there; a run is a folder with a configuration, and metrics or checkpoints.
    At most so many levels, folders and runs are looked at (limits.py)."""
    found: dict[str, Path] = {}
    level, seen = [root], 0
    for _ in range(MAX_RUN_LEVELS):
        below: list[Path] = []
        for folder in level:
            for inner in _subfolders(folder):
                seen += 1
                if seen > MAX_SCANNED_FOLDERS or len(found) >= MAX_RUNS:
                    return found
                if _is_run(inner):
                    found[inner.relative_to(root).as_posix()] = inner
                else:
                    below.append(inner)
        level = below
    return found


def checkpoints_of(run: Path) -> dict[int, Path]:
    """The whole checkpoints of a run by step, oldest first; told by the sizes of their files."""
    found = {}
    for folder in _subfolders(run / CHECKPOINTS):
        match = _CHECKPOINT.fullmatch(folder.name)
        if match is not None and find_damage(folder, sums=False) is None:
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def subfolders(root: Path) -> dict[str, Path]:
    """The folders in a folder by name, without hidden ones."""
    return {folder.name: folder for folder in _subfolders(root)}


def files(folder: Path, *endings: str) -> dict[str, Path]:
    """The files in a folder with one of these endings by name, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if entry.is_file(follow_symlinks=False) and not entry.name.startswith(".")
            )
    except OSError:
        return {}
    return {name: folder / name for name in names if name.endswith(endings)}


def _subfolders(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            )
    except OSError:
        return
    for name in names:
        yield folder / name


def _is_run(folder: Path) -> bool:
    config, metrics, checkpoints = (folder / name for name in (CONFIG, METRICS, CHECKPOINTS))
    # A link may lead anywhere.
    if any(path.is_symlink() for path in (config, metrics, checkpoints)):
        return False
    return config.is_file() and (metrics.is_file() or checkpoints.is_dir())
