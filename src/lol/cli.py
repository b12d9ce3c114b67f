"""`lol …`: one command per verb, its flags made from typed functions and dataclasses by tyro; no logic of its own."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import docstring_parser
import tyro
from huggingface_hub.errors import StrictDataclassError
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from lol.errors import UserError, is_whole_text
from lol.model.config import LoLConfig
from lol.train.config import MODEL_FIELDS, TrainConfig

USAGE = """\
usage: lol VERB [flags]          lol VERB --help lists a verb's flags

  train          train a model, or go on with a run
      lol train --recipe demo --run runs/demo
  recipe list    the recipes: the article's runs, their partners, their twins
  recipe show    all that a recipe decides: lol recipe show math-1b
  generate       continue a prompt, or what you type; --path forces blocks
      lol generate --model runs/demo --prompt "import os" --show-path
  serve          OpenAI's completions API over HTTP, with paths
      lol serve --model runs/demo --port 8000
  paths show     print the block of every window and depth of a text
  paths report   write a run's report.html
  tokenizer      train a byte-level BPE
  cost           parameters, FLOPs and bytes of a recipe or a model
  toy run        train one model of the toy: given, learned, dense, …
      lol toy run given --seed 1
  toy all        do all toy runs that are not done, side by side
  toy discover   train a router that finds the primitives: pc, mix, ord
  toy table      the toy's table and figures beside the article's numbers
  toy play       type digits and a program, see path and state
  bench decode   time cached decoding against its alternatives
  bench core     time the dispatch of a routed depth against its alternatives
  bench toy      time a training step of the toy against the plain loop
"""


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
    run = _flag(args, "--run", default="")
    resumed = run and "--resume" in args and (Path(run) / CONFIG).exists()
    config = read_config(Path(run)) if resumed else recipe(_flag(args, "--recipe", default="demo"))
    vars(default).update(run=tyro.MISSING, config=config, resume=False)
    command = _parse(Train, "train", args, default=default)
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
    show_path: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print to standard error, where windows begin, the block and weight of each depth."""


def generate(args: list[str]) -> int:
    from lol import terminal
    from lol.generate import Sampling
    from lol.train.loading import load_model

    command = _parse(Generate, "generate", args)
    sampling = Sampling(command.max_new_tokens, command.temperature, command.top_k, command.top_p)
    return terminal.generate(
        *load_model(command.model),
        command.prompt,
        sampling=sampling,
        seed=command.seed,
        path=command.path,
        show_path=command.show_path,
    )


def serve(args: list[str]) -> int:
    from lol.serve.limits import Serve

    command = _parse(Serve, "serve", args)
    try:
        from lol.serve.server import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "lol":
            raise
        raise UserError(
            f"lol serve needs {error.name}, which is not installed: pip install library-of-layers[serve]"
        ) from None
    run_server(command)
    return 0


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

    command = _parse(PathsShow, "paths show", args)
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

    command = _parse(PathsReport, "paths report", args)
    print(f"written: {report_run(command.run, out=command.out, num_rows=command.documents)}")
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

    command = _parse(TrainTokenizer, "tokenizer", args)
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
    folder = _flag(args, "--model", default="")
    config = config_of(Path(folder)) if folder else recipe(_flag(args, "--recipe", default="demo"))
    return _write_numbers(_parse(Cost, "cost", args, default=Cost(config)), print_cost)


def recipe_list(args: list[str]) -> int:
    from lol.experiments.recipe_table import list_recipes

    _parse(RecipeList, "recipe list", args)
    list_recipes()
    return 0


def recipe_show(args: list[str]) -> int:
    from lol.experiments.recipe_table import RecipeShow, show_recipe

    return _write_numbers(_parse(RecipeShow, "recipe show", args), show_recipe)


def toy_run(args: list[str]) -> int:
    from lol.experiments.toy.runs import ToyRun
    from lol.experiments.toy.runs import toy_run as run_toy

    if args and not args[0].startswith("-"):
        args = ["--model", *args]
    run_toy(_parse(ToyRun, "toy run", args))
    return 0


def toy_all(args: list[str]) -> int:
    from lol.experiments.toy.runs import ToyAll
    from lol.experiments.toy.runs import toy_all as run_all

    return 1 if run_all(_parse(ToyAll, "toy all", args)) else 0


def toy_discover(args: list[str]) -> int:
    from lol.experiments.toy.discover_runs import ToyDiscover
    from lol.experiments.toy.discover_runs import toy_discover as run_discovery

    run_discovery(_parse(ToyDiscover, "toy discover", args))
    return 0


def toy_table(args: list[str]) -> int:
    from lol.experiments.toy.table import ToyTable
    from lol.experiments.toy.table import toy_table as write_table

    print(write_table(_parse(ToyTable, "toy table", args)))
    return 0


def toy_play(args: list[str]) -> int:
    from lol.experiments.toy.play import ToyPlay
    from lol.experiments.toy.play import play as run_play

    run_play(_parse(ToyPlay, "toy play", args))
    return 0


def bench_core(args: list[str]) -> int:
    from lol.bench.core import BenchCore, bench

    return _write_numbers(_parse(BenchCore, "bench core", args), bench)


def bench_toy(args: list[str]) -> int:
    from lol.bench.toy import BenchToy, bench

    return _write_numbers(_parse(BenchToy, "bench toy", args), bench)


def bench_decode(args: list[str]) -> int:
    from lol.bench.decode import BenchDecode, bench

    return _write_numbers(_parse(BenchDecode, "bench decode", args), bench)


def _write_numbers(command: Any, verb: Callable[[Any], dict[str, Any]]) -> int:
    result = verb(command)
    if command.json is not None:
        command.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


VERBS: dict[tuple[str, ...], Callable[[list[str]], int]] = {
    ("train",): train,
    ("recipe", "list"): recipe_list,
    ("recipe", "show"): recipe_show,
    ("generate",): generate,
    ("serve",): serve,
    ("paths", "show"): paths_show,
    ("paths", "report"): paths_report,
    ("tokenizer",): tokenizer,
    ("cost",): cost,
    ("toy", "run"): toy_run,
    ("toy", "all"): toy_all,
    ("toy", "discover"): toy_discover,
    ("toy", "table"): toy_table,
    ("toy", "play"): toy_play,
    ("bench", "core"): bench_core,
    ("bench", "decode"): bench_decode,
    ("bench", "toy"): bench_toy,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code.

    0, also where the reader of the output has left (`lol … | head`); 2 after a mistake in the input, whose message has
    gone to standard error; 130 after Ctrl-C, 143 after a training run that SIGTERM stopped. Raises SystemExit for
    --help (0) and for flags that cannot be read (2).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run_verb(args)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", code=130)
    except BrokenPipeError:
        # Nobody reads what is still buffered, and the interpreter would complain of it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run_verb(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if any(args[:1] == [words[0]] and args[1:2] in (["-h"], ["--help"]) and len(words) > 1 for words in VERBS):
        print(USAGE)
        return 0
    broken = [arg for arg in args if not is_whole_text(arg)]
    if broken:
        return _complain(f"{broken[0]!r} is not UTF-8 text: write it in UTF-8")
    for words, verb in VERBS.items():
        if tuple(args[: len(words)]) == words:
            try:
                return verb(args[len(words) :])
            except UserError as error:
                return _complain(str(error))
            except StrictDataclassError as error:
                return _complain(f"{error.__cause__ or error} ({error})")
            except OSError as error:
                if error.filename is None or isinstance(error, BrokenPipeError):
                    raise
                return _complain(f"{error.filename}: {error.strerror}; choose a file that can be read or written there")
    return _complain(f"there is no verb {' '.join(args[:2])!r}\n\n{USAGE}")


def _complain(message: str, code: int = 2) -> int:
    print(f"lol: {message}", file=sys.stderr)
    return code


def _parse(command: type[Any], verb: str, args: list[str], default: Any = None) -> Any:
    registry = ConstructorRegistry()
    registry.struct_rule(_model_flags)
    with registry:
        return tyro.cli(command, prog=f"lol {verb}", args=args, **({} if default is None else {"default": default}))


def _model_flags(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Flags for the fields of `LoLConfig` that belong to a run, and none for the many it inherits."""
    if info.type is not LoLConfig:
        return None
    help_of = {item.arg_name: item.description for item in docstring_parser.parse(LoLConfig.__doc__ or "").params}
    fields = tuple(
        StructFieldSpec(
            name=name,
            type=LoLConfig.__annotations__[name],
            default=getattr(info.default, name),
            helptext=help_of.get(name),
        )
        for name in MODEL_FIELDS
    )
    return StructConstructorSpec(instantiate=LoLConfig, fields=fields)


def _flag(args: list[str], flag: str, default: str) -> str:
    """The value of a flag that decides the defaults of the others, so it is read before them."""
    for place, arg in enumerate(args):
        if arg == flag and place + 1 < len(args):
            return args[place + 1]
        if arg.startswith(f"{flag}="):
            return arg.removeprefix(f"{flag}=")
    return default


def _summary_lines(summary: dict[str, Any]) -> str:
    losses = [("this model", summary["held_out_loss"])]
    losses += [(f"  {source}", loss) for source, loss in summary.get("losses", {}).items()]
    losses += [(name, summary[f"{name}_loss"]) for name in ("bigram", "unigram") if f"{name}_loss" in summary]
    lines = ["held-out loss, nats per token:"]
    width = max(12, *(len(name) + 2 for name, _ in losses))
    lines += [f"  {name:<{width}}{loss:.3f}" for name, loss in losses]
    lines.append(f"busiest block: {100 * summary['busiest_block_share']:.0f} % of the held-out windows")
    return "\n".join(lines)
