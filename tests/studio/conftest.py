"""A folder of runs, results and saved paths, and the studio that shows it: in this process, and in one of its own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lol.serve.engine import Engine
from lol.serve.guard import Access
from lol.studio.app import make_app
from lol.train.loading import load_model
from small_run import environment
from studio_cases import SECRET, Client, shown_in


@pytest.fixture(scope="session")
def place(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/ with two runs, one of them deep; results/ of the toy and of an experiment; and links that lead outside."""
    root = tmp_path_factory.mktemp("place")
    shutil.copytree(trained, root / "runs/demo")
    shutil.copytree(trained, root / "runs/experiments/huginn-tiny/L2-seed-0")
    outside = root / "outside"
    outside.mkdir()
    for name in ("secret.json", "secret.md", "secret.svg"):
        (outside / name).write_text(json.dumps({"command": SECRET}))
    shutil.copytree(trained, outside / "run")
    (root / "runs/linked").symlink_to(outside / "run")
    toy = root / "results/toy"
    splits = {"runs": {"split": "programs", "split_number": 0}}
    splits["discovery"] = {"toy": {"split": "functions", "split_number": 1}}
    for kind, split in splits.items():
        (toy / kind).mkdir(parents=True)
        record = {"model": "ord", "command": f"lol toy {kind}", "config": split, "seed": 3}
        record |= {"trained": {"accuracy": 99.5, "separation": 0.75}, "held_out": {"accuracy": 12.5}}
        (toy / kind / "one.json").write_text(json.dumps(record))
        (toy / kind / "broken.json").write_text("{")
        (toy / kind / "linked.json").symlink_to(outside / "secret.json")
    (toy / "table.md").write_text("# The toy\n\n![How paths form](forming.svg)\n")
    (toy / "forming.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>')
    (toy / "odd.json").write_text('{"x": NaN, "y": [Infinity, 1]}')
    for name in ("secret.json", "secret.md", "secret.svg"):
        (toy / name).symlink_to(outside / name)
    (root / "results/linked").symlink_to(outside)
    maze = root / "results/maze"
    maze.mkdir()
    counts = {"matrix": [[3, 1], [0, 2]], "tied": [0, 1], "unsolved": [0, 1]}
    numbers = {"seed-0": {"strategies": ["dfs", "bfs"], "forced": {"mode": counts}}, "seed-1": {"paths": []}}
    (maze / "results.json").write_text(json.dumps({"command": "lol experiment maze", "numbers": numbers}))
    return root


@pytest.fixture
def make_client(place: Path) -> Iterator[Callable[..., Client]]:
    """Makes clients of an application in this process."""
    engines: list[Engine] = []

    def make(*models: Path, access: Access | None = None, place: Path = place) -> Client:
        engines.append(Engine(queue=2))
        return Client(make_app(shown_in(place, *models), engines[-1], access or Access(guarded="/api")))

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def client(make_client: Callable[..., Client], served_folder: Path) -> Client:
    """Asks a studio of the loud model."""
    return make_client(served_folder)


@pytest.fixture(scope="session")
def loud(served_folder: Path) -> Any:
    """The model and its tokenizer in this process."""
    return load_model(served_folder)


@pytest.fixture(scope="session")
def studio(served_folder: Path, place: Path) -> Iterator[httpx.Client]:
    """A client of `lol studio` in a process of its own."""
    command = [sys.executable, "-m", "lol", "studio", "--model", str(served_folder), "--port", "0"]
    flags = ["--runs", str(place / "runs"), "--results", str(place / "results"), "--paths", str(place / "live-paths")]
    process = subprocess.Popen(
        [*command, *flags], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert line.startswith("lol studio at http://127.0.0.1:"), (line, process.poll())
        assert line.endswith("for this machine only (Ctrl-C ends it)\n")
        with httpx.Client(base_url=line.split()[3], timeout=60) as its:
            yield its
    finally:
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (out, err) == ("", "")
