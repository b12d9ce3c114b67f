"""Discoveries by name: the three rules, each thing that they need taken away, harder tasks; a record for each run."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from lol.errors import UserError
from lol.experiments.toy.beyond import BEYOND, TAKEN_AWAY
from lol.experiments.toy.discover import RULES, DiscoverConfig, discover
from lol.experiments.toy.runs import SplitKind, write_record
from lol.experiments.toy.task import ARTICLE

_ORD = RULES["ord"]
_SIX = replace(_ORD.toy, primitives=(*ARTICLE, "neg", "swap"), num_blocks=6, num_held_out=144)

DISCOVERIES: dict[str, DiscoverConfig] = RULES | {
    "ord-sighted": replace(_ORD, toy=replace(_ORD.toy, blind=False)),
    "ord-no-entropy": replace(_ORD, entropy=0.0),
    "ord-no-balance": replace(_ORD, balance=0.0),
    "mix-sighted": replace(RULES["mix"], toy=replace(_ORD.toy, blind=False)),
    "mix-no-entropy": replace(RULES["mix"], entropy=0.0),
    "mix-no-balance": replace(RULES["mix"], balance=0.0),
    "ord-8": replace(_ORD, toy=replace(_ORD.toy, num_blocks=8)),
    "mix-six": replace(RULES["mix"], toy=_SIX, explore_steps=2250, settle_steps=2250),
    "ord-six": replace(_ORD, toy=_SIX, explore_steps=2400, settle_steps=2100),
    **TAKEN_AWAY,
    **BEYOND,
}
"""The rules; blocks that see the program; without annealing; without the bonus on the mean choice; more blocks than
primitives; six primitives (72 of 216 programs trained, half as many steps again); and those of `beyond.py`."""


@dataclass(frozen=True)
class ToyDiscover:
    """Train a router that looks for the primitives, and write what came out.

    Example: lol toy discover ord --seed 1 --split functions
    """

    name: tyro.conf.Positional[str]
    """pc, mix, ord, or one of these with something changed: an unknown name lists them."""
    seed: int = 0
    """Decides first weights and examples."""
    split: SplitKind = "programs"
    """Hold out 16 programs as the article does, or all programs of some functions."""
    split_number: int = 0
    """Which split of this kind."""
    out: Path = Path("results/toy/discovery")
    """Folder of the records; a run whose record is there is not run again."""


def toy_discover(command: ToyDiscover) -> None:
    """Do one run, unless its record is there."""
    if command.name not in DISCOVERIES:
        raise UserError(f"there is no discovery {command.name}: {', '.join(DISCOVERIES)}")
    config = DISCOVERIES[command.name]
    config = replace(config, toy=replace(config.toy, split=command.split, split_number=command.split_number))
    file = command.out / f"{command.name}.{command.split}-{command.split_number}.seed-{command.seed}.json"
    if file.exists():
        print(f"done before: {file}")
        return
    torch.set_num_threads(1)
    record, _ = discover(config, command.seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    typed = (
        f"lol toy discover {command.name} --seed {command.seed} --split {command.split} "
        f"--split-number {command.split_number}"
    )
    write_record(file, {"model": command.name, "command": typed, **record})
    held_out = record["held_out"]
    print(
        f"{file.stem}: trained {record['trained']['accuracy']} %, validation {record['validation']['accuracy']} %, "
        f"held out {held_out['accuracy']} %, separation {held_out['separation']:.2f}"
    )
