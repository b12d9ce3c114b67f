"""Fetch the tests of the installed transformers release, for `test_transformers_suite.py`.

A release's wheel holds no tests, its source distribution does. pip downloads that, and `tests/` of it goes to
`share/transformers-tests/VERSION` below the environment's prefix. Does nothing where the folder is there already.

    python tests/ecosystem/fetch_transformers_tests.py
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path


def main() -> int:
    release = version("transformers")
    folder = Path(sys.prefix) / "share" / "transformers-tests" / release
    if folder.is_dir():
        print(f"{folder} is there already")
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that it can be put there in one step: whoever finds the folder finds all of it.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as scratch:
        fetched = _unpack_tests(_download(release, Path(scratch)), Path(scratch))
        try:
            os.rename(fetched, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    print(f"tests of transformers {release} are in {folder}")
    return 0


def _download(release: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
    subprocess.run([*pip, "--dest", str(folder), f"transformers=={release}"], check=True)
    (archive,) = folder.glob("transformers-*.tar.gz")
    return archive


def _unpack_tests(archive: Path, folder: Path) -> Path:
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if member.name.startswith(f"{top}/tests/")]
        if not members:
            raise SystemExit(f"{archive.name} holds no tests/: this release publishes none")
        tar.extractall(folder, members, filter="data")
    return folder / top / "tests"


if __name__ == "__main__":
    sys.exit(main())
