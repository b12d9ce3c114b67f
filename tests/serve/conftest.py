"""The real server in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from lol.serve.completions import Served
from lol.train.loading import load_model
from small_run import environment


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
