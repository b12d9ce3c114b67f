"""Which files of the Python standard library are text to train on: the corpus that every machine has.

Chosen for a split by module: a near copy of another module would carry held-out text into training, a generated
table is neither prose nor code, and a machine's own build settings are no part of the library.
"""

import os
import sysconfig
from pathlib import Path

# Folders left out wherever they occur.
_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "lib-dynload",
    "lib2to3",  # its tokenizer and grammar repeat tokenize and token
    "encodings",  # code page tables
    "pydoc_data",  # the language reference as one string literal
    "__phello__",
}
# Single files that are tables or that are made when the interpreter is built.
_FILES = {"html/entities.py", "stringprep.py", "__hello__.py"}
_PREFIXES = ("_sysconfigdata", "config-")


def stdlib_files() -> list[tuple[str, Path]]:
    """The standard library's Python sources, in order of path.

    Returns:
        Pairs of top-level module name (`json` for `json/decoder.py`) and file. Left out: installed packages, tests,
        `encodings` and other generated tables, `lib2to3`, and files about the build of this interpreter.
        Source: decided here.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _FOLDERS and not name.startswith(_PREFIXES)]
        for name in names:
            path = Path(parent, name).relative_to(root)
            if path.suffix == ".py" and path.as_posix() not in _FILES and not name.startswith(_PREFIXES):
                files[path.as_posix()] = (path.parts[0].removesuffix(".py"), root / path)
    return [file for _, file in sorted(files.items())]
