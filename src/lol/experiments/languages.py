"""languages: is the language of a text written in its path? Ten languages in equal shares of tokens, no labels.

The runs are LoL models; their checkpoints are kept, and at several of them the paths of held-out text are read: maps of
window paths by principal components, linear probes of the language beside probes of the same windows' tokens, and how
far the languages' mean paths lie apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np
from matplotlib.figure import Figure

from lol.errors import UserError
from lol.experiments.figures import clean_axes, save_figure
from lol.experiments.harness import Experiment, Numbers, Setting, markdown_table, with_model
from lol.experiments.reading import Reading, checkpoints, probe_paths, probe_tokens, read, rows, score_cell, step_of
from lol.paths.colors import block_colors
from lol.paths.figure import draw_matrix
from lol.paths.project import principal_components
from lol.paths.statistics import label_distances
from lol.train.config import DataConfig, EvalConfig, TrainConfig
from lol.train.corpus import open_sides
from lol.train.recipes import recipe
from lol.train.run_folder import read_config

_LATIN = ("de", "es", "fr", "tr")
"""File names of the languages in Latin script; data sets of the Hub say it behind the language, as in deu_Latn."""
_KINDS = ("one-hot", "probability")
# Windows of each language in a map.
_DOTS = 40


def _runs(setting: Setting) -> Mapping[str, TrainConfig]:
    """The tiny run is smaller than the recipe's twin in depth and wider: the twin's 33 blocks at width 64 would see too
    few windows each. (Decided here.)"""
    if setting.scale == "paper":
        config = recipe("multilingual")
        steps = config.steps
    else:
        config, steps = recipe("multilingual-tiny"), 1600
        config = with_model(
            config,
            vocab_size=4096,
            hidden_size=128,
            num_experts=12,
            num_routed_depths=8,
            window_size=32,
            window_stride=16,
        )
        data = DataConfig(_sources(setting), document_chars=150, held_out_fraction=0.05, context_length=256)
        config = replace(config, data=data, steps=steps, batch_size=20, eval=EvalConfig(every=200, rows=60))
        config = replace(config, optim=replace(config.optim, learning_rate=2e-3, warmup_steps=100))
    kept = replace(config, checkpoint_every=steps // 8, keep_checkpoints=8)
    return {f"seed-{seed}": replace(kept, seed=seed) for seed in setting.seeds}


def _sources(setting: Setting) -> tuple[str, ...]:
    files = sorted(str(file) for file in (setting.data or Path()).glob("*.txt"))
    if len(files) < 2:
        raise UserError(f"{setting.data} must be a folder with a .txt file for each language, two at least")
    return tuple(files)


def language_of(source: str) -> str:
    """The language of a source: a file's name without its ending, or what stands last in the name of a data set."""
    return source.rpartition(":")[2] if source.startswith("hf:") else Path(source).stem


def is_latin(language: str) -> bool:
    """Whether it is written in Latin script."""
    return language in _LATIN or language.endswith("_Latn")


def held_out_texts(run: Path, of_each: int) -> tuple[list[str], list[str]]:
    """Held-out documents of a run, `of_each` of every source at most, and their languages."""
    texts, labels = [], []
    for source in open_sides(read_config(run))[1]:
        own = [document["text"] for document in islice(source.documents, of_each)]
        texts += own
        labels += [language_of(source.name)] * len(own)
    return texts, labels


def _measure(setting: Setting, runs: Mapping[str, Path]) -> Numbers:
    return {name: _measure_run(run, setting.fast) for name, run in runs.items()}


def _measure_run(run: Path, quick: bool) -> Numbers:
    texts, labels = held_out_texts(run, of_each=6 if quick else 60)
    per_step = read_config(run).tokens_per_step
    states, reading = [], None
    kept = checkpoints(run)
    for place, checkpoint in enumerate(kept):
        reading = read(checkpoint, texts, labels, quick=quick)
        step = step_of(checkpoint)
        probes = {kind: probe_paths(reading, kind, "window") for kind in _KINDS}
        state: Numbers = {"step": step, "tokens": step * per_step, "probes": probes}
        if place in {0, len(kept) // 3, 2 * len(kept) // 3, len(kept) - 1}:
            state["map"] = _map(reading)
        states.append(state)
    assert reading is not None
    names, distances = label_distances(reading.table, labels)
    return {
        "languages": list(names),
        "texts": len(texts),
        "checkpoints": states,
        "tokens_of_the_window": probe_tokens(reading, "window"),
        "tokens_up_to_the_window": probe_tokens(reading, "window", reach="before"),
        "distances": distances.round(4).tolist(),
        "closeness": closeness(names, distances),
    }


def closeness(names: Sequence[str], distances: np.ndarray) -> dict[str, float]:
    """Mean distance of the mean paths of two languages: both in Latin script, one of them, none."""
    groups: dict[str, list[float]] = {"latin": [], "mixed": [], "other": []}
    for a, one in enumerate(names):
        for b in range(a + 1, len(names)):
            count = is_latin(one) + is_latin(names[b])
            groups[("other", "mixed", "latin")[count]].append(float(distances[a, b]))
    return {name: mean(values) for name, values in groups.items() if values}


def _map(reading: Reading) -> Numbers:
    """Some windows of each language along the two components of all of them."""
    features, keys = rows(reading, "one-hot", "window")
    projection = principal_components(features)
    labels = np.array([reading.labels[number] for number in keys["document"]])
    dots = {}
    for language in dict.fromkeys(reading.labels):
        own = np.flatnonzero(labels == language)
        spread = own[np.linspace(0, len(own) - 1, min(_DOTS, len(own))).astype(int)]
        dots[language] = projection.points[spread].round(3).tolist()
    return {"explained": projection.explained.round(4).tolist(), "dots": dots}


def _draw(numbers: Numbers, folder: Path) -> None:
    first = next(iter(numbers.values()))
    _draw_maps(first, folder / "maps.svg")
    _draw_probes(numbers, folder / "probes.svg")
    names = first["languages"]
    draw_matrix(
        np.array(first["distances"]),
        folder / "distances.svg",
        rows=names,
        columns=names,
        names=("language", "language"),
        title="distance of the mean paths of two languages (0 alike, 1 no block in common)",
        form="{:.2f}",
    )


def _draw_maps(run: Numbers, file: Path) -> None:
    shown = [state for state in run["checkpoints"] if "map" in state]
    figure = Figure(figsize=(3.1 * len(shown) + 1.2, 3.3), layout="constrained")
    panels = [clean_axes(axes) for axes in figure.subplots(1, len(shown), squeeze=False)[0]]
    colors = _colors(tuple(run["languages"]))
    for axes, state in zip(panels, shown, strict=True):
        for language, dots in state["map"]["dots"].items():
            across, up = zip(*dots, strict=True)
            marker = "o" if is_latin(language) else "s"
            axes.scatter(
                across, up, s=9, color=colors[language], marker=marker, linewidths=0, alpha=0.7, label=language
            )
        explained = state["map"]["explained"]
        axes.set_title(f"step {state['step']:,}; {100 * sum(explained):.0f} % of the variance", fontsize=8, loc="left")
    panels[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, file)


def _draw_probes(numbers: Numbers, file: Path) -> None:
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = clean_axes(figure.subplots())
    for place, run in enumerate(numbers.values()):
        steps = [state["step"] for state in run["checkpoints"]]
        for kind, color in zip(_KINDS, ("#2d6cdf", "#d1495b"), strict=True):
            scores = [state["probes"][kind] for state in run["checkpoints"]]
            label = f"path of one window, {kind}" if place == 0 else None
            axes.plot(steps, [score["accuracy"]["mean"] for score in scores], color=color, marker=".", label=label)
            label = f"the same, labels shuffled ({kind})" if place == 0 else None
            shuffled = [score["shuffled_accuracy"]["mean"] for score in scores]
            axes.plot(steps, shuffled, color=color, linestyle=":", label=label)
        label = "tokens of the same window" if place == 0 else None
        axes.axhline(run["tokens_of_the_window"]["accuracy"]["mean"], color="#8a8a8a", linestyle="--", label=label)
    axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.set_ylabel("language read right, held-out text; a line per seed")
    axes.legend(frameon=False, fontsize=7)
    save_figure(figure, file)


@cache
def _colors(languages: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(languages, block_colors(len(languages)), strict=True))


def _section(numbers: Numbers) -> str:
    rows_of = []
    for name, run in numbers.items():
        for state in run["checkpoints"]:
            one_hot, probability = (state["probes"][kind] for kind in _KINDS)
            cells = [score_cell(one["accuracy"]) for one in (one_hot, probability)]
            shuffled = one_hot["shuffled_accuracy"]["mean"]
            rows_of.append([name, state["step"], *cells, shuffled, score_cell(run["tokens_of_the_window"]["accuracy"])])
    heads = ["run", "step", "path of a window, one-hot", "probabilities", "labels shuffled (one-hot)"]
    heads += ["tokens of the same window"]
    near = [
        [name, *(run["closeness"].get(key, "–") for key in ("latin", "mixed", "other"))]
        for name, run in numbers.items()
    ]
    first = next(iter(numbers.values()))
    chance = first["checkpoints"][-1]["probes"]["one-hot"]["chance"]
    return "\n\n".join(
        [
            f"Share of windows whose language is read right, on {first['texts']} held-out texts of "
            f"{len(first['languages'])} languages; naming the most common one: {chance:.3f}. In brackets the 95 % "
            "interval over folds and seeds of the probe.",
            markdown_table(heads, rows_of),
            "Mean distance between the mean paths of two languages, at the last step:",
            markdown_table(["run", "both in Latin script", "one of them", "neither"], near),
        ]
    )


LANGUAGES = Experiment(
    name="languages",
    purpose="Ten languages, no labels: the language read from the paths, over training.",
    published="paths cluster by language, Latin scripts share paths, clusters form over training (360M, 10 B tokens)",
    seeds=(0, 1),
    runs=_runs,
    measure=_measure,
    draw=_draw,
    section=_section,
    data="FOLDER with a .txt file for each language, one sentence a line",
)
