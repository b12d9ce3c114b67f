"""A model whose windows take different blocks, and the real server that serves it in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from lol import LoLConfig, LoLForCausalLM
from lol.data.tokenizer import train_tokenizer
from lol.serve.completions import Served
from lol.train.loading import load_model
from small_run import MODEL, environment


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


@pytest.fixture(scope="session")
def served(served_folder: Path) -> Served:
    """The same model in this process."""
    return Served("loud", *load_model(served_folder))


@pytest.fixture(scope="session")
def address(served_folder: Path) -> Iterator[str]:
    """Where `lol serve` listens."""
    command = [sys.executable, "-m", "lol", "serve", "--model", str(served_folder), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--max-prompt-tokens", "1000", "--max-new-tokens", "2000"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert line.startswith("serving loud at http://127.0.0.1:"), (line, process.poll())
        yield line.split()[3].removesuffix("/v1")
    finally:
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (out, err) == ("", "")


@pytest.fixture(scope="session")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
