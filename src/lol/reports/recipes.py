"""`lol recipe list` and `lol recipe show`: the recipes in a table, and all that one decides."""

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from lol.model.cost import count_parameters
from lol.reports.memory import memory_note, memory_numbers, memory_table
from lol.train.config import TrainConfig, as_json
from lol.train.progress import shorten
from lol.train.recipes import RECIPES, recipe

_WIDTH = 80


@dataclass(frozen=True)
class RecipeShow:
    """Print what a recipe is for, every value that it decides, and the memory that it needs.

    Example: lol recipe show math-1b
    """

    name: tyro.conf.Positional[str]
    """One of those that `lol recipe list` prints."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the configuration and the memory, in bytes, to this file."""


def list_recipes() -> None:
    """Print the recipes, at most 80 columns wide. The twins, which are many and alike, are one line."""
    table = Table(box=None, pad_edge=False)
    for head in ("recipe", "what it is"):
        table.add_column(head, no_wrap=True)
    for head in ("blocks x\ndepths", "parameters\nof layers", "budget"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, config in ((name, recipe(name)) for name in RECIPES if not _is_twin(name)):
        model = config.model
        shape = f"{model.num_experts} x {model.num_routed_depths}" if model.num_routed_depths else "none"
        stored = shorten(count_parameters(model).body.stored)
        table.add_row(name, _purpose(name), shape, stored, _budget(config))
    console = Console()
    console.print(table)
    console.print(
        "\nEach but demo and tiny has a twin of the same shape that trains on two CPU cores\n"
        "in minutes: NAME-tiny. `lol recipe show NAME` prints every value.",
        highlight=False,
        soft_wrap=True,
    )


def show_recipe(options: RecipeShow) -> dict[str, Any]:
    """Print a recipe, and return its configuration and its memory as JSON values.

    Raises:
        UserError: there is no such recipe.
    """
    config = recipe(options.name)
    console = Console()
    write = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    for paragraph in f"{options.name}: {_explain(options.name)}".split("\n\n"):
        write(textwrap.fill(paragraph, _WIDTH) + "\n")
    for line in _config_lines(config):
        write(line)
    write()
    console.print(memory_table(config))
    write(textwrap.fill(memory_note(config), _WIDTH))
    return {"config": as_json(config), "training_memory": memory_numbers(config)}


def _is_twin(name: str) -> bool:
    return isinstance(RECIPES[name], partial)


def _explain(name: str) -> str:
    """The docstring of a recipe; of a twin both."""
    made = RECIPES[name]
    if isinstance(made, partial):
        (published,) = made.args
        return f"{_doc(made.func)}\n\nIts original: {_doc(published)}"
    return _doc(made)


def _doc(function: Any) -> str:
    return inspect.getdoc(function) or ""


def _purpose(name: str) -> str:
    return _doc(RECIPES[name]).splitlines()[0].removesuffix(".")


def _budget(config: TrainConfig) -> str:
    if config.budget.flops is not None:
        return shorten(config.budget.flops, "FLOP")
    if config.budget.tokens is not None:
        return f"{shorten(config.budget.tokens)} tokens"
    return f"{config.steps:,} steps"


def _config_lines(config: TrainConfig) -> Iterator[str]:
    """Every value: a paragraph for the run itself, and one for each section."""
    values = as_json(config)
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    run = {name: value for name, value in values.items() if name not in sections and name != "recipe"}
    model = config.model
    derived: dict[str, Any] = {"mlp_size": model.mlp_size, "head_dim": model.head_dim}
    if model.moe_num_experts is not None:
        derived["moe_size"] = model.moe_size
    derived["tokens_per_step"] = config.tokens_per_step
    for title, section in ({"run": run} | sections | {"derived": derived}).items():
        words = " ".join(f"{name}={value}" for name, value in section.items())
        lines = textwrap.wrap(words, _WIDTH - 10, break_long_words=False, break_on_hyphens=False)
        for index, line in enumerate(lines):
            yield f"{title if index == 0 else '':<10}{line}"
