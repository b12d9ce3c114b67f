"""What states say between blocks: maps of digits that are found again, twists that no program can rule out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lol.cli import main
from lol.experiments.toy.codes import Code, find_code, twists
from lol.experiments.toy.config import MODELS
from lol.experiments.toy.discovery.runs import DISCOVERIES
from lol.experiments.toy.runs import ToyRun, toy_run
from lol.experiments.toy.task import Task

REVERSED = tuple(range(7, -1, -1))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (Code(), "right"),
        (Code(digits=tuple((x + 9) % 10 for x in range(10))), "plus 9"),
        (Code(REVERSED, tuple(3 * x % 10 for x in range(10))), "reversed, times 3"),
        (Code((2, 3, 4, 5, 6, 7, 0, 1)), "turned by 2"),
        (Code(digits=(1, 2, 3, 4, 5, 5, 4, 8, 9, 0)), "digits 1234554890"),
        (Code((1, 0, 2, 3, 4, 5, 6, 7)), "places (1, 0, 2, 3, 4, 5, 6, 7)"),
    ],
)
def test_a_map_is_found_again_and_named(code: Code, name: str):
    right = torch.randint(10, (2000, 8), generator=torch.Generator().manual_seed(0))
    written = code.apply(right)
    assert torch.equal(written[3, 0], torch.tensor(code.digits[right[3, code.places[0]]]))
    # A tenth of the digits are any.
    noisy = torch.where(torch.rand(written.shape) < 0.1, torch.randint(10, written.shape), written)
    assert find_code(written, right) == find_code(noisy, right) == code
    assert str(code) == name


@pytest.mark.parametrize(
    ("primitives", "steps", "names"),
    [
        # Nothing that turns, mirrors and counts comes round after three steps, on either set of primitives.
        (("inc", "rev", "rot", "mul3"), 3, set()),
        (("rot", "rot5", "ramp", "mul3left"), 3, set()),
        # After four, what is its own inverse does. Reversing does not commute with rotating.
        (("inc", "rev", "rot", "mul3"), 4, {"plus 5", "turned by 4", "turned by 4, plus 5"}),
        (
            ("inc", "rev", "mul3"),
            4,
            {"plus 5", "turned by 4", "turned by 4, plus 5", "reversed", "reversed, plus 5"}
            | {"turned by 4 and reversed", "turned by 4 and reversed, plus 5"},
        ),
        (("inc",), 5, {"plus 2", "plus 4", "plus 6", "plus 8"}),
    ],
)
def test_twists(primitives: tuple[str, ...], steps: int, names: set[str]):
    assert {str(code) for code in twists(Task(primitives, steps))} == names


def test_a_twist_is_what_no_program_rules_out():
    """Blocks that do σ f in place of f: right after four steps, twisted by σ^k on the way."""
    task = Task(steps=4)
    digits = torch.randint(10, (50, 8))
    for code in twists(task):
        for program in task.programs[::17]:
            written = digits
            for step in range(4):
                written = code.apply(task.run(written, program[step : step + 1]))
                assert torch.equal(written, task.run(digits, program[: step + 1])) == (step % 2 == 1)


def test_states_of_a_run_and_of_a_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    small = {"batch_size": 8, "hidden_size": 16, "intermediate_size": 16}
    monkeypatch.setitem(MODELS, "dense", replace(MODELS["dense"], train_steps=2, **small))
    toy_run(ToyRun("dense", out=tmp_path))
    ord_ = DISCOVERIES["ord"]
    short = replace(ord_, toy=replace(ord_.toy, **small), explore_steps=20, settle_steps=1, tries=24)
    monkeypatch.setitem(DISCOVERIES, "ord", short)
    assert main(["toy", "discover", "ord", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    files = [str(tmp_path / f"{name}.programs-0.seed-0.json") for name in ("dense", "ord")]
    assert main(["toy", "codes", *files, "--without", "rot", "--json", str(tmp_path / "codes.json")]) == 0
    said = capsys.readouterr().out
    runs = json.loads((tmp_path / "codes.json").read_text())["runs"]
    # Blocks that see the program have no state that is digits alone.
    assert list(runs["dense.programs-0.seed-0"]["states"]) == ["as it is"]
    own = runs["ord.programs-0.seed-0"]
    assert list(own["states"]) == ["as it is", "as probabilities", "as hard digits"]
    assert [len(steps) for steps in own["states"].values()] == [3, 3, 3]
    assert 0 < own["states"]["as it is"][0]["uncertainty"] < 2.31  # of ten digits at most ln 10
    assert "ord.programs-0.seed-0: twists that its programs cannot rule out: none" in said
    assert "dense.programs-0.seed-0: its blocks see the program, so no twist is looked for" in said
    assert "twists" not in runs["dense.programs-0.seed-0"]
    assert main(["toy", "codes"]) == 2
    assert "name a record" in capsys.readouterr().err
    # What was trained for a moment is no map of the digits.
    assert "something else" in said
    assert main(["toy", "codes", *files, "--without", "rota"]) == 2
    assert "no primitive rota: it has inc, rev, rot, mul3" in capsys.readouterr().err
    assert main(["toy", "codes", *files, "--without", "inc", "rev", "rot", "mul3"]) == 2
    assert "leave out fewer primitives" in capsys.readouterr().err
