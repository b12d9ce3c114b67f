"""What the script takes out of a source distribution, and that it can be called again."""

from __future__ import annotations

import io
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import fetch_transformers_tests as script
import pytest


def archive(folder: Path, *names: str) -> Path:
    path = folder / "transformers-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(f"transformers-1.0/{name}"), io.BytesIO())
    return path


def prepare(monkeypatch: pytest.MonkeyPatch, prefix: Path, *names: str) -> Path:
    """An environment of its own, and pip with an archive at hand; returns where the tests will be."""
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(script, "_download", lambda _release, folder: archive(folder, *names))
    return prefix / "share" / "transformers-tests" / version("transformers")


def test_only_tests_are_unpacked_and_nothing_else_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = prepare(monkeypatch, tmp_path, "tests/test_a.py", "tests/deep/test_b.py", "src/c.py", "testsuite.py")
    assert script.main() == 0
    assert sorted(path.name for path in folder.rglob("*.py")) == ["test_a.py", "test_b.py"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_second_call_leaves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = prepare(monkeypatch, tmp_path)
    folder.mkdir(parents=True)
    (folder / "mine.py").touch()
    assert script.main() == 0
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


@pytest.mark.parametrize("names", [("src/c.py",), ("tests/../../../outside.py",)], ids=["no tests", "out of place"])
def test_an_archive_that_will_not_do_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
):
    folder = prepare(monkeypatch, tmp_path, *names)
    with pytest.raises((SystemExit, tarfile.FilterError)):
        script.main()
    assert not list(folder.parent.iterdir())
