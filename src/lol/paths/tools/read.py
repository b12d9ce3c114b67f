"""`lol paths utilisation|map|probe|mode`: a model's paths through a user's documents as tables, numbers and figures."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lol.errors import UserError
from lol.model.lm import LoLForCausalLM
from lol.paths.features import bag_of_tokens, path_features
from lol.paths.figure import draw_blocks, draw_matrix
from lol.paths.mode import mode_paths_of
from lol.paths.probe import ProbeResult, Score, draw_probes, ridge_probe
from lol.paths.project import draw_projection, principal_components
from lol.paths.record import record_paths
from lol.paths.statistics import (
    block_agreement,
    draw_utilisation,
    label_distances,
    path_statistics,
    reused_share,
    utilisation,
)
from lol.paths.tools.data import PathFlags, Recorded, Results, open_data, print_table, record_documents
from lol.paths.tools.force import PathsForce, paths_force
from lol.train.loading import load_model

UNITS: tuple[Literal["window", "sequence"], ...] = ("window", "sequence")


@dataclass(frozen=True)
class PathsUtilisation(PathFlags):
    """How much each block runs at each depth, and how mixed and repetitive the paths are.

    Example: lol paths utilisation --model runs/demo --data my-text.txt --out paths
    """

    against: Path | None = None
    """A second model, of another seed say: how far do both route alike, once its blocks are matched to the first's?"""


@dataclass(frozen=True)
class PathsMap(PathFlags):
    """Draw the paths as points of a plane, coloured by label, and how far the labels' mean paths lie apart.

    Example: lol paths map --model runs/demo --data de.txt fr.txt tr.txt --out paths
    """

    kind: Literal["one-hot", "probability"] = "one-hot"
    """What a path is: the block that ran, or the router's probabilities."""
    unit: Literal["window", "sequence"] = "window"
    """A point per window, or per document."""


@dataclass(frozen=True)
class PathsProbe(PathFlags):
    """Can the label be read from the path? Ridge probes, beside shuffled labels and beside the tokens themselves.

    Example: lol paths probe --model runs/demo --data posts.jsonl --label-column label --out paths
    """

    folds: int = 5
    """Parts of the cross-validation; a document's windows, and equal documents, are never in two."""
    seeds: int = 3
    """Splits into folds, and shuffles of the labels."""


@dataclass(frozen=True)
class PathsMode(PathFlags):
    """The mode path of each label: at each depth, the block of the highest mean router probability.

    Example: lol paths mode --model runs/demo --data posts.jsonl --label-column label
    """


def paths_utilisation(command: PathsUtilisation) -> None:
    results = Results(command, ["utilisation.json", "utilisation.svg"])
    model, recorded = _record(command, labelled=False)
    num_experts = model.config.num_experts
    shares, statistics = utilisation(recorded.table, num_experts), path_statistics(recorded.table, num_experts)
    print_table(
        ["depth", *(f"block {block}" for block in range(num_experts)), "entropy"],
        [
            [str(depth), *(f"{share:.0%}" for share in row), f"{entropy:.2f}"]
            for depth, (row, entropy) in enumerate(zip(shares.tolist(), statistics.entropy, strict=True))
        ],
    )
    numbers: dict[str, Any] = {
        "documents": len(recorded.ids),
        "windows": len(recorded.table),
        "shares": shares.tolist(),
        "entropy_bits": list(statistics.entropy),
        "distinct_paths": statistics.num_paths,
        "reused_share": reused_share(statistics),
        "busiest_block": statistics.busiest_block,
        "busiest_share": statistics.busiest_share,
    }
    print(
        f"{statistics.num_paths} distinct paths; {numbers['reused_share']:.0%} of a path's steps run a block that it "
        f"ran before; block {statistics.busiest_block} runs {statistics.busiest_share:.0%} of all windows"
    )
    if command.against is not None:
        numbers["against"] = _compare(command.against, recorded)
    figure = results.file("utilisation.svg")
    if figure is not None:
        draw_utilisation(shares, figure)
    results.write("utilisation.json", numbers)


def paths_map(command: PathsMap) -> None:
    results = Results(command, ["map.json", "map.svg", "distances.svg"])
    _, recorded = _record(command)
    features, keys = path_features(recorded.table, command.kind, command.unit)
    labels = [recorded.labels[document] for document in keys["document"]]
    found = principal_components(features)
    names, distances = label_distances(recorded.table, recorded.labels)
    own = np.asarray(labels)
    rows = [
        [name, str((own == name).sum()), *(f"{x:.2f}" for x in [*found.points[own == name].mean(0), *far])]
        for name, far in zip(names, distances.tolist(), strict=True)
    ]
    print_table(["label", f"{command.unit}s", "mean 1", "mean 2", *(f"to {name}" for name in names)], rows)
    first, second = found.explained.tolist()
    print(f"the two components hold {first:.0%} and {second:.0%} of the variance of {len(features)} {command.unit}s")
    figure, matrix = results.file("map.svg"), results.file("distances.svg")
    if figure is not None and matrix is not None:
        draw_projection(found, labels, figure, f"{command.kind} paths, a point per {command.unit}")
        title = "distance of mean paths: 0 alike, 1 no block in common"
        draw_matrix(distances, matrix, rows=names, columns=names, names=("", ""), title=title, form="{:.2f}")
    numbers = {
        "kind": command.kind,
        "unit": command.unit,
        "explained": found.explained.tolist(),
        "labels": list(names),
        "distances": distances.tolist(),
        "points": [[*map(float, point), label] for point, label in zip(found.points.round(4), labels, strict=True)],
    }
    results.write("map.json", numbers)


def paths_probe(command: PathsProbe) -> None:
    if command.seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {command.seeds}")
    results = Results(command, ["probe.json", "probe.svg"])
    model, recorded = _record(command)
    probes: dict[str, dict[str, ProbeResult]] = {}
    for unit in UNITS:
        one_hot, keys = path_features(recorded.table, "one-hot", unit)
        tried = {
            "one-hot path": one_hot,
            "probabilities": path_features(recorded.table, "probability", unit).features,
            "tokens": bag_of_tokens(recorded.ids, keys, model.config.vocab_size),
        }
        if unit == "window":
            tried["tokens so far"] = bag_of_tokens(recorded.ids, keys, model.config.vocab_size, "before")
        labels = [recorded.labels[document] for document in keys["document"]]
        groups = [recorded.groups[document] for document in keys["document"]]
        probes[unit] = {
            name: ridge_probe(features, labels, groups=groups, folds=command.folds, seeds=range(command.seeds))
            for name, features in tried.items()
        }
    _print_probes(probes)
    figure = results.file("probe.svg")
    if figure is not None:
        flat = {f"{unit}: {name}": probe for unit, of_unit in probes.items() for name, probe in of_unit.items()}
        draw_probes(flat, figure)
    numbers = {unit: {name: asdict(probe) for name, probe in of_unit.items()} for unit, of_unit in probes.items()}
    results.write("probe.json", numbers)


def paths_mode(command: PathsMode) -> None:
    results = Results(command, ["mode.json", "mode.svg"])
    model, recorded = _record(command)
    modes = mode_paths_of(recorded.table, recorded.labels)
    depths = [f"depth {depth}" for depth in range(model.config.num_routed_depths)]
    rows = [
        [
            name,
            str(mode.num_examples),
            *(f"{b} ({p:.2f})" for b, p in zip(mode.blocks, mode.probabilities, strict=True)),
        ]
        for name, mode in modes.items()
    ]
    print_table(["label", "documents", *depths], rows)
    figure = results.file("mode.svg")
    if figure is not None:
        draw_blocks({name: mode.blocks for name, mode in modes.items()}, model.config.num_experts, figure)
    results.write("mode.json", {name: asdict(mode) for name, mode in modes.items()})


def _record(command: PathFlags, *, labelled: bool = True) -> tuple[LoLForCausalLM, Recorded]:
    model, tokenizer = load_model(command.model)
    return model, record_documents(command, model, tokenizer, open_data(command, model, labelled=labelled))


def _compare(folder: Path, recorded: Recorded) -> dict[str, Any]:
    """How far a second model routes the same tokens alike."""
    model, _ = load_model(folder)
    table = record_paths(model, recorded.ids, batch_size=16)
    agreement = block_agreement(recorded.table, table)
    print(
        f"{agreement.share:.0%} of the windows run the matching block of {folder} ({agreement.by_chance:.0%} by chance)"
    )
    return {"model": str(folder), **asdict(agreement)}


def _print_probes(probes: dict[str, dict[str, ProbeResult]]) -> None:
    print_table(
        ["probe", "accuracy", "95 %", "AUROC", "95 %", "shuffled AUROC"],
        [
            [
                f"{unit}: {name}",
                f"{probe.accuracy.mean:.3f}",
                _interval(probe.accuracy),
                f"{probe.auroc.mean:.3f}",
                _interval(probe.auroc),
                "" if probe.shuffled_auroc is None else f"{probe.shuffled_auroc.mean:.3f}",
            ]
            for unit, of_unit in probes.items()
            for name, probe in of_unit.items()
        ],
    )
    for unit, of_unit in probes.items():
        probe = next(iter(of_unit.values()))
        print(f"{unit}: {probe.num_rows} rows of {probe.num_groups} groups; the most common label: {probe.chance:.3f}")


def _interval(score: Score) -> str:
    return f"{score.low:.3f}-{score.high:.3f}"


TOOLS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "utilisation": (PathsUtilisation, paths_utilisation),
    "map": (PathsMap, paths_map),
    "probe": (PathsProbe, paths_probe),
    "mode": (PathsMode, paths_mode),
    "force": (PathsForce, paths_force),
}
