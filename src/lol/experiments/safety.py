"""safety: can a ridge probe tell offensive texts from others by the probabilities of their routers?

The model is trained on the texts and never sees a label. Labels are those of people, from the data, and those of a
classifier (alt-profanity-check), which is how the article labels its texts: its figures say how far a probe agrees with
such a classifier, no more. Each probe stands beside the same one on shuffled labels, and one on the texts' tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lol.errors import UserError
from lol.experiments.figures import clean_axes, save_figure
from lol.experiments.harness import Experiment, Numbers, Setting, markdown_table, with_model
from lol.experiments.reading import Reading, checkpoints, probe_paths, probe_tokens, read, score_cell
from lol.paths.extra import need
from lol.train.config import DataConfig, EvalConfig, TrainConfig
from lol.train.corpus import open_sides
from lol.train.recipes import recipe
from lol.train.run_folder import read_config

SAFE, UNSAFE = "safe", "unsafe"
_SAFE_LABELS = ("neither", SAFE)
"""Labels of people that count as safe; all others are unsafe."""
_UNITS = ("window", "sequence")


def _runs(setting: Setting) -> Mapping[str, TrainConfig]:
    """The tiny run has the twin's layers and windows of 8 tokens: posts are short, and the path of a window depends on
    earlier windows only. (Decided here.)"""
    need("profanity_check")
    config = recipe("safety" if setting.scale == "paper" else "safety-tiny")
    if setting.scale == "tiny":
        assert setting.data is not None
        data = DataConfig(str(setting.data), held_out_fraction=0.2, context_length=128)
        config = with_model(config, vocab_size=2048, window_size=8, window_stride=4)
        config = replace(config, data=data, steps=1200, batch_size=16, eval=EvalConfig(every=200, rows=64))
        config = replace(config, optim=replace(config.optim, learning_rate=2e-3, warmup_steps=100))
    return {f"seed-{seed}": replace(config, seed=seed) for seed in setting.seeds}


def _measure(setting: Setting, runs: Mapping[str, Path]) -> Numbers:
    return {name: _measure_run(setting, run) for name, run in runs.items()}


def _measure_run(setting: Setting, run: Path) -> Numbers:
    most = 60 if setting.fast else 3000
    documents = (document["text"] for source in open_sides(read_config(run))[1] for document in source.documents)
    texts = list(islice(documents, most))
    labels = {"classifier": classify(texts)}
    if setting.data is not None:
        known = labels_of_people(setting.data)
        texts = [text for text in texts if text in known]
        labels = {"people": [known[text] for text in texts], "classifier": classify(texts)}
    reading = read(checkpoints(run)[-1], texts, labels["classifier"], quick=setting.fast)
    numbers: Numbers = {"texts": len(texts)}
    for name, own in labels.items():
        probes = {unit: _probe(reading, own, unit) for unit in _UNITS}
        numbers[name] = {"unsafe": own.count(UNSAFE) / len(own), **probes}
    return numbers


def _probe(reading: Reading, labels: Sequence[str], unit: Any) -> Numbers:
    probes = {
        "path, probabilities": probe_paths(reading, "probability", unit, labels),
        "path, one-hot": probe_paths(reading, "one-hot", unit, labels),
        "tokens of the same text": probe_tokens(reading, unit, labels),
    }
    if unit == "window":
        probes["tokens up to the window's end"] = probe_tokens(reading, unit, labels, reach="before")
    return probes


def labels_of_people(file: Path) -> dict[str, str]:
    """Text → safe or unsafe; texts that have both are left out.

    Raises:
        UserError: a line is no JSON object with `text` and `label`.
    """
    labels: dict[str, set[str]] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            labels.setdefault(row["text"], set()).add(SAFE if row["label"] in _SAFE_LABELS else UNSAFE)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'{file}, line {number}: each line must be {{"text": …, "label": …}}, where the label neither or safe '
                f"is safe ({type(error).__name__})"
            ) from error
    return {text: own.pop() for text, own in labels.items() if len(own) == 1}


def classify(texts: Sequence[str]) -> list[str]:
    """What alt-profanity-check says of texts."""
    return [UNSAFE if found else SAFE for found in need("profanity_check").predict(list(texts))]


def _draw(numbers: Numbers, folder: Path) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    first = next(iter(numbers.values()))
    sources = [name for name in ("people", "classifier") if name in first]
    panels = figure.subplots(1, len(sources), squeeze=False)[0]
    for axes, source in zip(panels, sources, strict=True):
        clean_axes(axes)
        bars = [(unit, probe) for unit in _UNITS for probe in first[source][unit]]
        for height, (unit, probe) in enumerate(bars):
            for run in numbers.values():
                score, shuffled = (run[source][unit][probe][key] for key in ("auroc", "shuffled_auroc"))
                reach = [[score["mean"] - score["low"]], [score["high"] - score["mean"]]]
                axes.errorbar(score["mean"], height, xerr=reach, fmt="o", markersize=4, color="#2d6cdf", capsize=2)
                axes.plot(shuffled["mean"], height, "x", markersize=4, color="#8a8a8a")
        axes.set_yticks(np.arange(len(bars)), [f"{unit}: {probe}" for unit, probe in bars])
        axes.invert_yaxis()
        axes.set_xlim(0.4, 1)
        axes.set_xlabel(
            f"AUROC, labels of {'people' if source == 'people' else 'a classifier'}; x: shuffled", fontsize=8
        )
    save_figure(figure, folder / "auroc.svg")


def _section(numbers: Numbers) -> str:
    first = next(iter(numbers.values()))
    rows = []
    for source in ("people", "classifier"):
        if source not in first:
            continue
        for unit in _UNITS:
            for probe in first[source][unit]:
                scores = [run[source][unit][probe] for run in numbers.values()]
                cells = ["; ".join(score_cell(score["auroc"]) for score in scores)]
                shuffled = mean(score["shuffled_auroc"]["mean"] for score in scores)
                rows.append([source, unit, probe, *cells, shuffled])
    shares = ", ".join(
        f"{100 * first[source]['unsafe']:.0f} % by {source}" for source in ("people", "classifier") if source in first
    )
    return "\n\n".join(
        [
            f"Held-out AUROC on {first['texts']} texts that were not trained on, of which unsafe: {shares}. Windows "
            "without the first of each text. In brackets the 95 % interval over folds and seeds of the probe; runs are "
            "parted by semicolons.",
            markdown_table(["labels of", "unit", "probe reads", "AUROC", "labels shuffled"], rows),
        ]
    )


SAFETY = Experiment(
    name="safety",
    purpose="Safe or unsafe, read from router probabilities by a ridge probe; no labels in training.",
    published="AUROC 0.92 per window, 0.95 per sequence, shuffled labels at chance (360M, labels by a classifier)",
    seeds=(0, 1),
    runs=_runs,
    measure=_measure,
    draw=_draw,
    section=_section,
    data="FILE.jsonl with text and label, where the label neither or safe is safe",
)
