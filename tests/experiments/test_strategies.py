"""What maze and sudoku share: corpora, grades, and an experiment from end to end."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lol.data.packing import held_out_rows
from lol.data.text import open_documents
from lol.data.tokenizer import load_tokenizer
from lol.errors import UserError
from lol.experiments.harness import Options, run_experiment
from lol.experiments.maze.puzzle import MazePuzzle
from lol.experiments.strategies import corpus
from lol.experiments.strategies.corpus import (
    MANIFEST,
    STRATEGY_COLUMN,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    CorpusConfig,
    puzzles_of,
    trained_on,
    write_corpus,
)
from lol.experiments.strategies.experiment import Study, strategy_experiment
from lol.experiments.strategies.grading import grade, tally
from lol.experiments.strategies.measure import Writer
from lol.experiments.strategies.puzzle import distinct
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.paths.force import TIED
from lol.train.config import DataConfig, TrainConfig
from small_run import MODEL

SMALL = CorpusConfig(examples=60, validation=12, test=12)


def prompt_of(text: str) -> str:
    return text[: text.index(":") + 1]


def test_a_corpus_is_a_function_of_its_settings_and_keeps_held_out_puzzles_out(tmp_path):
    # So small that the same puzzles are drawn again and again.
    puzzle = MazePuzzle(2)
    folder = write_corpus(puzzle, SMALL, tmp_path / "corpus")
    rows = [json.loads(line) for line in (folder / TRAIN).read_text().splitlines()]
    assert [row[STRATEGY_COLUMN] for row in rows] == list(puzzle.strategies) * 12
    held_out = {" ".join(puzzle.prompt(one)) for one in puzzles_of(puzzle, SMALL, "test")}
    assert len(held_out) > 5
    held_out |= {prompt_of(json.loads(line)["text"]) for line in (folder / VALIDATION).read_text().splitlines()}
    assert not held_out & {prompt_of(row["text"]) for row in rows}

    made = (folder / MANIFEST).stat().st_mtime_ns
    assert write_corpus(puzzle, SMALL, folder) == folder
    assert (folder / MANIFEST).stat().st_mtime_ns == made
    again = write_corpus(puzzle, SMALL, tmp_path / "again")
    assert (again / MANIFEST).read_text() == (folder / MANIFEST).read_text()
    other = write_corpus(puzzle, replace(SMALL, seed=1), tmp_path / "other")
    assert (other / TRAIN).read_bytes() != (folder / TRAIN).read_bytes()
    with pytest.raises(UserError, match="corpus of other settings"):
        write_corpus(puzzle, replace(SMALL, seed=1), again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "corpus", "other"]

    mazes = puzzle.draw(np.random.default_rng(5), 40)
    expected = [" ".join(puzzle.prompt(maze)) in {prompt_of(row["text"]) for row in rows} for maze in mazes]
    assert trained_on(folder, puzzle, mazes) == expected
    assert len(set(expected)) == 2


def test_a_corpus_may_be_written_twice_at_once(tmp_path, monkeypatch):
    """Whoever comes second finds what the first has made, and leaves it alone."""
    puzzle, folder = MazePuzzle(5), tmp_path / "corpus"
    write, made = corpus._write, []

    def overtaken(path, rows):
        if not made:
            made.append(None)
            made[0] = (write_corpus(puzzle, SMALL, folder) / TRAIN).stat().st_ino
        return write(path, rows)

    monkeypatch.setattr(corpus, "_write", overtaken)
    assert write_corpus(puzzle, SMALL, folder) == folder
    assert (folder / TRAIN).stat().st_ino == made[0]
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_prompts_and_documents_are_laid_out_as_in_training(tmp_path):
    puzzle = MazePuzzle(3)
    folder = write_corpus(puzzle, SMALL, tmp_path / "corpus")
    tokenizer = load_tokenizer(folder / TOKENIZER)
    model = LoLForCausalLM(LoLConfig(**(MODEL | {"vocab_size": len(tokenizer), "router_only_tokens": True})))
    writer = Writer(puzzle, model, tokenizer)
    documents = open_documents(str(folder / VALIDATION), router_only_column=STRATEGY_COLUMN)
    [row] = held_out_rows(documents, tokenizer, 1000, 1, puzzle.scored_after)
    starts = np.flatnonzero(row["position_ids"] == 0).tolist()
    parts = [
        {name: row[name][start:end].tolist() for name in ("input_ids", "router_only_ids", "labels")}
        for start, end in pairwise(starts)
    ]
    assert len(parts) > 20
    instances = [one for one in puzzles_of(puzzle, SMALL, "validation") for _ in puzzle.strategies]
    for part, instance, name in zip(parts, instances, puzzle.strategies * 12, strict=False):
        labels = part.pop("labels")
        assert part == writer.document(instance, name)
        # What the model is asked to write is what it learned to write.
        asked = writer.prompt_row(writer.case(instance), name)
        assert part["input_ids"][: labels.count(-100)] == asked["input_ids"]
        assert -100 not in labels[labels.count(-100) :]


def apart(puzzle: MazePuzzle):
    """A maze on which all strategies differ, and their traces."""
    for maze in puzzle.draw(np.random.default_rng(0), 50):
        own = {name: puzzle.trace(maze, name) for name in puzzle.strategies}
        if distinct(list(own.values())):
            return maze, own
    raise AssertionError


def test_grades():
    puzzle = MazePuzzle(4)
    maze, own = apart(puzzle)
    path = own["bfs"][own["bfs"].index("path") :]
    for name, trace in own.items():
        found = grade(puzzle, maze, trace, own)
        assert (found.strategy, found.exact, found.verdict.solves) == (name, True, True)
    near = grade(puzzle, maze, own["deadend"][1:], own)
    assert (near.strategy, near.exact) == ("deadend", False)
    lost = grade(puzzle, maze, own["bfs"][:-1], own)
    assert (lost.strategy, lost.verdict.legal, lost.verdict.solves) == (None, True, False)
    # Two that are equally far, by construction: a trace and its neighbours with another last visit.
    pair = {"one": ["a1", *path], "two": ["a2", *path]}
    assert grade(puzzle, maze, path, pair).strategy == TIED
    endless = grade(puzzle, maze, own["bfs"] + ["a1"] * puzzle.longest_trace, own)
    assert not endless.verdict.legal

    grades = [grade(puzzle, maze, own[name], own) for name in ("bfs", "bfs", "dfs")]
    grades += [near, lost, grade(puzzle, maze, path, pair)]
    counts = tally(["bfs", "dfs", "dfs", "deadend", "deadend", "astar"], grades, puzzle.strategies)
    assert counts["asked"] == [1, 2, 1, 0, 2]
    assert counts["exact"] == [1, 1, 0, 0, 0]
    assert counts["solved"] == [1, 2, 1, 0, 1]
    assert counts["legal"] == [1, 2, 1, 0, 2]
    assert counts["matrix"] == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0] * 5, [0] * 5, [0, 0, 0, 0, 1]]
    assert (counts["tied"], counts["unsolved"]) == ([0, 0, 1, 0, 0], [0, 0, 0, 0, 1])
    assert counts["diagonal"][:3] == [1.0, 0.5, 0.0]
    assert counts["diagonal"][4] == 0.5


def small_study() -> Study:
    model = LoLConfig(**(MODEL | {"router_only_tokens": True}))
    return Study(MazePuzzle(3), SMALL, TrainConfig(model=model, data=DataConfig(context_length=64)))


@pytest.mark.slow
def test_an_experiment_from_end_to_end(tmp_path: Path):
    experiment = strategy_experiment("maze", "-", "-", {"tiny": small_study})
    options = Options("maze", fast=True, runs=tmp_path / "runs", out=tmp_path / "out")
    assert run_experiment(experiment, options) == tmp_path / "out"
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    own = record["numbers"]["seed-0"]
    kept = own["kept"]
    assert own["drawn"] == kept + own["alike"] + own["trained_on"] == 8
    assert kept > 0
    assert own["told"]["asked"] == own["untold"]["asked"] == [kept] * 5
    assert set(own["forced"]) == {"router", "mode", "1.0"}
    assert all(len(mode["blocks"]) == MODEL["num_routed_depths"] for mode in own["mode_paths"].values())
    assert len(own["mixed"]) == 2
    assert all(sum(one["produced"].values()) == kept for one in own["mixed"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"results.json", "section.md", "confusion-seed-0.svg", "mixed-seed-0.svg"}
    section = (tmp_path / "out" / "section.md").read_text()
    assert section.count("| told ") == 5
    assert "confusion-seed-0.svg" in section
