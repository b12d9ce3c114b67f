"""What all tests share: a small corpus, a run trained on it by the command line, a model whose windows take different
blocks, and commands run in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lol import LoLConfig, LoLForCausalLM, cli
from lol.data.tokenizer import train_tokenizer
from small_run import FLAGS, MODEL, Lol, write_corpus

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


@pytest.fixture(scope="session")
def served_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights so large that routes, and the probabilities of tokens, differ."""
    tokenizer = train_tokenizer([corpus.read_text()], MODEL["vocab_size"])
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = LoLForCausalLM(LoLConfig(**MODEL, **ends, initializer_range=0.2))
    assert model.model.router is not None
    torch.nn.init.normal_(model.model.router.weight, std=2.0)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    folder = tmp_path_factory.mktemp("served") / "loud"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


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
