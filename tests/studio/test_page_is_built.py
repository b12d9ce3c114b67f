"""The page that the package ships is what its source builds."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None and "CI" not in os.environ, reason="no npm here to build the page with")
def test_the_shipped_page_is_built_of_its_source(tmp_path: Path) -> None:
    build = ["npx", "--no-install", "vite", "build", "--logLevel", "warn", "--outDir", str(tmp_path)]
    subprocess.run([*build, "--emptyOutDir"], cwd=ROOT / "studio", check=True)
    assert _files(tmp_path) == _files(ROOT / "src" / "lol" / "studio" / "page"), "run: make page"


def test_no_lock_file_names_a_registry() -> None:
    assert '"resolved"' not in (ROOT / "studio" / "package-lock.json").read_text()
