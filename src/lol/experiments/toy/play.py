"""`lol toy play`: digits and a program come in, the path and the state after every block come out.

A state between blocks is read through the head, which was trained on the last state alone: where the digits are right
on the way too, the blocks share one code for them.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from jaxtyping import Int
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lol.errors import UserError
from lol.experiments.toy.config import ToyConfig
from lol.experiments.toy.discovery.config import DiscoverConfig
from lol.experiments.toy.discovery.crossfit import RepairConfig
from lol.experiments.toy.discovery.runs import restore
from lol.experiments.toy.discovery.train import Discovery
from lol.experiments.toy.model import ToyModel, ToyOutput
from lol.experiments.toy.records import Record, read_record, weights_of
from lol.experiments.toy.task import NUM_DIGITS, PRIMITIVES, Program, split_programs
from lol.experiments.toy.train import given_path


@dataclass(frozen=True)
class ToyPlay:
    """Type digits and a program, and see which blocks run and what the state says after each.

    Example: lol toy play results/toy/runs/given.programs-0.seed-0.json
    """

    record: tyro.conf.Positional[Path]
    """The record that `lol toy run` or `lol toy discover` wrote; the weights are beside it."""


@dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    model: ToyModel
    find_path: Callable[[Int[Tensor, "B S"]], Int[Tensor, "B S"] | None]
    """The blocks of each program; `None` where the model's own router chooses."""
    known: tuple[Program, ...]
    """The programs that were trained on."""
    record: Record

    @torch.no_grad()
    def answer(self, digits: Int[Tensor, "N"], program: Program) -> ToyOutput:
        """The pass of one example."""
        programs = torch.tensor([program])
        return self.model(digits[None], programs, path=self.find_path(programs))


def play(command: ToyPlay) -> None:
    """Answer each line of standard input with its table, until an empty line or the end.

    Raises:
        UserError: the record or its weights cannot be read; or, but for a terminal, where one can type again, a line.
    """
    trained = load_run(command.record)
    config = trained.model.toy
    console = Console(highlight=False)
    record = trained.record
    shares = ", ".join(f"{side.replace('_', ' ')} {record[side]['accuracy']} %" for side in ("trained", "held_out"))
    names = ", ".join(config.primitives)
    console.print(f"{command.record.stem}: {shares}", soft_wrap=True)
    console.print(f"Type {NUM_DIGITS} digits and {config.steps} of {names}. An empty line ends.", soft_wrap=True)
    at_terminal = sys.stdin.isatty()
    for line in _lines(at_terminal):
        try:
            digits, program = read_line(line, config)
        except UserError as error:
            if not at_terminal:
                raise
            console.print(str(error), soft_wrap=True)
            continue
        console.print(_table(trained, digits, program))
        console.print(f"This program was {kind_of(program, config, trained.known)}.", soft_wrap=True)


def load_run(file: Path) -> Trained:
    """What a run trained, from its record and the weights beside it.

    Raises:
        UserError: the file is no record of a run, or its weights are not beside it.
    """
    record = read_record(file)
    try:
        config = _read_config(record["config"])
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{file} has settings of another version ({error}): `{record['command']}` again") from None
    if not weights_of(file).exists():
        raise UserError(
            f"{weights_of(file)} is missing: weights are not kept with the results. Train them again with "
            f"`{record['command']} --out FOLDER`, and name the record in that folder"
        )
    try:
        return _restored(record, config, load_file(weights_of(file)))
    except (SafetensorError, RuntimeError) as error:
        raise UserError(
            f"{weights_of(file)} has not the weights of this run ({error}): delete both and run it again"
        ) from None


def _restored(record: Record, config: ToyConfig | DiscoverConfig, weights: dict[str, Tensor]) -> Trained:
    if isinstance(config, DiscoverConfig):
        discovery = Discovery(config, record["seed"])
        restore(discovery, weights)
        return Trained(discovery.model.eval(), discovery.router.path, discovery.trained, record)
    model = ToyModel(config)
    model.load_state_dict(weights)
    split = split_programs(config.task, config.split, config.split_number, config.num_held_out)
    return Trained(model.eval(), partial(given_path, config), split.trained, record)


def _read_config(settings: dict[str, Any]) -> ToyConfig | DiscoverConfig:
    """The settings of a record; a discovery's have the toy's among them."""
    config = ToyConfig(**_with_tuples(settings.get("toy", settings)))
    if "toy" not in settings:
        return config
    repair = settings.get("repair")
    return DiscoverConfig(**_with_tuples(settings | {"toy": config, "repair": repair and RepairConfig(**repair)}))


def _with_tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, and no setting is a list."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def read_line(line: str, config: ToyConfig) -> tuple[Int[Tensor, "N"], Program]:
    """Digits and program of a line like `12345678 inc rev mul3`.

    Raises:
        UserError: it is none.
    """
    digits, *names = line.split()
    example = " ".join(["12345678", *(config.primitives[i % len(config.primitives)] for i in range(config.steps))])
    unknown = [name for name in names if name not in config.primitives]
    if len(digits) != NUM_DIGITS or not (digits.isascii() and digits.isdigit()):
        raise UserError(f"{digits} is not {NUM_DIGITS} digits: type, for example, {example}")
    if unknown:
        raise UserError(f"the run has no primitive {', '.join(unknown)}: type, for example, {example}")
    if len(names) != config.steps:
        raise UserError(f"that is a program of {len(names)} steps, not of {config.steps}: type, for example, {example}")
    return torch.tensor([int(digit) for digit in digits]), tuple(map(config.primitives.index, names))


def kind_of(program: Program, config: ToyConfig, known: tuple[Program, ...]) -> str:
    """Whether training saw a program, or one that computes the same."""
    if program in known:
        return "trained"
    functions = config.task.functions
    seen = any(functions[other] == functions[program] for other in known)
    return "held out" + (", but a trained one computes the same function" if seen else ", and its function too")


def _table(trained: Trained, digits: Tensor, program: Program) -> Table:
    model, output = trained.model, trained.answer(digits, program)
    table = Table(box=None, pad_edge=False)
    for head in ("step", "block", "weight", "state", "right would be"):
        table.add_column(head, justify="right" if head in ("block", "weight") else "left")
    should = digits
    table.add_row("input", "", "", read_state(model, output, 0), _joined(should))
    for step, primitive in enumerate(program):
        name = model.toy.primitives[primitive]
        should = PRIMITIVES[name](should)
        block = int(output.experts[0, step])
        weight = float(output.router_logits[step][0].softmax(-1)[block]) if output.router_logits else 1.0
        table.add_row(name, str(block), f"{weight:.2f}", read_state(model, output, step + 1), _joined(should))
    return table


def read_state(model: ToyModel, output: ToyOutput, step: int) -> str:
    """The digits that the head reads off the state after so many blocks."""
    return _joined(model.read(output.states[step][0, :NUM_DIGITS]).argmax(-1))


def _joined(digits: Tensor) -> str:
    return "".join(map(str, digits.tolist()))


def _lines(at_terminal: bool) -> Iterator[str]:
    """What is typed, or comes through a pipe, until an empty line."""
    while True:
        if at_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
