"""Which toy runs there are, which are done, and doing the others: one thread a process, some processes side by side.

A run is a file `MODEL.SPLIT-NUMBER.seed-S.json`, written whole or not at all, and never written again.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lol.errors import UserError
from lol.experiments.toy.config import CHOSEN_MODELS, MODELS, ToyConfig
from lol.experiments.toy.line import Job, run_side_by_side
from lol.experiments.toy.process import prepare_process
from lol.experiments.toy.train import run as run_config

SplitKind = Literal["programs", "functions"]
_FIRST_ROW = ("dense", "given", "given-step-primitive", "learned")


@dataclass(frozen=True)
class Run:
    """One model, one split, one seed."""

    model: str
    seed: int
    split: SplitKind = "programs"
    split_number: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}.{self.split}-{self.split_number}.seed-{self.seed}"

    @property
    def config(self) -> ToyConfig:
        return replace(config_of(self.model), split=self.split, split_number=self.split_number)

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


@dataclass(frozen=True)
class ToyRun:
    """Train a model of the toy and write what came out.

    Example: lol toy run given --seed 1 --split functions
    """

    model: str
    """`lol toy all` knows them all: dense, given, learned, …"""
    seed: int = 0
    """Decides first weights and examples."""
    split: SplitKind = "programs"
    """Hold out 16 programs as the article does, or all programs of some functions."""
    split_number: int = 0
    """Which split of this kind."""
    out: Path = Path("results/toy/runs")
    """Folder of the records; a run whose record is there is not run again."""


@dataclass(frozen=True)
class ToyAll:
    """Do all runs that are not done yet: the article's two rounds, distinct programs, what the article leaves unsaid.

    Example: lol toy all --splits programs functions --jobs 2
    """

    models: tuple[str, ...] = tuple(MODELS)
    """Which models."""
    splits: tuple[SplitKind, ...] = ("programs", "functions")
    """Which kinds of split."""
    split_number: int = 0
    """Which split of each kind."""
    seeds: int | None = None
    """Seeds of each model; without it 5 for dense, given, given-step-primitive and learned, 3 for the others."""
    jobs: int = 2
    """Runs side by side, one thread each."""
    out: Path = Path("results/toy/runs")
    """Folder of the records."""


def config_of(model: str) -> ToyConfig:
    """The settings of a model. Raises UserError where there is none of this name."""
    if model not in MODELS:
        raise UserError(f"there is no toy model {model}: {', '.join(MODELS)}")
    return MODELS[model]


def toy_run(command: ToyRun) -> None:
    """Do one run, unless its record is there."""
    run = Run(command.model, command.seed, command.split, command.split_number)
    file = run.file(command.out)
    if file.exists():
        print(f"done before: {file}")
        return
    prepare_process()
    file.parent.mkdir(parents=True, exist_ok=True)
    record = run_config(run.config, run.seed, weights=weights_of(file))
    write_record(file, {"model": run.model, "command": command_of(run), **record})
    print(f"{run.name}: trained {record['trained']['accuracy']} %, held out {record['held_out']['accuracy']} %")


def weights_of(record: Path) -> Path:
    """Where a run's weights are: beside its record, for `lol toy play`; git leaves them out."""
    return record.with_suffix(".safetensors")


def command_of(run: Run) -> str:
    """What to type for this run."""
    split = "" if run.split == "programs" else f" --split {run.split}"
    number = f" --split-number {run.split_number}" if run.split_number else ""
    return f"lol toy run {run.model} --seed {run.seed}{split}{number}"


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Write a record whole or not at all."""
    partial = file.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.rename(file)


def runs_of(command: ToyAll) -> list[Run]:
    """The runs that a command asks for, so that every model has its first seed early."""
    seeds = {model: command.seeds or (5 if model in _FIRST_ROW else 3) for model in command.models}
    return [
        Run(model, seed, split, command.split_number)
        for seed in range(max(seeds.values(), default=0))
        for split in command.splits
        for model in command.models
        if seed < seeds[model] and (split == command.splits[0] or not _needs_one_split(model))
    ]


def _needs_one_split(model: str) -> bool:
    """Where all programs differ the kinds of split are one; choices are compared on one."""
    return config_of(model).task.is_distinct or model in CHOSEN_MODELS


def toy_all(command: ToyAll) -> int:
    """Do what is not done, `jobs` processes at a time; the number of runs that failed."""
    wanted = runs_of(command)
    waiting = [run for run in wanted if not run.file(command.out).exists()]
    print(f"{len(wanted)} runs, {len(wanted) - len(waiting)} done before")
    return run_side_by_side([_job(run, command.out) for run in waiting], command.jobs)


def _job(run: Run, out: Path) -> Job:
    flags = ("--seed", str(run.seed), "--split", run.split, "--split-number", str(run.split_number))
    return Job(run.name, ("toy", "run", run.model, *flags, "--out", str(out)))
