"""The paths that were saved, as files of one folder."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lol.errors import UserError
from lol.paths.saved import SavedPath, is_name, read_saved_path, write_saved_path
from lol.serve.errors import Conflict, NotFound
from lol.studio.folders import files
from lol.studio.limits import MAX_SAVED_PATHS

_ENDING = ".json"


class PathNotFound(NotFound):
    """A request names a path that is not saved."""

    param = "name"
    code = "path_not_found"


class SavedPaths:
    """The folder; may be asked from any thread."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()

    def listed(self) -> list[SavedPath]:
        """All that can be read, by name: that of the file counts."""
        found = []
        for name, file in self._files().items():
            try:
                found.append(replace(read_saved_path(file), name=name))
            except UserError:
                continue
        return found

    def save(self, saved: SavedPath, overwrite: bool) -> SavedPath:
        """Write one.

        Raises:
            UserError: the name cannot be a file's, or there are too many.
            Conflict: there is one of this name, and it may not be overwritten.
        """
        if not is_name(saved.name):
            raise UserError("a path's name has 1 to 64 letters, digits, points, dashes and underscores, no point first")
        with self._lock:
            file = self.folder / f"{saved.name}{_ENDING}"
            there = file.exists() or file.is_symlink()
            if there and not overwrite:
                raise Conflict(f"a path {saved.name!r} is there already: choose another name, or ask to overwrite it")
            if not there and len(self._files()) >= MAX_SAVED_PATHS:
                raise UserError(f"{MAX_SAVED_PATHS} paths are saved already: delete one first")
            self._write(lambda: write_saved_path(saved, file), file)
        return saved

    def delete(self, name: str) -> None:
        """Delete one.

        Raises:
            PathNotFound: there is none of this name.
        """
        with self._lock:
            file = self._files().get(name)
            if file is None:
                raise PathNotFound(f"there is no saved path {name!r}: choose one that /api/paths lists")
            self._write(file.unlink, file)

    def _files(self) -> dict[str, Path]:
        found = {name.removesuffix(_ENDING): file for name, file in files(self.folder, _ENDING).items()}
        return {name: file for name, file in found.items() if is_name(name)}

    def _write(self, change: Callable[[], object], file: Path) -> None:
        try:
            change()
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}): make room there, or give --paths") from error
