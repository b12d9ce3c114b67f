"""Playing with a trained run: the path and the states that the model itself reports, and complaints that help."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lol import UserError
from lol.cli import main
from lol.experiments.toy.config import MODELS
from lol.experiments.toy.discovery.runs import DISCOVERIES, restore
from lol.experiments.toy.discovery.train import Discovery
from lol.experiments.toy.play import kind_of, load_run, read_line, read_state
from lol.experiments.toy.records import weights_of
from lol.experiments.toy.runs import ToyRun, toy_run
from lol.experiments.toy.task import split_programs


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small = replace(MODELS["learned"], train_steps=2, batch_size=8, hidden_size=16, intermediate_size=16)
    monkeypatch.setitem(MODELS, "learned", small)
    toy_run(ToyRun("learned", out=tmp_path))
    return tmp_path / "learned.programs-0.seed-0.json"


def test_play_shows_what_the_model_does(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("12345678 inc rev mul3\n\nnever read\n"))
    assert main(["toy", "play", str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.split()[:1] in (["input"], ["inc"], ["rev"], ["mul3"])]
    assert [row[-1] for row in rows] == ["12345678", "23456789", "98765432", "74185296"]

    model = load_run(record).model
    with torch.no_grad():
        output = model(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), torch.tensor([[0, 1, 3]]))
    assert [row[1] for row in rows[1:]] == [str(block) for block in output.experts[0].tolist()]
    assert [row[-2] for row in rows] == [read_state(model, output, step) for step in range(4)]
    # The last state is what the model answers.
    assert read_state(model, output, 3) == "".join(map(str, output.logits[0].argmax(-1).tolist()))
    for step, row in enumerate(rows[1:]):
        probability = output.router_logits[step][0].softmax(-1)
        assert row[2] == f"{probability[output.experts[0, step]]:.2f}"
    assert "never read" not in "".join(lines)


def test_a_wrong_line_can_be_typed_again_and_ends_a_pipe(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for at_terminal in (True, False):
        capsys.readouterr()
        typed = io.StringIO("1234 inc\n12345678 inc rev mul3\n")
        monkeypatch.setattr(typed, "isatty", lambda at_terminal=at_terminal: at_terminal)
        monkeypatch.setattr(sys, "stdin", typed)
        assert main(["toy", "play", str(record)]) == (0 if at_terminal else 2)
        said = capsys.readouterr()
        assert ("74185296" in said.out) == at_terminal
        assert "type, for example, 12345678 inc rev rot" in (said.out if at_terminal else said.err)


def test_a_discovery_is_played_along_its_routers_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = DISCOVERIES["ord"]
    small = replace(config.toy, hidden_size=16, intermediate_size=16, batch_size=8)
    monkeypatch.setitem(DISCOVERIES, "ord", replace(config, toy=small, explore_steps=20, settle_steps=1, tries=24))
    assert main(["toy", "discover", "ord", "--seed", "3", "--out", str(tmp_path)]) == 0
    file = tmp_path / "ord.programs-0.seed-3.json"
    trained = load_run(file)
    program = trained.known[5]
    # As it was when the record was written: every program's accuracy again.
    discovery = Discovery(replace(DISCOVERIES["ord"]), 3)
    restore(discovery, load_file(weights_of(file)))
    assert discovery.measure(trained.known) == trained.record["trained"]

    capsys.readouterr()
    names = " ".join(small.primitives[primitive] for primitive in program)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"12345678 {names}\n"))
    assert main(["toy", "play", str(file)]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.split()[:1] and line.split()[0] in small.primitives]
    path = discovery.router.path(torch.tensor([program]))[0].tolist()
    assert [row[:3] for row in rows] == [
        [small.primitives[primitive], str(block), "1.00"] for primitive, block in zip(program, path, strict=True)
    ]
    assert "This program was trained." in said


def test_kinds_of_programs() -> None:
    config = MODELS["learned"]
    split = split_programs(config.task, "programs", 0, 16)
    kinds = {program: kind_of(program, config, split.trained) for program in config.task.programs}
    assert {program for program, kind in kinds.items() if kind == "trained"} == set(split.trained)
    assert any("computes the same" in kind for kind in kinds.values())
    by_function = split_programs(config.task, "functions", 0, 16)
    assert {kind_of(program, config, by_function.trained) for program in by_function.held_out} == {
        "held out, and its function too"
    }


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1234567 inc inc inc", "1234567 is not 8 digits"),
        ("1234567x inc inc inc", "1234567x is not 8 digits"),
        ("12345678 inc inc", "a program of 2 steps, not of 3"),
        ("12345678", "a program of 0 steps, not of 3"),
        ("12345678 inc inc up", "no primitive up"),
    ],
)
def test_lines_that_are_no_program(line: str, complaint: str) -> None:
    with pytest.raises(UserError, match=f"{complaint}.*12345678 inc rev rot"):
        read_line(line, MODELS["learned"])


def test_files_that_are_no_run(record: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text in ("{}", "[]", "{broken", '{"config": {}}'):
        other.write_text(text)
        with pytest.raises(UserError, match=r"other.json is no record.*`lol toy run` or `lol toy discover` wrote"):
            load_run(other)
    other.write_text(json.dumps(json.loads(record.read_text()) | {"config": {"unheard_of": 1}}))
    with pytest.raises(UserError, match=r"another version.*unheard_of"):
        load_run(other)
    weights_of(record).write_bytes(weights_of(record).read_bytes()[:100])
    with pytest.raises(UserError, match="has not the weights of this run"):
        load_run(record)
    weights_of(record).unlink()
    with pytest.raises(UserError, match=r"lol toy run learned --seed 0 --out FOLDER"):
        load_run(record)
