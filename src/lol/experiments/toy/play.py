"""`lol toy play`: digits and a program come in, the path and the state after every block come out.

A state between blocks is read through the head, which was trained on the last state alone: where the digits are right
on the way too, the blocks share one code for them.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from jaxtyping import Int
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from lol.errors import UserError
from lol.experiments.toy.config import ToyConfig
from lol.experiments.toy.model import ToyModel, ToyOutput
from lol.experiments.toy.runs import weights_of
from lol.experiments.toy.task import NUM_DIGITS, PRIMITIVES, Program, Split, split_programs
from lol.experiments.toy.train import given_path


@dataclass(frozen=True)
class ToyPlay:
    """Type digits and a program, and see which blocks run and what the state says after each.

    Example: lol toy play results/toy/runs/given.programs-0.seed-0.json
    """

    record: tyro.conf.Positional[Path]
    """The record that `lol toy run` wrote; the weights are beside it."""


def play(command: ToyPlay) -> None:
    """Answer each line of standard input with its table, until an empty line or the end."""
    model, record = load_run(command.record)
    config = model.toy
    split = split_programs(config.task, config.split, config.split_number, config.num_held_out)
    console = Console(highlight=False)
    shares = ", ".join(f"{side.replace('_', ' ')} {record[side]['accuracy']} %" for side in ("trained", "held_out"))
    names = ", ".join(config.primitives)
    console.print(f"{command.record.stem}: {shares}", soft_wrap=True)
    console.print(f"Type {NUM_DIGITS} digits and {config.steps} of {names}. An empty line ends.", soft_wrap=True)
    for line in _lines(sys.stdin.isatty()):
        try:
            digits, program = read_line(line, config)
        except UserError as error:
            console.print(str(error), soft_wrap=True)
            continue
        console.print(_table(model, digits, program))
        console.print(f"This program was {kind_of(program, config, split)}.", soft_wrap=True)


def load_run(file: Path) -> tuple[ToyModel, dict[str, Any]]:
    """The trained model of a run, and the run's record.

    Raises:
        UserError: the file is no record of a run, or the weights are not beside it.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        settings = record["config"]
        config = ToyConfig(**settings | {"primitives": tuple(settings["primitives"])})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no record of a toy run ({error}): name a file that `lol toy run` wrote") from None
    if not weights_of(file).exists():
        raise UserError(
            f"{weights_of(file)} is missing: weights are not kept with the results. Train them again with "
            f"`{record['command']} --out FOLDER`, and name the record in that folder"
        )
    model = ToyModel(config)
    model.load_state_dict(load_file(weights_of(file)))
    return model.eval(), record


def read_line(line: str, config: ToyConfig) -> tuple[Int[Tensor, "N"], Program]:
    """Digits and program of a line like `12345678 inc rev mul3`.

    Raises:
        UserError: it is none.
    """
    digits, *names = line.split()
    numbers = [config.primitives.index(name) for name in names if name in config.primitives]
    is_digits = len(digits) == NUM_DIGITS and digits.isascii() and digits.isdigit()
    if not is_digits or len(numbers) != config.steps or len(names) != config.steps:
        example = " ".join(["12345678", *(config.primitives[i % len(config.primitives)] for i in range(config.steps))])
        raise UserError(f"that is not {NUM_DIGITS} digits and {config.steps} primitives: type, for example, {example}")
    return torch.tensor([int(digit) for digit in digits]), tuple(numbers)


def kind_of(program: Program, config: ToyConfig, split: Split) -> str:
    """Whether training saw a program, or one that computes the same."""
    if program in split.trained:
        return "trained"
    functions = config.task.functions
    seen = any(functions[other] == functions[program] for other in split.trained)
    return "held out" + (", but a trained one computes the same function" if seen else ", and its function too")


@torch.no_grad()
def _table(model: ToyModel, digits: Tensor, program: Program) -> Table:
    programs = torch.tensor([program])
    output = model(digits[None], programs, path=given_path(model.toy, programs))
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
    state = output.states[step][0, :NUM_DIGITS]
    return _joined(model.head(model.norm(state)).argmax(-1))


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
