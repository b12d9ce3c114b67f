"""Which files of the Python standard library are text to train on: the corpus that every machine has.

Chosen for a split by module: a near copy of another module would carry held-out text into training, a generated
table is neither prose nor code, and a machine's own build settings are no part of the library.
"""

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
    files = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if _FOLDERS.intersection(name.parts) or name.as_posix() in _FILES or name.parts[0].startswith(_PREFIXES):
            continue
        files.append((name.parts[0].removesuffix(".py"), path))
    return files
