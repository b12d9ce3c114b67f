"""docs/ecosystem.md is one program: its Python runs as it stands, from top to bottom."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ecosystem_cases import source_folder
from pages import blocks_of

PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path):
    code = [text for language, text in blocks_of(PAGE) if language == "python"]
    assert len(code) == 5
    (tmp_path / "page.py").write_text("\n".join(code))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(source_folder()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
