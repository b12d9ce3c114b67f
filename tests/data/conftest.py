"""Small real corpora and tokenizers for the tests of lol.data."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import IterableDataset
from transformers import PreTrainedTokenizerFast

from lol.data.text import open_documents
from lol.data.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges."""
    return train_tokenizer(["the cat sat on the mat and the dog sat on the cat " * 4], 300)


@pytest.fixture
def write_rows(tmp_path):
    """Write texts as rows of a new file in the test's folder; returns its path."""

    def write(name: str, texts: list[str], column: str = "text") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({column: texts, "number": range(len(texts))}), path)
        else:
            path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
        return path

    return write


@pytest.fixture
def open_texts(tmp_path):
    """Open texts as documents dealt into some .jsonl files of a folder: as many shards as files."""

    def open_them(texts: list[str], shards: int = 1) -> IterableDataset:
        folder = tmp_path / f"corpus-{shards}"
        folder.mkdir(exist_ok=True)
        for shard in range(shards):
            lines = (json.dumps({"text": text}) + "\n" for text in texts[shard::shards])
            (folder / f"{shard:03}.jsonl").write_text("".join(lines))
        return open_documents(str(folder))

    return open_them
