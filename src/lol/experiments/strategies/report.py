"""The numbers of `measure` as figures, and as a section in Markdown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lol.experiments.figures import clean_axes, save_figure
from lol.experiments.harness import Numbers, markdown_table
from lol.experiments.strategies.measure import ANOTHER, UNSOLVED
from lol.paths.figure import draw_matrix

# What the matrix shows, of `measure.WEIGHTS`.
_SHOWN = "mode"
_WEIGHTS = {
    "router": "the router's own probability, untold",
    "mode": "its mean probability where told",
    "1.0": "1",
}
_OUTCOMES = {
    "front": ("the first depths' strategy", "#2b6cb0"),
    "back": ("the last depths' strategy", "#dd6b20"),
    "other": ("a third strategy", "#805ad5"),
    ANOTHER: ("solved, no strategy's trace", "#a0aec0"),
    UNSOLVED: ("not solved", "#e2e8f0"),
}


def draw_numbers(numbers: Numbers, folder: Path) -> None:
    """Per run: forced against produced strategy, and what mixtures of two paths bring."""
    for run, own in numbers.items():
        if "forced" not in own:
            continue
        forced = own["forced"][_SHOWN]
        counts = np.array([_outcomes_of(forced, place) for place in range(len(own["strategies"]))], dtype=np.float64)
        draw_matrix(
            counts / counts.sum(1, keepdims=True),
            folder / f"confusion-{run}.svg",
            rows=own["strategies"],
            columns=[*own["strategies"], "tied", "not solved"],
            names=("mode path forced", "trace written"),
            most=1.0,
        )
        if own["mixed"]:
            _draw_mixtures(own["mixed"], folder / f"mixed-{run}.svg")


def word_numbers(numbers: Numbers) -> str:
    """The section: per run what was written when told, untold and forced, the matrix, the paths, the mixtures."""
    parts = []
    for run, own in numbers.items():
        parts.append(
            f"**{run}.** `{own['puzzle']}`: {own['kept']} puzzles under each strategy. Of {own['drawn']} drawn, "
            f"{own['trained_on']} were trained on, and on {own['alike']} two strategies write the same: these are out."
        )
        if "forced" in own:
            parts += [_summary(own), _matrix(own), f"![Forced against produced](confusion-{run}.svg)"]
        parts.append(_paths(own))
        if own.get("mixed"):
            parts += [_mixtures(own["mixed"]), f"![Mixtures of two paths](mixed-{run}.svg)"]
    return "\n\n".join(parts)


def _outcomes_of(counts: Mapping[str, Any], place: int) -> list[int]:
    """What came out for a strategy that was asked for: each one's, tied, unsolved."""
    return [*counts["matrix"][place], counts["tied"][place], counts["unsolved"][place]]


def _summary(own: Numbers) -> str:
    """A line for each condition, in shares of all puzzles under all strategies."""
    conditions = {"told the strategy": own["told"], "told nothing, nothing forced": own["untold"]}
    conditions |= {
        f"told nothing, mode path forced, weight {_WEIGHTS[weight]}": counts for weight, counts in own["forced"].items()
    }
    rows = []
    for label, counts in conditions.items():
        total = sum(counts["asked"])
        diagonal = counts["diagonal"]
        shares = [f"{sum(counts[key]) / total:.1%}" for key in ("exact", "solved")]
        rows.append([label, *shares, f"{sum(diagonal) / len(diagonal):.1%}", f"{min(diagonal):.1%}"])
    heads = ["condition", "the asked trace, to the word", "solved", "asked strategy, mean", "lowest"]
    return markdown_table(heads, rows)


def _matrix(own: Numbers) -> str:
    """Forced against produced, in numbers of puzzles, and the shares of each strategy's own."""
    forced, told, names = own["forced"][_SHOWN], own["told"], own["strategies"]
    rows = []
    for place, name in enumerate(names):
        shares = [
            forced["diagonal"][place],
            *(counts["exact"][place] / counts["asked"][place] for counts in (forced, told)),
        ]
        rows.append([name, *_outcomes_of(forced, place), *(f"{share:.1%}" for share in shares)])
    heads = ["forced (down), written (across)", *names, "tied", "not solved", "own", "own, to the word"]
    return markdown_table([*heads, "own, to the word, when told"], rows)


def _paths(own: Numbers) -> str:
    rows = [
        [name, " ".join(map(str, mode["blocks"])), " ".join(f"{p:.2f}" for p in mode["probabilities"])]
        for name, mode in own["mode_paths"].items()
    ]
    return markdown_table(["strategy", "mode path, block by depth", "mean probability of each"], rows)


def _mixtures(mixed: Sequence[Numbers]) -> str:
    """By where the paths are joined, what came out."""
    rows = [
        [cut, *(f"{share:.1%}" for share in shares.values()), number]
        for cut, (shares, number) in _by_cut(mixed).items()
    ]
    heads = ["depths of the first path", *(label for label, _ in _OUTCOMES.values()), "texts"]
    return markdown_table(heads, rows)


def _by_cut(mixed: Sequence[Numbers]) -> dict[int, tuple[dict[str, float], int]]:
    """Per number of depths from the first path: the share of each outcome, and the number of texts."""
    counts: dict[int, Counter[str]] = {}
    for one in mixed:
        role = {one["front"]: "front", one["back"]: "back", ANOTHER: ANOTHER, UNSOLVED: UNSOLVED}
        own = counts.setdefault(one["cut"], Counter())
        for produced, number in one["produced"].items():
            own[role.get(produced, "other")] += number
    return {
        cut: ({key: own[key] / own.total() for key in _OUTCOMES}, own.total()) for cut, own in sorted(counts.items())
    }


def _draw_mixtures(mixed: Sequence[Numbers], file: Path) -> None:
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = clean_axes(figure.subplots())
    by_cut = _by_cut(mixed)
    below = np.zeros(len(by_cut))
    for key, (label, color) in _OUTCOMES.items():
        shares = np.array([shares[key] for shares, _ in by_cut.values()])
        axes.bar(list(by_cut), shares, bottom=below, label=label, color=color, width=0.7)
        below += shares
    axes.set_xlabel("depths taken from the first strategy's mode path; the rest from another's", fontsize=8)
    axes.set_ylabel("share of texts", fontsize=8)
    axes.set_xticks(list(by_cut))
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, file)
