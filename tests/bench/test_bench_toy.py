"""The benchmark of the toy's step times the same training in every form."""

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lol.bench.toy import BenchToy, _steps
from lol.cli import main


def test_every_form_trains_the_same_model(monkeypatch):
    import lol.bench.toy as module

    made = []
    original = module.Training

    def remember(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(module, "Training", remember)
    options = BenchToy(steps=2, hidden_size=16)
    for form in ("loop", "grouped", "packed"):
        _steps(options, form)()
    states = [training.model.state_dict() for training in made]
    assert len(states) == 3
    for state in states[1:]:
        assert_close(state, states[0], atol=1e-4, rtol=1e-3)
    assert not torch.equal(states[0]["head.bias"], torch.zeros(10))


def test_the_numbers_go_to_a_file(tmp_path: Path):
    file = tmp_path / "toy.json"
    flags = ["--model", "given", "--steps", "1", "--repeats", "2", "--hidden-size", "16", "--json", str(file)]
    assert main(["bench", "toy", *flags]) == 0
    saved = json.loads(file.read_text())
    assert saved["threads"] == 1
    assert saved["over_plain_loop"]["plain loop over the blocks"] == 1
    assert all(len(times) == 2 and min(times) > 0 for times in saved["seconds"].values())


def test_what_cannot_be_timed_or_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["bench", "toy", "--repeats", "0", "--steps", "1", "--hidden-size", "16"]) == 2
    assert "--repeats 1 is the least" in capsys.readouterr().err
    # Before anything is timed.
    assert main(["bench", "toy", "--json", str(tmp_path / "no" / "toy.json")]) == 2
    assert f"there is no folder {tmp_path / 'no'} for --json" in capsys.readouterr().err
