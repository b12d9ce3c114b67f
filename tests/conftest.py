"""What all tests share: a small corpus, a run trained on it by the command line, and commands run in this process."""

from pathlib import Path

import pytest
import torch

from lol import cli
from small_run import FLAGS, Lol, write_corpus

# The models are tiny and the tests run side by side: threads that wait for each other take most of the time.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 2 steps."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    assert cli.main(["train", "--run", str(run), "--data", str(corpus), "--steps", "2", *FLAGS]) == 0
    return run


@pytest.fixture
def lol(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lol:
    monkeypatch.setenv("COLUMNS", "300")

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as exit_:
            code = exit_.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run
