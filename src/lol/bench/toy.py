"""`lol bench toy`: a training step of the toy against the same step with a plain loop over the blocks.

Seconds are those of this process's CPU, one thread, interleaved in one process (`measure.py`): the toy's runs stand
side by side on a machine that may do other things.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from lol.bench.measure import Step, conditions, measure, medians
from lol.errors import UserError
from lol.experiments.toy.config import MODELS
from lol.experiments.toy.process import prepare_process
from lol.experiments.toy.train import Training

_PLAIN = "plain loop over the blocks"


@dataclass(frozen=True)
class BenchToy:
    """Time whole training steps of the toy, in seconds of CPU.

    Example: lol bench toy --model given --json toy.json
    """

    model: str = "learned"
    """One that `lol toy run` knows."""
    steps: int = 10
    """Training steps that are timed as one."""
    repeats: int = 9
    """Rounds; each times every row of the table once."""
    hidden_size: int = 64
    """Width of the model: the toy's own is 64."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the numbers to this file."""


def bench(options: BenchToy) -> dict[str, Any]:
    """Run the benchmark, print its table, and return its numbers."""
    if options.model not in MODELS:
        raise UserError(f"there is no toy model {options.model}: {', '.join(MODELS)}")
    threads = torch.get_num_threads()
    prepare_process()
    try:
        rows = {
            _PLAIN: _steps(options, "loop"),
            "grouped": _steps(options, "grouped"),
            "packed (what the toy runs)": _steps(options, "packed"),
        }
        seconds = measure(rows, options.repeats, clock=time.process_time)
        result = conditions(options)
    finally:
        torch.set_num_threads(threads)
    median = medians(seconds)
    rates = {name: options.steps / median[name] for name in rows}
    _print(options, rates)
    return result | {
        "steps_per_cpu_second": rates,
        "over_plain_loop": {name: rate / rates[_PLAIN] for name, rate in rates.items()},
        "seconds": seconds,
    }


def _steps(options: BenchToy, form: Literal["loop", "grouped", "packed"]) -> Step:
    """Some training steps; with a plain loop the optimizer is torch's default one too."""
    config = replace(MODELS[options.model], hidden_size=options.hidden_size)
    training = Training(config, seed=0)
    training.model.packs_shelf = form == "packed"
    if form != "packed":
        training.model.dispatch.form = form
    if form == "loop":
        training.optimizer = torch.optim.AdamW(
            training.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )

    def steps() -> None:
        for _ in range(options.steps):
            training.take_step()

    return steps


def _print(options: BenchToy, rates: dict[str, float]) -> None:
    table = Table(title=f"training steps of the toy's {options.model}, one thread", box=None)
    table.add_column("")
    table.add_column("steps per CPU-second", justify="right")
    table.add_column("over the plain loop", justify="right")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.1f}", f"{rate / rates[_PLAIN]:.2f}")
    Console().print(table)
