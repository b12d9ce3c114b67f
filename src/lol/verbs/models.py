"""Verbs that make a model: recipes, training, watching, cost, export, tokenizers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lol import flags
from lol.errors import UserError
from lol.train.config import TrainConfig
from lol.verbs.shared import write_numbers


@dataclass(frozen=True)
class Train:
    """Train a model, or go on with a run.

    Example: lol train --recipe demo --run runs/mine --data my-text.txt --steps 500 --model.num-experts 8
    """

    run: Path
    """Folder of the run: configuration, metrics and checkpoints. Never overwritten unasked."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on from the newest checkpoint of the run, bit for bit as if never stopped. Its flags need not be repeated."""


def train(args: list[str]) -> int:
    from lol.train.recipes import recipe
    from lol.train.run_folder import CONFIG, read_config
    from lol.train.trainer import train as run_training

    # Without its __init__: tyro's mark for what the flags must give is no Path.
    default = object.__new__(Train)
    run = flags.read_flag(args, "--run", default="")
    resumed = run and "--resume" in args and (Path(run) / CONFIG).exists()
    config = read_config(Path(run)) if resumed else recipe(flags.read_flag(args, "--recipe", default="demo"))
    vars(default).update(run=tyro.MISSING, config=config, resume=False)
    command = flags.parse(Train, "train", args, default=default)
    outcome = run_training(command.config, command.run, resume=command.resume)
    if outcome.stopped_by is not None:
        if outcome.is_main:
            print(
                f"stopped by {outcome.stopped_by} after step {outcome.step}; a checkpoint is written. Go on with "
                "--resume."
            )
        return 130 if outcome.stopped_by == "SIGINT" else 143
    if outcome.is_main:
        print(_summary_lines(outcome.summary or {}))
    return 0


def _summary_lines(summary: dict[str, Any]) -> str:
    losses = [("this model", summary["held_out_loss"])]
    losses += [(f"  {source}", loss) for source, loss in summary.get("losses", {}).items()]
    losses += [(name, summary[f"{name}_loss"]) for name in ("bigram", "unigram") if f"{name}_loss" in summary]
    lines = ["held-out loss, nats per token:"]
    width = max(12, *(len(name) + 2 for name, _ in losses))
    lines += [f"  {name:<{width}}{loss:.3f}" for name, loss in losses]
    lines.append(f"busiest block: {100 * summary['busiest_block_share']:.0f} % of the held-out windows")
    return "\n".join(lines)


def watch(args: list[str]) -> int:
    from lol.reports.watch import Watch
    from lol.reports.watch import watch as run_watch

    return run_watch(flags.parse(Watch, "watch", args))


@dataclass(frozen=True)
class RecipeList:
    """Print the recipes: the article's runs with their partners, and those of this project."""


def recipe_list(args: list[str]) -> int:
    from lol.reports.recipes import list_recipes

    flags.parse(RecipeList, "recipe list", args)
    list_recipes()
    return 0


def recipe_show(args: list[str]) -> int:
    from lol.reports.recipes import RecipeShow, show_recipe

    return write_numbers(flags.parse(RecipeShow, "recipe show", args), show_recipe)


def cost(args: list[str]) -> int:
    from lol.reports.cost import Cost, config_of
    from lol.reports.cost import cost as print_cost
    from lol.train.recipes import recipe

    if args and not args[0].startswith("-"):
        args = ["--recipe", *args]
    folder = flags.read_flag(args, "--model", default="")
    config = config_of(Path(folder)) if folder else recipe(flags.read_flag(args, "--recipe", default="demo"))
    return write_numbers(flags.parse(Cost, "cost", args, default=Cost(config)), print_cost)


@dataclass(frozen=True)
class Export:
    """Write a model as a folder that transformers reads: weights, configuration, tokenizer; no optimizer.

    Example: lol export --model runs/demo --out my-model
    """

    model: Path
    """A run folder (its newest checkpoint), a checkpoint, or a folder written by transformers."""
    out: Path
    """Folder to write; must not exist yet."""


def export(args: list[str]) -> int:
    from lol.train.loading import export_model

    command = flags.parse(Export, "export", args)
    export_model(command.model, command.out)
    print(f"written: {command.out}")
    return 0


@dataclass(frozen=True)
class TrainTokenizer:
    """Train a byte-level BPE and save it as a Hugging Face tokenizer.

    Example: lol tokenizer --data my-text.txt --vocab-size 4096 --out my-tokenizer
    """

    data: str | tuple[str, ...]
    """Text file, folder, .jsonl, .parquet, hf:NAME[:CONFIG][:SPLIT], or stdlib; or several, each SOURCE[=WEIGHT]."""
    out: Path
    """Folder to write; must not exist yet."""
    vocab_size: int = 4096
    """Tokens, the three special ones included."""
    text_column: str = "text"
    """Column of the text in .jsonl, .parquet and hub data sets."""


def tokenizer(args: list[str]) -> int:
    from lol.data.mixture import mixed_texts, open_sources
    from lol.data.tokenizer import train_tokenizer

    command = flags.parse(TrainTokenizer, "tokenizer", args)
    if command.out.exists():
        raise UserError(f"{command.out} exists already: name a new folder as --out")
    sources = open_sources(command.data, text_column=command.text_column)
    trained = train_tokenizer(mixed_texts(sources), command.vocab_size)
    trained.save_pretrained(command.out)
    print(f"written: {command.out} ({len(trained):,} tokens)")
    return 0
