"""The README is a script: its commands run as they stand, in order, in a folder with nothing but a text file."""

import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pages import blocks_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def code_blocks() -> list[tuple[str, str]]:
    """(language, code) of every fenced block after the two make commands."""
    blocks = blocks_of(ROOT / "README.md")
    assert blocks[0] == ("bash", blocks[0][1])
    assert re.findall(r"^make \w+", blocks[0][1], flags=re.MULTILINE) == ["make demo", "make test"]
    return blocks[1:]


def test_the_first_lines_are_the_two_commands():
    assert (ROOT / "README.md").read_text().splitlines()[2] == "```bash"
    assert len(code_blocks()) >= 7


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_readme_runs(tmp_path: Path):
    stdlib = Path(sysconfig.get_path("stdlib"))
    text = "\n\n".join(
        (stdlib / name).read_text() for name in ("argparse.py", "ast.py", "calendar.py", "statistics.py")
    )
    (tmp_path / "my-text.txt").write_text(text)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    printed = ""
    for language, code in code_blocks():
        if code.startswith("lol studio"):
            begin_and_end([*shlex.split(code), "--port", "0"], tmp_path, environment)
            continue
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        printed += done.stdout
    assert "held-out loss, nats per token" in printed
    assert (tmp_path / "runs/mine/report.html").stat().st_size > 20_000
    change = re.search(r"largest change of a logit: ([\d.]+)", printed)
    assert change is not None
    assert float(change[1]) > 0


def begin_and_end(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """A server runs until it is told to end; here once it says that it is ready."""
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "http://127.0.0.1:" in process.stdout.readline()
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
