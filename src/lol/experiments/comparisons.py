"""The article's comparisons of loss: matched models beside each other, a few seeds of each, by parameters and by FLOPs.

huginn: LoL against loops of as many blocks. moe: LoL against a mixture of experts. ablations: one thing changed each.
The runs are the published recipes or their twins, which are matched in the same way; `lol cost RECIPE` prints the same
counts as the tables here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from lol.experiments.figures import clean_axes, save_figure
from lol.experiments.harness import Experiment, Numbers, Setting, markdown_table, run_facts
from lol.model.config import LoLConfig
from lol.paths.colors import block_colors
from lol.train.config import MODEL_FIELDS, BudgetConfig, TrainConfig
from lol.train.metrics import read_metrics
from lol.train.progress import shorten
from lol.train.recipes import recipe

_SEED = "-seed-"
Settings = Callable[[Setting], Mapping[str, TrainConfig]]


def comparison(
    name: str, purpose: str, published: str, settings: Settings, reported: Mapping[str, float]
) -> Experiment:
    """An experiment that trains every setting with every seed and compares held-out losses.

    Args:
        name, purpose, published: as in `Experiment`.
        settings: From the setting of the experiment to its configurations by name, without a seed.
        reported: The article's loss, by the same names, where it gives one.
    """

    def runs(setting: Setting) -> Mapping[str, TrainConfig]:
        return {
            f"{label}{_SEED}{seed}": replace(config, seed=seed)
            for seed in setting.seeds
            for label, config in settings(setting).items()
        }

    section = partial(_section, reported=reported)
    return Experiment(name, purpose, published, (0, 1, 2), runs, _measure, _draw, section)


def _measure(_: Setting, runs: Mapping[str, Path]) -> Numbers:
    """Per setting: parameters, tokens, FLOPs, the held-out loss of every seed, and its course."""
    settings: Numbers = {}
    for name, run in runs.items():
        facts = run_facts(run)
        label, _, seed = name.rpartition(_SEED)
        own = settings.setdefault(label, {"seeds": [], "losses": [], "flops": [], "courses": []})
        own |= {key: facts[key] for key in ("stored", "active", "parameters", "tokens", "step")}
        own["seeds"].append(int(seed))
        own["losses"].append(facts["held_out_loss"])
        own["flops"].append(facts["flops"])
        own["courses"].append(_course(run))
    return settings


def _course(run: Path) -> list[tuple[float, float]]:
    """FLOPs spent and held-out loss at every evaluation, at the depth that was due."""
    records = read_metrics(run)
    spent = {record["step"]: record["flops"] for record in records if record["event"] == "train"}
    return [(spent[record["step"]], record["loss"]) for record in records if record["event"] == "eval"]


def _section(numbers: Numbers, reported: Mapping[str, float]) -> str:
    heads = ["setting", "stored", "active", "tokens", "FLOPs", "held-out loss, mean", "lowest to highest", "seeds"]
    heads += ["published"] if reported else []
    rows = []
    for label, own in numbers.items():
        losses = own["losses"]
        row = [label, shorten(own["stored"]), shorten(own["active"]), shorten(own["tokens"])]
        row += [shorten(mean(own["flops"]), "FLOP"), mean(losses), f"{min(losses):.3f} to {max(losses):.3f}"]
        row += [", ".join(map(str, own["seeds"]))]
        row += [reported.get(label, "–")] if reported else []
        rows.append(row)
    note = "Stored and active: parameters in the matrices of the layers, as the article counts. Losses: nats per token."
    return f"{markdown_table(heads, rows)}\n\n{note}"


def _draw(numbers: Numbers, folder: Path) -> None:
    colors = dict(zip(numbers, block_colors(max(2, len(numbers))), strict=False))
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_parameters, by_flops = (clean_axes(axes) for axes in figure.subplots(1, 2))
    for label, own in numbers.items():
        losses, color = own["losses"], colors[label]
        middle = mean(losses)
        by_parameters.errorbar(
            own["stored"] / 1e6,
            middle,
            yerr=[[middle - min(losses)], [max(losses) - middle]],
            fmt="o",
            color=color,
            capsize=3,
        )
        for place, course in enumerate(own["courses"]):
            spent, course_losses = zip(*course, strict=True)
            shown = label if place == 0 else None
            by_flops.plot([one / 1e12 for one in spent], course_losses, color=color, linewidth=1, label=shown)
    by_parameters.set_xlabel("parameters stored in the layers' matrices, millions; bars: lowest to highest seed")
    by_parameters.set_ylabel("held-out loss, nats per token")
    by_flops.set_xlabel("training, TFLOP; a line per seed")
    by_flops.set_yscale("log")
    by_flops.legend(frameon=False, fontsize=8)
    save_figure(figure, folder / "loss.svg")


def _recipes(names: Mapping[str, str]) -> Settings:
    def settings(setting: Setting) -> Mapping[str, TrainConfig]:
        return {
            label: sized(recipe(name if setting.scale == "paper" else f"{name}-tiny"), setting)
            for label, name in names.items()
        }

    return settings


def sized(config: TrainConfig, setting: Setting) -> TrainConfig:
    """A recipe as these experiments run it: at the tiny scale longer than its twin, which is for a first look."""
    if setting.scale == "paper":
        return config
    flops = config.budget.flops
    return replace(
        config,
        steps=config.steps * _LONGER,
        budget=BudgetConfig(flops=None if flops is None else flops * _LONGER),
        optim=replace(config.optim, warmup_steps=config.optim.warmup_steps * 2),
        eval=replace(config.eval, every=50 * _LONGER // 5, rows=128, ngrams=False),
        checkpoint_every=200,
    )


_LONGER = 5


def _ablations(setting: Setting) -> Mapping[str, TrainConfig]:
    """One change each from LoL's math run, over as many steps of the same text, so that FLOPs differ."""
    base = sized(recipe("math-1b" if setting.scale == "paper" else "math-1b-tiny"), setting)
    base = replace(base, budget=BudgetConfig())
    model = {name: getattr(base.model, name) for name in MODEL_FIELDS}
    growth, full = base.growth, replace(base.growth, backprop_depth=None)
    return {
        "published": base,
        "no-growing": replace(base, growth=replace(growth, initial_depth=None)),
        "aux-loss": replace(base, balance=replace(base.balance, strategy="aux_loss")),
        "untied-router": replace(base, model=LoLConfig(**(model | {"tie_router": False}))),
        "backprop-2": replace(base, growth=replace(growth, backprop_depth=2)),
        "backprop-all": replace(base, growth=full),
    }


HUGINN = comparison(
    "huginn",
    "LoL with 2, 4 and 8 blocks against loops of as many, at matched parameters.",
    "LoL L = 2, 4, 8: loss 2.85, 2.82, 2.80; loops 2x8, 4x4, 8x2: 2.87, 2.84, 2.81 (360M, 10 B tokens, 3 seeds)",
    _recipes({shape: f"huginn-360m-{shape}" for shape in ("L2", "2x8", "L4", "4x4", "L8", "8x2")}),
    {"L2": 2.85, "2x8": 2.87, "L4": 2.82, "4x4": 2.84, "L8": 2.80, "8x2": 2.81},
)
MOE = comparison(
    "moe",
    "LoL against a mixture of experts, at matched active parameters and FLOPs.",
    "mixture of experts 2.75, LoL 2.80; stored 412.1 M and 445.6 M, active 308.3 M both, 17.3 EFLOP",
    _recipes({"moe": "moe-360m-moe", "LoL": "moe-360m"}),
    {"moe": 2.75, "LoL": 2.80},
)
ABLATIONS = comparison(
    "ablations",
    "What growing, balancing, tying the router and truncated backprop change.",
    "growing costs a little loss and saves FLOPs; the balancing loss ends slightly above the bias; untying the router "
    "changes little",
    _ablations,
    {},
)
