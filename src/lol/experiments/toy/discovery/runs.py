"""Discoveries by name: the three rules, each thing that they need taken away, harder tasks; a record for each run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro

from lol.errors import UserError
from lol.experiments.toy.discovery.beyond import BEYOND, TAKEN_AWAY
from lol.experiments.toy.discovery.config import RULES, DiscoverConfig, digits_settling
from lol.experiments.toy.discovery.train import Discovery, discover
from lol.experiments.toy.line import Job, run_side_by_side
from lol.experiments.toy.process import prepare_process
from lol.experiments.toy.runs import Run, SplitKind, write_run
from lol.experiments.toy.task import ARTICLE, DISTINCT

_VERB = ("toy", "discover")
_ORD = RULES["ord"]
_SIX = replace(_ORD.toy, primitives=(*ARTICLE, "neg", "swap"), num_blocks=6, num_held_out=144)
_ORD_SIX = replace(_ORD, toy=_SIX, explore_steps=2400, settle_steps=2100)

DISCOVERIES: dict[str, DiscoverConfig] = RULES | {
    "ord-sighted": replace(_ORD, toy=replace(_ORD.toy, blind=False)),
    "ord-no-entropy": replace(_ORD, entropy=0.0),
    "ord-no-balance": replace(_ORD, balance=0.0),
    "mix-sighted": replace(RULES["mix"], toy=replace(_ORD.toy, blind=False)),
    "mix-no-entropy": replace(RULES["mix"], entropy=0.0),
    "mix-no-balance": replace(RULES["mix"], balance=0.0),
    "ord-8": replace(_ORD, toy=replace(_ORD.toy, num_blocks=8)),
    "mix-six": replace(RULES["mix"], toy=_SIX, explore_steps=2250, settle_steps=2250),
    "ord-distinct": replace(_ORD, toy=replace(_ORD.toy, primitives=DISTINCT)),
    "mix-distinct": replace(RULES["mix"], toy=replace(_ORD.toy, primitives=DISTINCT)),
    "ord-six": _ORD_SIX,
    "ord-six-tied": replace(_ORD_SIX, tied=True),
    "ord-six-digits-at-random": replace(_ORD_SIX, toy=replace(_SIX, between="digits at random")),
    "ord-six-digits-settling": digits_settling(_ORD_SIX),
    "ord-six-tied-digits-settling": replace(digits_settling(_ORD_SIX), tied=True),
    **TAKEN_AWAY,
    **BEYOND,
}
"""The rules; blocks that see the program; without annealing; without the bonus on the mean choice; more blocks than
primitives; six primitives (72 of 216 programs trained, half as many steps again), also with one table for all places in
the program, and with the state written as digits between blocks of a random half of the examples, always or once the
router is frozen; and those of `beyond.py`."""


@dataclass(frozen=True)
class ToyDiscover:
    """Train routers that look for the primitives, and write what came out: each name on each split with each seed.

    Example: lol toy discover ord mix --seeds 5 --splits programs functions --jobs 2
    """

    names: tyro.conf.Positional[tuple[str, ...]]
    """pc, mix, ord, or one of these with something changed: an unknown name lists them."""
    seed: int = 0
    """Decides first weights and examples; with --seeds the first of them."""
    seeds: int = 1
    """How many seeds."""
    splits: Annotated[tuple[SplitKind, ...], tyro.conf.arg(aliases=["--split"])] = ("programs",)
    """Hold out 16 programs as the article does, all programs of some functions, or one after the other."""
    split_numbers: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--split-number"])] = (0,)
    """Which splits of each kind."""
    jobs: int = 2
    """Runs side by side, one thread each."""
    out: Path = Path("results/toy/discovery")
    """Folder of the records; a run whose record is there is not run again."""


def config_of(run: Run) -> DiscoverConfig:
    """The settings of a discovery on a split. Raises UserError where there is none of this name."""
    if run.model not in DISCOVERIES:
        raise UserError(f"there is no discovery {run.model}: {', '.join(DISCOVERIES)}")
    config = DISCOVERIES[run.model]
    return replace(config, toy=replace(config.toy, split=run.split, split_number=run.split_number))


def toy_discover(command: ToyDiscover) -> int:
    """Do what is not done: a single run in this process, more side by side; the number of runs that failed."""
    wanted = discoveries_of(command)
    for run in wanted:
        config_of(run)
    waiting = [run for run in wanted if not run.file(command.out).exists()]
    if len(wanted) > 1:
        print(f"{len(wanted)} runs, {len(wanted) - len(waiting)} done before")
        jobs = [Job(run.name, (*_VERB, *run.flags, "--out", str(command.out))) for run in waiting]
        return run_side_by_side(jobs, command.jobs)
    for run in waiting:
        _discover(run, run.file(command.out))
    if not waiting:
        print(f"done before: {wanted[0].file(command.out)}")
    return 0


def discoveries_of(command: ToyDiscover) -> list[Run]:
    """The runs that a command asks for, so that every name has its first seed early.

    Raises:
        UserError: there are none.
    """
    wanted = [
        Run(name, seed, split, number)
        for seed in range(command.seed, command.seed + command.seeds)
        for split in command.splits
        for number in command.split_numbers
        for name in command.names
    ]
    if not wanted:
        raise UserError(f"name at least one discovery, one seed and one split; there are {', '.join(DISCOVERIES)}")
    return wanted


def _discover(run: Run, file: Path) -> None:
    prepare_process()
    file.parent.mkdir(parents=True, exist_ok=True)
    record, discovery = discover(config_of(run), run.seed)
    command = " ".join(("lol", *_VERB, *run.flags))
    write_run(file, {"model": run.model, "command": command, **record}, _state_of(discovery))
    held_out = record["held_out"]
    print(
        f"{file.stem}: trained {record['trained']['accuracy']} %, validation {record['validation']['accuracy']} %, "
        f"held out {held_out['accuracy']} %, separation {held_out['separation']:.2f}"
    )


def _state_of(discovery: Discovery) -> dict[str, torch.Tensor]:
    """Blocks and router in one file's names."""
    parts = {"model": discovery.model, "router": discovery.router}
    return {f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()}


def restore(discovery: Discovery, state: dict[str, torch.Tensor]) -> None:
    """Put the weights that a run wrote into a discovery of its configuration."""
    for part, module in (("model", discovery.model), ("router", discovery.router)):
        own = {name.removeprefix(f"{part}."): value for name, value in state.items() if name.startswith(f"{part}.")}
        module.load_state_dict(own)
