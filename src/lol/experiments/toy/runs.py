"""Which toy runs there are, which are done, and doing the others: one thread a process, some processes side by side.

A run is a file `MODEL.SPLIT-NUMBER.seed-S.json`, written whole or not at all, and never written again.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from lol.errors import UserError
from lol.experiments.toy.config import CHOSEN_MODELS, MODELS, ToyConfig
from lol.experiments.toy.line import Job, run_side_by_side
from lol.experiments.toy.process import prepare_process
from lol.experiments.toy.records import weights_of
from lol.experiments.toy.train import run as run_config

SplitKind = Literal["programs", "functions"]
_FIRST_ROW = ("dense", "given", "given-step-primitive", "learned")


@dataclass(frozen=True)
class Run:
    """One model or discovery, one split, one seed. Raises UserError where there is no such seed or split."""

    model: str
    seed: int
    split: SplitKind = "programs"
    split_number: int = 0

    def __post_init__(self) -> None:
        for flag, number in (("seed", self.seed), ("split-number", self.split_number)):
            if not 0 <= number < 2**32:
                raise UserError(f"--{flag} {number} is no whole number from 0 to {2**32 - 1}: choose one")

    @property
    def name(self) -> str:
        return f"{self.model}.{self.split}-{self.split_number}.seed-{self.seed}"

    @property
    def flags(self) -> tuple[str, ...]:
        """What to type for it after the verb."""
        return (self.model, "--seed", str(self.seed), "--split", self.split, "--split-number", str(self.split_number))

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


@dataclass(frozen=True)
class ToyRun:
    """Train a model of the toy and write what came out.

    Example: lol toy run given --seed 1 --split functions
    """

    model: str
    """dense, given, learned, …: an unknown name lists them all."""
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
    config = replace(config_of(run.model), split=run.split, split_number=run.split_number)
    file = run.file(command.out)
    if file.exists():
        print(f"done before: {file}")
        return
    prepare_process()
    file.parent.mkdir(parents=True, exist_ok=True)
    record, model = run_config(config, run.seed)
    write_run(file, {"model": run.model, "command": command_of(run), **record}, model.state_dict())
    print(f"{run.name}: trained {record['trained']['accuracy']} %, held out {record['held_out']['accuracy']} %")


def command_of(run: Run) -> str:
    """What to type for this run."""
    split = "" if run.split == "programs" else f" --split {run.split}"
    number = f" --split-number {run.split_number}" if run.split_number else ""
    return f"lol toy run {run.model} --seed {run.seed}{split}{number}"


def write_run(file: Path, record: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write weights and record, each whole or not at all; the record, which says that the run is done, comes last."""
    _write_whole(weights_of(file), lambda partial: save_file(dict(weights), partial))
    text = json.dumps(record, indent=1) + "\n"
    _write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def _write_whole(file: Path, write: Callable[[Path], object]) -> None:
    partial = file.with_suffix(f".partial-{os.getpid()}")
    write(partial)
    partial.rename(file)


def runs_of(command: ToyAll) -> list[Run]:
    """The runs that a command asks for, so that every model has its first seed early.

    Raises:
        UserError: there are none, or a model is unknown.
    """
    if (command.seeds is not None and command.seeds < 1) or not command.models or not command.splits:
        raise UserError(f"name at least one model, one seed and one split; there are {', '.join(MODELS)}")
    for model in command.models:
        config_of(model)
    own = {model: 5 if model in _FIRST_ROW else 3 for model in command.models}
    seeds = own if command.seeds is None else dict.fromkeys(command.models, command.seeds)
    return [
        Run(model, seed, split, command.split_number)
        for seed in range(max(seeds.values()))
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
    return Job(run.name, ("toy", "run", *run.flags, "--out", str(out)))
