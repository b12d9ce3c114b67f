"""--compile changes no loss, breaks no graph, and compiles nothing anew for another path."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lol.errors import UserError
from lol.train.session import prepare
from small_run import environment, small_config

PROGRAM = Path(__file__).with_name("compile_program.py")


@pytest.fixture(scope="module")
def results(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("compiled")), str(corpus)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "recompile_limit" not in done.stderr
    return json.loads(done.stdout.rpartition("result ")[2])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["inductor", "experts, truncated"])
def test_losses_are_those_without_it(results: dict[str, dict[str, Any]], case: str) -> None:
    plain, compiled = results[case]["losses"]
    assert compiled == pytest.approx(plain, abs=1e-5)
    assert results[case]["graphs"][0] > 2
    assert results[case]["breaks"] == []


@pytest.mark.slow
def test_no_path_and_no_depth_is_compiled_anew(results: dict[str, dict[str, Any]]) -> None:
    """Graphs after each step: the first four and an evaluation bring all that there are."""
    graphs, depths = results["experts, truncated"]["graphs"], results["experts, truncated"]["depths"]
    assert graphs[4:] == graphs[-1:] * 6
    assert depths[4] < depths[-1]


def test_without_a_compiler_it_says_so(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"--compile needs a C.. compiler, and no-such-compiler is not to be found"):
        prepare(small_config(corpus, compile=True), tmp_path / "run", None)
