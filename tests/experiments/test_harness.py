"""The harness of `lol experiment`: what it trains, keeps, skips, refuses, and the commands that it prints."""

import dataclasses
import json
import shlex
import signal
from pathlib import Path

import pytest

from lol.errors import UserError
from lol.experiments.harness import (
    RESULTS,
    SECTION,
    Experiment,
    Options,
    Setting,
    command_line,
    markdown_table,
    run_experiment,
)
from lol.experiments.registry import EXPERIMENTS, find
from lol.train import trainer
from lol.train.config import TrainConfig, as_json
from lol.verbs.models import train as train_verb
from small_run import Lol, small_config, stop_after


def probe_of(corpus: Path, seen: list[dict] | None = None) -> Experiment:
    """A small experiment of one run a seed, which notes the folders that it measures."""

    def measure(_: Setting, runs: dict[str, Path]) -> dict:
        if seen is not None:
            seen.append(dict(runs))
        return {name: len(list(run.iterdir())) for name, run in runs.items()}

    return Experiment(
        name="small",
        purpose="A test.",
        published="nothing",
        seeds=(3,),
        runs=lambda setting: {f"seed-{seed}": small_config(corpus, recipe="tiny", seed=seed) for seed in setting.seeds},
        measure=measure,
        draw=lambda numbers, folder: (folder / "figure.svg").write_text(str(numbers)) and None,
        section=lambda numbers: markdown_table(["run", "files"], list(numbers.items())),
    )


def test_a_run_is_trained_once_and_results_are_kept(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    seen: list[dict] = []
    one = probe_of(corpus, seen)
    options = Options("small", runs=tmp_path / "runs", out=tmp_path / "out")
    assert run_experiment(one, options) == tmp_path / "out"
    run = tmp_path / "runs" / "small-tiny" / "seed-3"
    assert seen == [{"seed-3": run}]
    record = json.loads((tmp_path / "out" / RESULTS).read_text())
    assert record["command"] == "lol experiment small --scale tiny --seeds 3"
    facts = record["runs"]["seed-3"]
    assert (facts["seed"], facts["step"], facts["tokens"]) == (3, 8, 8 * 2 * 2 * 32)
    assert "| seed-3 |" in (tmp_path / "out" / SECTION).read_text()
    assert (tmp_path / "out" / "utilisation-seed-3.svg").exists()

    assert "run seed-3" in capsys.readouterr().out
    run_experiment(one, options)
    assert len(seen) == 1
    run_experiment(one, dataclasses.replace(options, overwrite=True))
    assert len(seen) == 2
    assert "run seed-3" not in capsys.readouterr().out, "a finished run is not trained again"
    with pytest.raises(UserError, match="results of another command: give --overwrite"):
        run_experiment(one, dataclasses.replace(options, seeds=(4,)))


def test_a_stopped_run_goes_on_and_only_measures_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen: list[dict] = []
    one = probe_of(corpus, seen)
    options = Options("small", seeds=(3, 4), runs=tmp_path / "runs", out=tmp_path / "out", only=("seed-4",))
    with monkeypatch.context() as patch:
        stop_after(patch, 5, signal.SIGTERM)
        with pytest.raises(SystemExit) as stopped:
            run_experiment(one, options)
    assert stopped.value.code == 143
    capsys.readouterr()
    assert run_experiment(one, options) is None
    assert "resumed at step 5" in capsys.readouterr().out
    assert not (tmp_path / "runs" / "small-tiny" / "seed-3").exists()
    assert seen == []
    with pytest.raises(UserError, match="no run 'seed-5': its runs are seed-3, seed-4"):
        run_experiment(one, dataclasses.replace(options, only=("seed-5",)))


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_the_commands_of_the_paper_scale_are_its_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = EXPERIMENTS[name]
    given: list[tuple[TrainConfig, Path]] = []

    class Stop(Exception):
        pass

    def note(config: TrainConfig, run: Path, *, resume: bool) -> None:
        assert not resume
        given.append((config, run))
        raise Stop

    monkeypatch.setattr(trainer, "train", note)
    setting = Setting("paper", fast=False, seeds=(0, 1), data=None, folder=tmp_path)
    runs = one.runs(setting)
    assert len(runs) >= 2
    for run, config in runs.items():
        words = shlex.split(command_line(config, tmp_path / run))
        assert words[:5] == ["torchrun", "--nproc-per-node=8", "-m", "lol", "train"]
        with pytest.raises(Stop):
            train_verb(words[5:])
        parsed, folder = given.pop()
        assert as_json(parsed) == as_json(dataclasses.replace(config, parallel="fsdp2"))
        assert folder == tmp_path / run


def test_the_paper_scale_trains_nothing_here(lol: Lol, tmp_path: Path):
    code, out, _ = lol("experiment", "moe", "--scale", "paper", "--seeds", "7", "--runs", tmp_path / "runs")
    assert code == 0
    commands = [line for line in out.splitlines() if line.startswith("torchrun")]
    assert [shlex.split(line)[-1] for line in commands] == ["7", "7"]
    assert not (tmp_path / "runs").exists()


def test_mistakes_name_the_fix(lol: Lol, tmp_path: Path):
    with pytest.raises(UserError, match="did you mean huginn"):
        find("hugin")
    for words, said in (
        (["languages"], "languages needs data: give --data FOLDER"),
        (["safety", "--data", tmp_path / "none.jsonl"], "there is no such file or folder"),
        (["moe", "--seeds", "1", "1"], "--seeds wants one or more different numbers"),
        (["all"], "needs data: give --data a folder in which something is named languages"),
        (["languages", "--data", tmp_path], "must be a folder with a .txt file for each language"),
        (["math", "--data", tmp_path], "gsm8k_train.jsonl: there is no such file"),
    ):
        code, _, err = lol("experiment", *words, "--runs", tmp_path / "runs", "--out", tmp_path / "out")
        assert (code, said in err) == (2, True), err
