"""`lol cost`: what a model and its training cost, by part, from the configuration alone; nothing is built."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from lol.errors import UserError
from lol.model.cost import Flops, ModelFlops, cache_bytes, count_flops, count_parameters
from lol.reports.memory import memory_note, memory_numbers, memory_table
from lol.train.budget import Plan, checkpoint_bytes, plan_run
from lol.train.config import DataConfig, TrainConfig
from lol.train.loading import load_config
from lol.train.progress import shorten
from lol.train.run_folder import CHECKPOINTS, CONFIG, read_config


@dataclass(frozen=True)
class Cost:
    """Print what a recipe's model and its training cost: parameters, FLOPs, cache, checkpoint, memory.

    Example: lol cost demo --model.num-experts 16 --budget.flops 1e13
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    folder: Annotated[Path | None, tyro.conf.arg(name="model", metavar="DIR")] = None
    """Instead of a recipe: a run folder, a checkpoint, or a folder written by transformers.
    Only a run folder says how it was trained."""
    contexts: tuple[int, ...] = (1024, 8192, 65536)
    """Tokens in the cache, for which its size is shown."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the numbers to this file."""

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1:
            raise UserError("contexts must be one or more numbers of tokens, each at least 1")


def config_of(folder: Path) -> TrainConfig:
    """The configuration of a run folder; of another model's folder one that has only its model and its context.

    Raises:
        UserError: there is no model in the folder, or it is of another architecture.
    """
    model = load_config(folder)
    if _is_run(folder):
        # The run's own config.json has the vocabulary that was asked for, the checkpoint's the tokenizer's.
        return replace(read_config(folder), model=model)
    return TrainConfig(model=model, data=DataConfig(context_length=model.max_position_embeddings))


def cost(options: Cost) -> dict[str, Any]:
    """Print the table, and return its numbers: parameters, FLOPs and bytes as integers.

    Raises:
        UserError: the configuration's budget is less than one step.
    """
    config = options.config
    is_run = options.folder is None or _is_run(options.folder)
    plan = plan_run(config, config.model) if is_run else None
    result = _numbers(config, plan, options.contexts)
    name = config.recipe if options.folder is None else str(options.folder)
    console = Console()
    # A path is text: no markup, no line breaks at the console's width.
    console.print(name, markup=False, highlight=False, soft_wrap=True)
    console.print(_parts_table(config))
    console.print()
    console.print(_facts_table(config, plan, options.contexts))
    if plan is not None:
        console.print()
        console.print(memory_table(config))
        console.print(memory_note(config), highlight=False)
    return result


def _is_run(folder: Path) -> bool:
    return (folder / CHECKPOINTS).is_dir() and (folder / CONFIG).is_file()


def _flops_of_parts(flops: ModelFlops) -> dict[str, Flops]:
    """By the names of `ParameterCounts.parts`."""
    return {
        "prelude": flops.prelude,
        "library": flops.core,
        "router": flops.router,
        "coda": flops.coda,
        "head": flops.head,
    }


def _numbers(config: TrainConfig, plan: Plan | None, contexts: tuple[int, ...]) -> dict[str, Any]:
    model, tokens = config.model, config.data.context_length
    counts, flops = count_parameters(model), count_flops(model, tokens)
    numbers: dict[str, Any] = {
        "parameters": {
            "parts": {name: asdict(size) for name, size in counts.parts.items()},
            "non_embedding": asdict(counts.body),
            "total": counts.total,
        },
        "context_length": tokens,
        # Of one row of context_length tokens: integers, where a token's share need not be one.
        "flops_of_a_row": {
            "forward": flops.forward,
            "training_by_depth": [
                count_flops(model, tokens, depth).training for depth in range(model.num_routed_depths + 1)
            ],
            "forward_by_part": {name: asdict(part) for name, part in _flops_of_parts(flops).items()},
            "forward_as_the_kernel_runs": count_flops(model, tokens, kernel=True).forward,
        },
        "training_shares": _shares(flops),
        "checkpoint_bytes": checkpoint_bytes(model),
        "cache_bytes_of_a_row_in_float32": {n: cache_bytes(model, n, 1, torch.float32) for n in contexts},
    }
    if plan is not None:
        numbers["run"] = {
            "steps": plan.steps,
            "ended_by": plan.limit,
            "tokens_per_step": config.tokens_per_step,
            "tokens": plan.total_tokens,
            "flops_of_first_step": plan.flops(0),
            "flops_of_last_step": plan.flops(plan.steps - 1),
            "flops": plan.total_flops,
        }
        numbers["training_memory"] = memory_numbers(config)
    return numbers


def _shares(flops: ModelFlops) -> dict[str, float]:
    """Of the FLOPs of training at full depth: fixed layers, core, router and head sum to 1; attention is in them."""
    parts = {
        "fixed_layers": flops.prelude + flops.coda,
        "core": flops.core,
        "router": flops.router + flops.noise,
        "head": flops.head,
    }
    attention = Flops(0, flops.total.attention)
    return {name: part.training / flops.training for name, part in (parts | {"attention": attention}).items()}


def _parts_table(config: TrainConfig) -> Table:
    model, tokens = config.model, config.data.context_length
    counts, flops = count_parameters(model), count_flops(model, tokens)
    work = _flops_of_parts(flops)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    heads = ("stored\nparameters", "active\nper token", "FLOPs of a token\nwith weights", "forward,\nin attention")
    for column in heads:
        table.add_column(column, justify="right")

    def add(label: str, stored: int, active: int | None, part: Flops | None) -> None:
        per_token = ("", "") if part is None else (part.products / tokens, part.attention / tokens)
        cells = (stored, "" if active is None else active, *per_token)
        table.add_row(label, *(cell if isinstance(cell, str) else shorten(cell) for cell in cells))

    for part, size in counts.parts.items():
        add(part, size.stored, size.active, work.get(part))
    body = sum((one for part, one in work.items() if part != "head"), Flops())
    add("non-embedding", counts.stored, counts.active, body)
    add("total", counts.total, None, flops.total)
    return table


def _facts_table(config: TrainConfig, plan: Plan | None, contexts: tuple[int, ...]) -> Table:
    model, tokens = config.model, config.data.context_length
    depths, flops = model.num_routed_depths, count_flops(model, tokens)
    counts = count_parameters(model)
    shares = {name: f"{100 * share:.1f} %" for name, share in _shares(flops).items()}
    matrices = f"{shorten(counts.body.matrices)} stored, {shorten(counts.body.active_matrices)} active"
    facts = [
        ("layers' matrices", f"{matrices}: as the paper counts"),
        ("training, a token", f"{_flop(flops.training / tokens)} forward and backward at depth {depths}"),
        (
            "of that",
            f"fixed layers {shares['fixed_layers']}, core {shares['core']}, router {shares['router']}, "
            f"head {shares['head']}",
        ),
        ("attention", f"{shares['attention']} of it"),
    ]
    kernel = count_flops(model, tokens, kernel=True).training
    if kernel != flops.training:
        facts.append(("as it runs here", f"{_flop(kernel / tokens)}: attention of the whole text under a mask"))
    if plan is not None:
        facts += _run_facts(config, plan)
    facts.append(("checkpoint", f"{shorten(checkpoint_bytes(model), 'B')} with AdamW's moments"))
    caches = [f"{shorten(cache_bytes(model, n, 1, torch.float32), 'B')} at {n:,}" for n in contexts]
    facts.append(("cache (float32)", ", ".join(caches) + " tokens"))
    table = Table(box=None, show_header=False, pad_edge=False)
    for fact in facts:
        table.add_row(*fact)
    return table


def _run_facts(config: TrainConfig, plan: Plan) -> list[tuple[str, str]]:
    first, last = plan.depth(0), plan.depth(plan.steps - 1)
    step = f"{config.tokens_per_step:,} tokens, {_flop(plan.flops(plan.steps - 1))}"
    if first != last:
        step = (
            f"{config.tokens_per_step:,} tokens, {_flop(plan.flops(0))} at depth {first} to "
            f"{_flop(plan.flops(plan.steps - 1))} at depth {last}"
        )
    run = f"{plan.steps:,} steps, {shorten(plan.total_tokens)} tokens, {_flop(plan.total_flops)}"
    if plan.limit != "steps":
        run += f"; ended by budget.{plan.limit} before step {config.steps:,}"
    return [("a step", step), ("the run", run)]


def _flop(number: int | float) -> str:
    return shorten(number, "FLOP")
