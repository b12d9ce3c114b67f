"""Toy runs as a user starts them: the same again for the same seed, whole or not at all, never twice."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lol import UserError
from lol.experiments.toy import line, runs
from lol.experiments.toy.config import MODELS, ToyConfig
from lol.experiments.toy.line import Job, run_side_by_side
from lol.experiments.toy.records import weights_of
from lol.experiments.toy.runs import Run, ToyAll, ToyRun, runs_of, toy_all, toy_run
from lol.experiments.toy.task import split_programs
from lol.experiments.toy.train import run, train


def short(name: str, **changes: object) -> ToyConfig:
    return replace(MODELS[name], train_steps=3, batch_size=8, hidden_size=16, intermediate_size=16, **changes)


@pytest.mark.parametrize("name", ["dense", "learned-untied", "learned-sequence-balance", "learned-soft"])
def test_a_run_is_a_function_of_its_seed(name: str):
    first, again, other = (run(short(name), seed)[0] for seed in (1, 1, 2))
    for record in (first, again):
        del record["cpu_seconds"]
    assert first == again
    assert first["trained"]["by_program"] != other["trained"]["by_program"] or first["held_out"] != other["held_out"]
    json.dumps(first, allow_nan=False)


def test_a_record_has_what_the_tables_need():
    record = run(short("learned-gumbel", split="functions"), 0)[0]
    assert len(record["trained"]["by_program"]) == 48
    assert len(record["held_out"]["by_program"]) == 16
    uses = torch.tensor(record["trained"]["uses"])
    assert uses.shape == (3, 4, 4)
    assert uses.sum((1, 2)).tolist() == [4096] * 3
    assert {"accuracy", "soft_accuracy", "mode_path_accuracy"} <= record["held_out"].keys()


def test_the_bias_moves_against_the_load():
    bias = train(short("learned"), 0)[0].expert_bias
    # At most three moves of 0.001, and the last step rests: 2.9 steps are 96.6 % of 3.
    assert 0 < bias.abs().max() <= 0.0031
    assert train(short("learned-balance-per-depth"), 0)[0].expert_bias.shape == (3, 4)
    assert not train(short("learned-soft"), 0)[0].expert_bias.any()


def test_a_done_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setitem(MODELS, "dense", short("dense"))
    toy_run(ToyRun("dense", out=tmp_path))
    file = tmp_path / "dense.programs-0.seed-0.json"
    record = json.loads(file.read_text())
    assert record["command"] == "lol toy run dense --seed 0"
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, weights_of(file).name]
    monkeypatch.setattr(runs, "run_config", None)
    toy_run(ToyRun("dense", out=tmp_path))
    assert "done before" in capsys.readouterr().out


def test_all_runs_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    command = ToyAll(models=("dense", "looped"), splits=("programs", "functions"), seeds=1, out=tmp_path)
    wanted = runs_of(command)
    assert [one.name for one in wanted] == [
        "dense.programs-0.seed-0",
        "looped.programs-0.seed-0",
        "dense.functions-0.seed-0",
        "looped.functions-0.seed-0",
    ]
    for done in wanted[1:3]:
        done.file(tmp_path).write_text("{}")
    started = []

    def instead(command: list[str], **options: object) -> subprocess.Popen:
        started.append(command[4])
        code = "print('did it')" if len(started) == 1 else "raise SystemExit(2)"
        return real([sys.executable, "-c", code], **options)

    real = subprocess.Popen
    monkeypatch.setattr(line.subprocess, "Popen", instead)
    assert toy_all(command) == 1
    assert started == ["run", "run"]
    said = capsys.readouterr().out
    assert "4 runs, 2 done before" in said
    assert "did it  (1/2," in said
    assert "failed" in said


def test_sigterm_stops_the_runs_too(tmp_path: Path):
    """A run that says who it is and would never end; the process that started it is told to stop."""
    script = tmp_path / "start.py"
    script.write_text(
        "import sys\n"
        "from lol.experiments.toy.line import Job, run_side_by_side\n"
        f"sys.executable = {str(tmp_path / 'endless')!r}\n"
        "run_side_by_side([Job('endless', ())], 1)\n"
    )
    endless = tmp_path / "endless"
    endless.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\nexec sleep 600\n")
    endless.chmod(0o755)
    parent = subprocess.Popen([sys.executable, str(script)])
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 120
    while not (pid.exists() and pid.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_runs_that_there_are_not():
    with pytest.raises(UserError, match="--jobs 1 is the least"):
        run_side_by_side([Job("waits for ever", ("toy",))], 0)
    with pytest.raises(UserError, match="--seed -1 is no whole number from 0 to 4294967295"):
        Run("given", -1)
    with pytest.raises(UserError, match="--split-number -1"):
        Run("given", 0, split_number=-1)
    with pytest.raises(UserError, match="there is no toy model mine: dense, looped"):
        runs_of(ToyAll(models=("mine",)))
    for nothing in ({"seeds": 0}, {"models": ()}, {"splits": ()}):
        with pytest.raises(UserError, match="name at least one model, one seed and one split"):
            runs_of(ToyAll(**nothing))


def test_first_rows_have_five_seeds():
    wanted = runs_of(ToyAll(splits=("programs",)))
    assert sum(one.model == "dense" for one in wanted) == 5
    assert sum(one.model == "looped" for one in wanted) == 3
    assert len(set(wanted)) == len(wanted)
    assert Run("given", 1, "functions", 2).name == "given.functions-2.seed-1"


def test_distinct_programs_have_one_kind_of_split_and_choices_need_one():
    both = runs_of(ToyAll(models=("given", "given-distinct", "given-place0.02"), seeds=1))
    assert [one.name for one in both] == [
        "given.programs-0.seed-0",
        "given-distinct.programs-0.seed-0",
        "given-place0.02.programs-0.seed-0",
        "given.functions-0.seed-0",
    ]
    config = MODELS["given-distinct"]
    splits = [split_programs(config.task, kind, 0, config.num_held_out) for kind in ("programs", "functions")]
    assert splits[0] == splits[1]
    assert len(runs_of(ToyAll(models=("given-distinct",), splits=("functions",), seeds=1))) == 1
