"""What every experiment is, and how one is done: train what is missing, measure, write the results.

An `Experiment` declares the runs that it needs, a function that measures finished runs, one that draws what was
measured and one that words it. The rest is here:

RUNS/NAME-SCALE/RUN/     a run folder of `lol train` for each run; an interrupted one goes on, a finished one is kept
OUT/results.json         command, seeds, what each run came to (`RunFacts`) and what was measured (`numbers`)
OUT/section.md           the same in words and tables      OUT/*.svg   figures, a heatmap of the blocks' use among them
"""

import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.cost import count_parameters
from lol.paths.statistics import draw_utilisation
from lol.train.config import MODEL_FIELDS, BudgetConfig, TrainConfig, as_json
from lol.train.loading import load_config
from lol.train.metrics import FILE as METRICS
from lol.train.metrics import json_safe, read_metrics
from lol.train.progress import duration
from lol.train.recipes import recipe
from lol.train.run_folder import CONFIG, read_config
from lol.train.trainer import train

Scale = Literal["tiny", "paper"]
Numbers = dict[str, Any]
RESULTS, SECTION = "results.json", "section.md"
FAST_STEPS = 2
_GPUS = 8


@dataclass(frozen=True)
class Setting:
    """How an experiment is done this time."""

    scale: Scale
    fast: bool
    """A few steps of every run, and little measuring: to see that the pipeline works."""
    seeds: tuple[int, ...]
    data: Path | None
    """What the user gave as --data."""
    folder: Path
    """The experiment's own, for its runs and for data that it makes."""


@dataclass(frozen=True)
class Experiment:
    """A published experiment: what is trained, measured, drawn and said of it."""

    name: str
    purpose: str
    """One line, for `lol experiment list`."""
    published: str
    """What the article reports at its own scale, in one line."""
    seeds: tuple[int, ...]
    """Seeds at the tiny scale where the command names none."""
    runs: Callable[[Setting], Mapping[str, TrainConfig]]
    """The runs by name. May write a small file into `Setting.folder`, the same for the same setting."""
    measure: Callable[[Setting, Mapping[str, Path]], Numbers]
    """From the run folders to numbers, as JSON values."""
    draw: Callable[[Numbers, Path], None]
    """Write figures of the numbers into a folder."""
    section: Callable[[Numbers], str]
    """The numbers in Markdown, without a heading."""
    data: str | None = None
    """What --data has to be at the tiny scale; None where nothing has to be given."""
    prepare: Callable[[Setting], object] | None = None
    """Writes what takes longer to write into `Setting.folder`, the same for the same setting, unless it is there."""


@dataclass(frozen=True)
class Options:
    """Do an experiment of the article: train what is missing, measure it, write numbers, figures and a section.

    Example: lol experiment huginn --scale tiny --fast
    """

    name: tyro.conf.Positional[str]
    """One that `lol experiment list` names, or all."""
    scale: Scale = "tiny"
    """tiny trains here. paper prints the commands for GPUs, and measures once their runs are there."""
    fast: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A few steps of everything, to see the pipeline work; its numbers mean nothing."""
    seeds: tuple[int, ...] | None = None
    """Seeds of every run; without it, those of the experiment."""
    data: Path | None = None
    """File or folder that the experiment reads; `lol experiment list` says what each wants."""
    runs: Path = Path("runs/experiments")
    """Folder for the run folders."""
    out: Path | None = None
    """Folder for the results; without it results/NAME, beside the runs for --fast."""
    only: tuple[str, ...] = ()
    """Train these runs and measure nothing, so that several processes can share an experiment."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write over the results of another command."""


def run_experiment(experiment: Experiment, options: Options) -> Path | None:
    """Do an experiment; returns the folder of its results, or None if runs are missing still.

    Raises:
        UserError: data is missing, results of another command are in the way, a run cannot be trained.
        KeyboardInterrupt, SystemExit: a run was stopped by Ctrl-C or SIGTERM, after its checkpoint.
    """
    setting = setting_of(experiment, options)
    out = out_of(experiment, options)
    asked = _asked(setting)
    if (out / RESULTS).exists() and not options.overwrite and not options.only:
        if json.loads((out / RESULTS).read_text(encoding="utf-8"))["setting"] != json_safe(asked):
            raise UserError(f"{out} holds results of another command: give --overwrite, or another --out")
        print(f"done before: {out} (--overwrite measures again)")
        return out
    configs = {name: few_steps(config) if setting.fast else config for name, config in experiment.runs(setting).items()}
    if unknown := sorted(set(options.only) - set(configs)):
        raise UserError(f"{experiment.name} has no run {unknown[0]!r}: its runs are {', '.join(configs)}")
    folders = {name: setting.folder / name for name in configs}
    missing = [name for name in configs if not is_done(folders[name]) and (not options.only or name in options.only)]
    if setting.scale == "paper" and missing:
        print(f"{len(missing)} of {len(configs)} runs are missing; train them, then give this command again:\n")
        for name in missing:
            print(command_line(configs[name], folders[name]))
        if experiment.prepare is not None:
            print(f"\nThe data that they read is written into {setting.folder} now …", flush=True)
            experiment.prepare(setting)
            print("It is there.")
        return None
    if experiment.prepare is not None:
        experiment.prepare(setting)
    _train_all({name: configs[name] for name in missing}, folders, total=len(configs))
    if options.only:
        return None
    numbers = experiment.measure(setting, folders)
    record = {
        "experiment": experiment.name,
        "command": command_of(experiment, setting),
        "setting": asked,
        "published": experiment.published,
        "runs": {name: run_facts(folder) for name, folder in folders.items()},
        "numbers": numbers,
    }
    write_results(experiment, record, out)
    print(f"written: {out}")
    return out


def setting_of(experiment: Experiment, options: Options) -> Setting:
    """What the flags come to for this experiment.

    Raises:
        UserError: the data that it needs was not given, or is not there.
    """
    if options.scale == "tiny" and experiment.data is not None and options.data is None:
        raise UserError(f"{experiment.name} needs data: give --data {experiment.data}")
    if options.data is not None and not options.data.exists():
        raise UserError(f"--data {options.data}: there is no such file or folder")
    seeds = experiment.seeds if options.seeds is None else options.seeds
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError("--seeds wants one or more different numbers, for example --seeds 0 1 2")
    label = f"{experiment.name}-{options.scale}" + ("-fast" if options.fast else "")
    return Setting(options.scale, options.fast, seeds, options.data, options.runs / label)


def out_of(experiment: Experiment, options: Options) -> Path:
    """Where the results go. What --fast writes is no result, so it stays away from those."""
    if options.out is not None:
        return options.out / experiment.name if options.name == "all" else options.out
    if options.fast:
        return options.runs / f"{experiment.name}-{options.scale}-fast" / "results"
    return Path("results") / (experiment.name if options.scale == "tiny" else f"{experiment.name}-paper")


def few_steps(config: TrainConfig) -> TrainConfig:
    """The run cut to a few steps of two rows, measured and saved after the last one."""
    return dataclasses.replace(
        config,
        steps=FAST_STEPS,
        batch_size=2,
        accumulation=1,
        budget=BudgetConfig(),
        optim=dataclasses.replace(config.optim, warmup_steps=1),
        eval=dataclasses.replace(config.eval, every=FAST_STEPS, rows=2),
        checkpoint_every=0,
    )


def with_model(config: TrainConfig, **changes: Any) -> TrainConfig:
    """The run with other values in some fields of its model."""
    fields: dict[str, Any] = {name: getattr(config.model, name) for name in MODEL_FIELDS} | changes
    return dataclasses.replace(config, model=LoLConfig(**fields))


def is_done(run: Path) -> bool:
    """Whether a run came to its last step."""
    return any(record["event"] == "summary" for record in read_metrics(run)) if (run / METRICS).exists() else False


def run_facts(run: Path) -> Numbers:
    """What a run came to, and what its model has: parameters stored and active as the article counts them (matrices of
    the layers, without embedding and head), tokens and FLOPs of training, held-out loss in nats per token."""
    config, summary = read_config(run), read_metrics(run)[-1]
    body = count_parameters(load_config(run)).body
    return {
        "recipe": config.recipe,
        "seed": config.seed,
        "stored": body.matrices,
        "active": body.active_matrices,
        **{key: summary[key] for key in ("parameters", "step", "tokens", "flops", "seconds", "held_out_loss", "load")},
    }


def command_line(config: TrainConfig, run: Path, gpus: int = _GPUS) -> str:
    """The `lol train` command of a run on the GPUs of one machine: its recipe, and a flag for each other field."""
    before, now = (dict(_leaves(as_json(one))) for one in (recipe(config.recipe), config))
    flags = [word for name, value in now.items() if before[name] != value for word in _flag(name, value)]
    words = ["torchrun", f"--nproc-per-node={gpus}", "-m", "lol", "train", "--recipe", config.recipe, "--run", str(run)]
    return shlex.join([*words, "--parallel", "fsdp2", *flags])


def command_of(experiment: Experiment, setting: Setting) -> str:
    """What to type for this experiment; data is named by its last part, for no result depends on where it lies."""
    words = ["lol", "experiment", experiment.name, "--scale", setting.scale]
    words += ["--fast"] if setting.fast else []
    words += ["--seeds", *map(str, setting.seeds)]
    words += [] if setting.data is None else ["--data", setting.data.name]
    return shlex.join(words)


def write_results(experiment: Experiment, record: Numbers, out: Path) -> None:
    """Write figures, section and numbers; the numbers last, for they say that the rest is there."""
    out.mkdir(parents=True, exist_ok=True)
    _draw_use(record, out)
    experiment.draw(record["numbers"], out)
    section = experiment.section(record["numbers"]).strip()
    text = f"{section}\n\nPublished: {experiment.published}. From `{record['command']}`.\n"
    (out / SECTION).write_text(text, encoding="utf-8")
    partial = out / f".{RESULTS}.partial"
    partial.write_text(json.dumps(json_safe(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(out / RESULTS)


def _draw_use(record: Numbers, out: Path) -> None:
    """The use of the blocks in the runs of the first seed; of --fast in one of them, for drawing takes longer than they
    do."""
    first = record["setting"]["seeds"][0]
    shown = {name: np.array(facts["load"]) for name, facts in record["runs"].items() if facts["seed"] == first}
    shown = {name: load for name, load in shown.items() if load.sum()}
    for name in list(shown)[: 1 if record["setting"]["fast"] else None]:
        shares = shown[name] / shown[name].sum(1, keepdims=True)
        draw_utilisation(shares, out / f"utilisation-{name}.svg", name)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; numbers that are not whole have three digits behind the point."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        lines.append("| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row) + " |")
    return "\n".join(lines)


def _train_all(configs: Mapping[str, TrainConfig], folders: Mapping[str, Path], total: int) -> None:
    began, done_before = time.monotonic(), total - len(configs)
    for number, (name, config) in enumerate(configs.items()):
        left = ""
        if number:
            left = f", about {duration((time.monotonic() - began) / number * (len(configs) - number))} left"
        print(f"run {name} ({done_before + number + 1} of {total}{left})", flush=True)
        outcome = train(config, folders[name], resume=(folders[name] / CONFIG).exists())
        if outcome.stopped_by is not None:
            print(f"stopped by {outcome.stopped_by} in run {name}: give the same command again to go on")
            raise KeyboardInterrupt if outcome.stopped_by == "SIGINT" else SystemExit(143)


def _asked(setting: Setting) -> Numbers:
    return {"scale": setting.scale, "fast": setting.fast, "seeds": list(setting.seeds)}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in tree.items():
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return found


def _flag(name: str, value: Any) -> list[str]:
    if name == "data.source":
        name = "data"
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        section, _, last = flag.rpartition(".")
        return [f"--{flag}" if value else f"--{section}{'.' if section else ''}no-{last}"]
    if isinstance(value, tuple | list):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", str(value)]
