"""What each verb of `lol` does with its flags: it calls the part of the package that does the work."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from lol.errors import UserError
from lol.flags import parse, read_flag
from lol.train.config import TrainConfig


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
    from lol.experiments.run_report import read_config
    from lol.train.recipes import recipe
    from lol.train.run_folder import CONFIG
    from lol.train.trainer import train as run_training

    # Without its __init__: tyro's mark for what the flags must give is no Path.
    default = object.__new__(Train)
    run = read_flag(args, "--run", default="")
    resumed = run and "--resume" in args and (Path(run) / CONFIG).exists()
    config = read_config(Path(run)) if resumed else recipe(read_flag(args, "--recipe", default="demo"))
    vars(default).update(run=tyro.MISSING, config=config, resume=False)
    command = parse(Train, "train", args, default=default)
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


@dataclass(frozen=True)
class RecipeList:
    """Print the recipes: the article's runs with their partners, and those of this project."""


@dataclass(frozen=True)
class ExperimentList:
    """Print the article's experiments: what each is, the data that it wants, what was published."""


@dataclass(frozen=True)
class Generate:
    """Continue a prompt, which counts as the beginning of a document.

    Without --prompt it reads standard input: a pipe is one prompt; at a terminal every line you type is added to the
    text, and the model goes on from there (/help there says more).

    Example: lol generate --model runs/demo --prompt "import os" --path 0 1 2 3 0 1 --show-path
    """

    model: Path
    """A run folder (its newest checkpoint), a checkpoint, or a folder written by transformers."""
    prompt: str | None = None
    """The text to continue. Default: standard input."""
    max_new_tokens: int = 100
    """Stop after so many tokens, if the document does not end before."""
    temperature: float = 0.8
    """0 takes the most probable token every time."""
    top_k: int = 50
    """Sample among so many most probable tokens."""
    top_p: float = 1.0
    """Sample among the most probable tokens that have so much probability together."""
    seed: int = 0
    """Decides the sample."""
    path: list[int] | None = None
    """One block per depth that every window is to run; -1 leaves a depth to the router."""
    path_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Instead of --path: a path that lol studio has saved, with its weight."""
    show_path: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print to standard error, where windows begin, the block and weight of each depth."""


def generate(args: list[str]) -> int:
    from lol import terminal
    from lol.decoding import lay_path
    from lol.generate import Sampling
    from lol.paths.saved import SavedPath, read_saved_path
    from lol.train.loading import load_model

    command = parse(Generate, "generate", args)
    sampling = Sampling(command.max_new_tokens, command.temperature, command.top_k, command.top_p)
    saved: SavedPath | None = None
    if command.path_file is not None:
        if command.path is not None:
            raise UserError("--path and --path-file both force blocks: give one of them")
        saved = read_saved_path(command.path_file)
    model, tokenizer = load_model(command.model)
    if saved is not None:
        try:
            lay_path(saved.path, model.config)
        except UserError as error:
            raise UserError(f"{command.path_file} is no path of {command.model}: {error}") from None
    return terminal.generate(
        model,
        tokenizer,
        command.prompt,
        sampling=sampling,
        seed=command.seed,
        path=command.path if saved is None else saved.path,
        path_weight=None if saved is None else saved.path_weight,
        show_path=command.show_path,
    )


def serve(args: list[str]) -> int:
    from lol.serve.limits import Serve

    command = parse(Serve, "serve", args)
    with _needs_extra("serve"):
        from lol.serve.server import serve as run_server
    run_server(command)
    return 0


def studio(args: list[str]) -> int:
    from lol.studio.limits import Studio

    command = parse(Studio, "studio", args)
    with _needs_extra("studio"):
        from lol.studio.server import studio as run_studio
    run_studio(command)
    return 0


@contextmanager
def _needs_extra(verb: str) -> Iterator[None]:
    """A missing package as a mistake whose fix is named."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "lol":
            raise
        raise UserError(
            f"lol {verb} needs {error.name}, which is not installed: pip install library-of-layers[{verb}]"
        ) from None


@dataclass(frozen=True)
class PathsShow:
    """Print the block of every window and depth of a text, with the weight of its update.

    Example: lol paths show --model runs/demo --text "def f(x): return x"
    """

    model: Path
    """A run folder (its newest checkpoint), a checkpoint, or a folder written by transformers."""
    text: str
    """The text, read as the beginning of a document."""


def paths_show(args: list[str]) -> int:
    from lol.experiments.run_report import show_paths
    from lol.train.loading import load_model

    command = parse(PathsShow, "paths show", args)
    show_paths(*load_model(command.model), command.text)
    return 0


@dataclass(frozen=True)
class PathsReport:
    """Write a run's report: loss, use of the blocks, a sample, and held-out text coloured by path, in one HTML file.

    Example: lol paths report --run runs/demo
    """

    run: Path
    """The run folder."""
    out: Path | None = None
    """The file to write; without it, report.html in the run folder."""
    documents: int = 6
    """Held-out rows to show."""


def paths_report(args: list[str]) -> int:
    from lol.experiments.run_report import report_run

    command = parse(PathsReport, "paths report", args)
    print(f"written: {report_run(command.run, out=command.out, num_rows=command.documents)}")
    return 0


def paths_tool(name: str, args: list[str]) -> int:
    from lol.experiments.path_tools import TOOLS

    command, run = TOOLS[name]
    run(parse(command, f"paths {name}", args))
    return 0


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

    command = parse(Export, "export", args)
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

    command = parse(TrainTokenizer, "tokenizer", args)
    if command.out.exists():
        raise UserError(f"{command.out} exists already: name a new folder as --out")
    sources = open_sources(command.data, text_column=command.text_column)
    trained = train_tokenizer(mixed_texts(sources), command.vocab_size)
    trained.save_pretrained(command.out)
    print(f"written: {command.out} ({len(trained):,} tokens)")
    return 0


def cost(args: list[str]) -> int:
    from lol.experiments.cost_table import Cost, config_of
    from lol.experiments.cost_table import cost as print_cost
    from lol.train.recipes import recipe

    if args and not args[0].startswith("-"):
        args = ["--recipe", *args]
    folder = read_flag(args, "--model", default="")
    config = config_of(Path(folder)) if folder else recipe(read_flag(args, "--recipe", default="demo"))
    return _write_numbers(parse(Cost, "cost", args, default=Cost(config)), print_cost)


def recipe_list(args: list[str]) -> int:
    from lol.experiments.recipe_table import list_recipes

    parse(RecipeList, "recipe list", args)
    list_recipes()
    return 0


def recipe_show(args: list[str]) -> int:
    from lol.experiments.recipe_table import RecipeShow, show_recipe

    return _write_numbers(parse(RecipeShow, "recipe show", args), show_recipe)


def watch(args: list[str]) -> int:
    from lol.experiments.watch import Watch
    from lol.experiments.watch import watch as run_watch

    return run_watch(parse(Watch, "watch", args))


def toy_run(args: list[str]) -> int:
    from lol.experiments.toy.runs import ToyRun
    from lol.experiments.toy.runs import toy_run as run_toy

    if args and not args[0].startswith("-"):
        args = ["--model", *args]
    run_toy(parse(ToyRun, "toy run", args))
    return 0


def toy_all(args: list[str]) -> int:
    from lol.experiments.toy.runs import ToyAll
    from lol.experiments.toy.runs import toy_all as run_all

    return 1 if run_all(parse(ToyAll, "toy all", args)) else 0


def toy_discover(args: list[str]) -> int:
    from lol.experiments.toy.discover_runs import ToyDiscover
    from lol.experiments.toy.discover_runs import toy_discover as run_discovery

    return 1 if run_discovery(parse(ToyDiscover, "toy discover", args)) else 0


def toy_table(args: list[str]) -> int:
    from lol.experiments.toy.table import ToyTable
    from lol.experiments.toy.table import toy_table as write_table

    print(write_table(parse(ToyTable, "toy table", args)))
    return 0


def toy_play(args: list[str]) -> int:
    from lol.experiments.toy.play import ToyPlay
    from lol.experiments.toy.play import play as run_play

    run_play(parse(ToyPlay, "toy play", args))
    return 0


def experiment_list(args: list[str]) -> int:
    from lol.experiments.registry import list_experiments

    parse(ExperimentList, "experiment list", args)
    list_experiments()
    return 0


def experiment(args: list[str]) -> int:
    from lol.experiments.harness import Options
    from lol.experiments.registry import experiment as run_experiment

    run_experiment(parse(Options, "experiment", args))
    return 0


def bench_core(args: list[str]) -> int:
    from lol.bench.core import BenchCore, bench

    return _write_numbers(parse(BenchCore, "bench core", args), bench)


def bench_toy(args: list[str]) -> int:
    from lol.bench.toy import BenchToy, bench

    return _write_numbers(parse(BenchToy, "bench toy", args), bench)


def bench_decode(args: list[str]) -> int:
    from lol.bench.decode import BenchDecode, bench

    return _write_numbers(parse(BenchDecode, "bench decode", args), bench)


def bench_train(args: list[str]) -> int:
    from lol.bench.train import BenchTrain, bench

    return _write_numbers(parse(BenchTrain, "bench train", args), bench)


def bench_gpu(args: list[str]) -> int:
    from lol.bench.gpu import BenchGpu, bench

    command = parse(BenchGpu, "bench gpu", args)
    result = bench(command)
    _write_numbers(command, lambda _: result)
    return int(bool(result and result["failed"]))


def _write_numbers(command: Any, verb: Callable[[Any], dict[str, Any] | None]) -> int:
    result = verb(command)
    if command.json is not None and result is not None:
        command.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


VERBS: dict[tuple[str, ...], Callable[[list[str]], int]] = {
    ("train",): train,
    ("watch",): watch,
    ("recipe", "list"): recipe_list,
    ("recipe", "show"): recipe_show,
    ("generate",): generate,
    ("serve",): serve,
    ("studio",): studio,
    ("paths", "show"): paths_show,
    ("paths", "report"): paths_report,
    ("paths", "utilisation"): partial(paths_tool, "utilisation"),
    ("paths", "map"): partial(paths_tool, "map"),
    ("paths", "probe"): partial(paths_tool, "probe"),
    ("paths", "mode"): partial(paths_tool, "mode"),
    ("paths", "force"): partial(paths_tool, "force"),
    ("export",): export,
    ("tokenizer",): tokenizer,
    ("cost",): cost,
    ("toy", "run"): toy_run,
    ("toy", "all"): toy_all,
    ("toy", "discover"): toy_discover,
    ("toy", "table"): toy_table,
    ("toy", "play"): toy_play,
    ("experiment", "list"): experiment_list,
    ("experiment",): experiment,
    ("bench", "core"): bench_core,
    ("bench", "decode"): bench_decode,
    ("bench", "train"): bench_train,
    ("bench", "gpu"): bench_gpu,
    ("bench", "toy"): bench_toy,
}


def _summary_lines(summary: dict[str, Any]) -> str:
    losses = [("this model", summary["held_out_loss"])]
    losses += [(f"  {source}", loss) for source, loss in summary.get("losses", {}).items()]
    losses += [(name, summary[f"{name}_loss"]) for name in ("bigram", "unigram") if f"{name}_loss" in summary]
    lines = ["held-out loss, nats per token:"]
    width = max(12, *(len(name) + 2 for name, _ in losses))
    lines += [f"  {name:<{width}}{loss:.3f}" for name, loss in losses]
    lines.append(f"busiest block: {100 * summary['busiest_block_share']:.0f} % of the held-out windows")
    return "\n".join(lines)
