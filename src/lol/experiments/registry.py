"""Which experiments there are, and `lol experiment`: one of them, or all, or what each is."""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console

from lol.errors import UserError
from lol.experiments.benchmarks import MATH
from lol.experiments.comparisons import ABLATIONS, HUGINN, MOE
from lol.experiments.harness import Experiment, Options, run_experiment
from lol.experiments.languages import LANGUAGES
from lol.experiments.maze.experiment import MAZE
from lol.experiments.safety import SAFETY
from lol.experiments.sudoku.experiment import SUDOKU

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one for one in (LANGUAGES, SAFETY, MAZE, SUDOKU, HUGINN, MOE, MATH, ABLATIONS)
}


def experiment(options: Options) -> None:
    """Do the experiment of this name, or all of them; of all, those whose data is in the folder --data or not needed.

    Raises:
        UserError: there is no such experiment, or it cannot be done.
    """
    if options.name != "all":
        run_experiment(find(options.name), options)
        return
    for one in EXPERIMENTS.values():
        print(f"experiment {one.name}", flush=True)
        run_experiment(one, replace(options, data=_data_of(one, options.data)))


def find(name: str) -> Experiment:
    """The experiment of this name.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    if name not in EXPERIMENTS:
        nearest = get_close_matches(name, EXPERIMENTS, n=1)
        guess = f"did you mean {nearest[0]}? " if nearest else ""
        raise UserError(f"there is no experiment {name!r}: {guess}`lol experiment list` shows them all")
    return EXPERIMENTS[name]


def list_experiments() -> None:
    """Print each experiment: what it is, what it needs, what was published."""
    console = Console()
    for one in EXPERIMENTS.values():
        needs = "" if one.data is None else f" Needs --data {one.data}."
        console.print(f"[bold]{one.name}[/]  {one.purpose}{needs}\n  published: {one.published}", highlight=False)


def _data_of(one: Experiment, data: Path | None) -> Path | None:
    """The data of an experiment in the folder that `all` was given: what is named like the experiment."""
    found = [] if data is None else sorted(data.glob(f"{one.name}*"))
    if not found and one.data is not None:
        raise UserError(
            f"{one.name} needs data: give --data a folder in which something is named {one.name}…, namely {one.data}"
        )
    return found[0] if found else None
