"""`write_report`: a run as one HTML file that needs nothing else, on a screen of any size, light or dark.

The page is complete without its script: text, colours and the choice of a depth are HTML and CSS. The script only fills
the panel that explains the window under the pointer. Whatever the corpus holds is escaped, and a content security
policy names the hash of the page's own script, so that no other could run and nothing can be fetched.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lol.errors import UserError
from lol.paths.colors import block_colors
from lol.paths.curves import find_summary
from lol.paths.record import PathStatistics, Stretch, path_statistics, stretches, utilisation
from lol.paths.svg import balance_svg, loss_svg

# Distinct paths that the key of the page lists; the rest is one line.
_LISTED_PATHS = 12


def write_report(
    path: str | Path,
    *,
    title: str,
    facts: Sequence[tuple[str, str]],
    metrics: Sequence[Mapping[str, Any]],
    table: pd.DataFrame,
    texts: Sequence[Sequence[str]],
    names: Sequence[str] | None = None,
    sample: str | None = None,
    prompt: str = "",
) -> None:
    """Write the report of a run as one self-contained HTML file.

    Args:
        path: The file to write; its folder must exist.
        title: The page's title.
        facts: What the header says of the run, as pairs of name and value.
        metrics: The events of `metrics.jsonl`: of "train" the step, loss, depth and load are drawn, of "eval" step and
            loss, of the last "summary" held_out_loss, unigram_loss and bigram_loss. May be empty.
        table: What `record_paths` returned for the documents shown.
        texts: Per document of the table, the text of each token (`token_texts`).
        names: A name per document. Default: its number.
        sample: Text that the model wrote, if any.
        prompt: What it was given, shown in front of the sample.

    Raises:
        UserError: texts or names that do not fit the table.
    """
    num_experts = len(table["probabilities"].iloc[0])
    names = [f"document {number}" for number in range(len(texts))] if names is None else names
    _check_documents(table, texts, names)
    statistics = path_statistics(table, num_experts)
    path_number = {taken: number for number, taken in enumerate(statistics.tokens_of_path)}
    pieces = {document: stretches(table, document) for document in range(len(texts))}
    folder = files("lol.paths")
    script = folder.joinpath("report.js").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(folder.joinpath("report.html.j2").read_text(encoding="utf-8")).render(
        title=title,
        facts=facts,
        score=_score(metrics),
        charts=[chart for width in (960, 350) if (chart := loss_svg(metrics, width, 320 if width > 500 else 260))],
        balance=balance_svg(metrics, 400, max(200, min(32 * len(statistics.entropy) + 60, 420))),
        bar_height=max(1, min(3, 16 // len(statistics.entropy))),
        heat=_heat(table, num_experts, statistics),
        statistics=statistics,
        num_tokens=sum(len(tokens) for tokens in texts),
        even_entropy=math.log2(num_experts),
        colors=block_colors(num_experts),
        paths=_list_paths(statistics),
        listed=_LISTED_PATHS,
        num_depths=len(statistics.entropy),
        documents=[
            _Document(name, len(tokens), [_show(piece, tokens, path_number) for piece in pieces[document]])
            for document, (name, tokens) in enumerate(zip(names, texts, strict=True))
        ],
        sample=sample,
        prompt=prompt,
        style=Markup(folder.joinpath("report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # Numbers only: nothing in it could end the script element.
        windows=Markup(json.dumps(_windows(table), separators=(",", ":"))),
    )
    target = Path(path)
    unfinished = target.with_name(target.name + ".part")
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, target)


def _check_documents(table: pd.DataFrame, texts: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    document, end = table["document"].to_numpy(), table["end"].to_numpy()
    lengths = [int(end[document == number].max()) for number in np.unique(document)]
    given = [len(tokens) for tokens in texts]
    if lengths != given:
        raise UserError(
            f"the table's documents have {lengths} tokens, the texts {given}: give the text of every token of every "
            "document (token_texts)"
        )
    if len(names) != len(texts):
        raise UserError(f"{len(names)} names for {len(texts)} documents: give one for each")


@dataclass(frozen=True)
class _Piece:
    """A stretch as the page shows it."""

    start: int
    tokens: Sequence[str]
    path_number: int
    lines: str


@dataclass(frozen=True)
class _Document:
    name: str
    num_tokens: int
    pieces: list[_Piece]


@dataclass(frozen=True)
class _Path:
    blocks: tuple[int, ...]
    share: float
    hue: float


@dataclass(frozen=True)
class _Score:
    """A loss of the header, with its bar's length in percent of the longest."""

    name: str
    loss: float
    length: float


def _show(piece: Stretch, tokens: Sequence[str], path_number: Mapping[tuple[int, ...], int]) -> _Piece:
    lines = " ".join(str(line) for line in piece.lines)
    return _Piece(piece.start, tokens[piece.start : piece.end], path_number[piece.path], lines)


def _score(metrics: Sequence[Mapping[str, Any]]) -> list[_Score]:
    summary = find_summary(metrics)
    fields = {"unigram": "unigram_loss", "bigram": "bigram_loss", "this model": "held_out_loss"}
    losses = {
        name: float(summary[field]) for name, field in fields.items() if math.isfinite(summary.get(field, math.inf))
    }
    longest = max(losses.values(), default=1)
    return [_Score(name, loss, 100 * loss / longest) for name, loss in losses.items()]


def _list_paths(statistics: PathStatistics) -> list[_Path]:
    total = sum(statistics.tokens_of_path.values())
    # Steps of the golden angle: neighbours in the list are far apart in hue however long it is.
    return [
        _Path(taken, tokens / total, 137.5 * number % 360)
        for number, (taken, tokens) in enumerate(statistics.tokens_of_path.items())
    ]


def _heat(table: pd.DataFrame, num_experts: int, statistics: PathStatistics) -> list[tuple[list[float], float, float]]:
    """Per depth: the share of each block, the entropy, the mean weight."""
    depth = table["depth"].to_numpy()
    weights = np.bincount(depth, table["weight"].to_numpy()) / np.bincount(depth)
    shares = np.round(utilisation(table, num_experts), 4).tolist()
    return list(zip(shares, statistics.entropy, weights.tolist(), strict=True))


def _windows(table: pd.DataFrame) -> list[list[Any]]:
    """Per line of the table: depth, window, start, end, block, weight, probabilities in thousandths."""
    places = table[["depth", "window", "start", "end", "expert"]].to_numpy().tolist()
    return [
        [*place, round(weight, 3), [round(1000 * probability) for probability in probabilities]]
        for place, weight, probabilities in zip(places, table["weight"].tolist(), table["probabilities"], strict=True)
    ]
