"""Solved puzzles as files that `lol train` reads: a document a line, and the strategy for the router alone.

A corpus is a function of the puzzle, the numbers of examples and the seed. Written once, it gives the trainer's loader,
packing and resuming what they have of any text. Three streams of puzzles are drawn apart: to train on, to validate on
(held-out loss, mode paths) and to test on. No prompt of the latter two is written for training; `trained_on` reads of
a file which of some were.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lol.data.tokenizer import word_tokenizer
from lol.errors import UserError
from lol.experiments.strategies.puzzle import Puzzle

TRAIN, VALIDATION, TOKENIZER, MANIFEST = "train.jsonl", "validation.jsonl", "tokenizer", "manifest.json"
STRATEGY_COLUMN = "strategy"
Stream = Literal["train", "validation", "test"]
_STREAMS: tuple[Stream, ...] = ("train", "validation", "test")
# Puzzles are drawn so many at a time, each time by a generator of its own.
_BLOCK = 64


@dataclass(frozen=True)
class CorpusConfig:
    """How many puzzles, and from which seed."""

    examples: int
    """Documents to train on, each a puzzle of its own under one strategy."""
    validation: int = 400
    """Puzzles to validate on, under every strategy."""
    test: int = 400
    """Puzzles to test on, under every strategy."""
    seed: int = 0


def puzzles_of(puzzle: Puzzle, config: CorpusConfig, stream: Literal["validation", "test"]) -> list[Any]:
    """The puzzles that are held out for a purpose."""
    wanted = config.validation if stream == "validation" else config.test
    drawn = _draw(puzzle, config.seed, stream)
    return [next(drawn) for _ in range(wanted)]


def write_corpus(puzzle: Puzzle, config: CorpusConfig, folder: Path) -> Path:
    """Write the corpus into `folder`, which is kept as it is where it already holds this one; returns the folder.

    Raises:
        UserError: the folder holds another one, on which runs beside it may have been trained.
    """
    made_with = {"puzzle": repr(puzzle), **asdict(config)}
    if _holds(folder, made_with):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder of its own, for the runs of an experiment may be begun side by side.
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        partial.chmod(0o755)
        word_tokenizer([*puzzle.strategies, *puzzle.vocabulary]).save_pretrained(partial / TOKENIZER)
        validation = puzzles_of(puzzle, config, "validation")
        held_out = {tuple(puzzle.prompt(instance)) for instance in [*validation, *puzzles_of(puzzle, config, "test")]}
        digests = {
            TRAIN: _write(partial / TRAIN, _train_rows(puzzle, config, held_out)),
            VALIDATION: _write(partial / VALIDATION, _all_strategies(puzzle, validation)),
        }
        (partial / MANIFEST).write_text(json.dumps({"made_with": made_with, "sha256": digests}, indent=2) + "\n")
        if not _holds(folder, made_with):
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _holds(folder: Path, made_with: dict[str, Any]) -> bool:
    """Whether the folder holds this corpus. Raises UserError where it holds another."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return False
    if json.loads(manifest.read_text(encoding="utf-8"))["made_with"] != made_with:
        raise UserError(f"{folder} holds a corpus of other settings: choose another folder for the runs")
    return True


def trained_on(folder: Path, puzzle: Puzzle, instances: Iterable[Any]) -> list[bool]:
    """Whether the corpus in `folder` has each puzzle among those to train on, under whichever strategy."""
    asked = [" ".join(puzzle.prompt(instance)) for instance in instances]
    wanted, found, end = set(asked), set[str](), f" {puzzle.scored_after} "
    with (folder / TRAIN).open(encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"]
            prompt = text[: text.index(end) + len(end) - 1]
            if prompt in wanted:
                found.add(prompt)
    return [prompt in found for prompt in asked]


def _draw(puzzle: Puzzle, seed: int, stream: Stream) -> Iterator[Any]:
    """Puzzles without end: a block is a function of the seed, the stream and its number."""
    block = 0
    while True:
        yield from puzzle.draw(np.random.default_rng([seed, _STREAMS.index(stream), block]), _BLOCK)
        block += 1


def _train_rows(puzzle: Puzzle, config: CorpusConfig, held_out: set[tuple[str, ...]]) -> Iterator[dict[str, str]]:
    """The strategies by turns, each on puzzles of its own."""
    written = 0
    for instance in _draw(puzzle, config.seed, "train"):
        if written == config.examples:
            return
        prompt = puzzle.prompt(instance)
        if tuple(prompt) not in held_out:
            yield _row(puzzle, instance, prompt, puzzle.strategies[written % len(puzzle.strategies)])
            written += 1


def _all_strategies(puzzle: Puzzle, instances: Sequence[Any]) -> Iterator[dict[str, str]]:
    for instance in instances:
        for strategy in puzzle.strategies:
            yield _row(puzzle, instance, puzzle.prompt(instance), strategy)


def _row(puzzle: Puzzle, instance: Any, prompt: Sequence[str], strategy: str) -> dict[str, str]:
    return {"text": " ".join([*prompt, *puzzle.trace(instance, strategy)]), STRATEGY_COLUMN: strategy}


def _write(path: Path, rows: Iterator[dict[str, str]]) -> str:
    """Write rows as JSON lines; returns the SHA-256 of the file."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for row in rows:
            line = json.dumps(row).encode() + b"\n"
            digest.update(line)
            file.write(line)
    return digest.hexdigest()
