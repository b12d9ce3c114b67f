"""What `metrics.jsonl` says of a run's losses, ready to be drawn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Points = list[tuple[float, float]]
"""(step, value)."""


@dataclass(frozen=True)
class Curves:
    """What `metrics.jsonl` says about the losses, in nats per token."""

    train: list[tuple[float, float]]
    """(step, loss)."""
    held_out: list[tuple[float, float]]
    depth: list[tuple[int, int]]
    """(step, depths that ran)."""
    unigram: float | None
    bigram: float | None


def read_curves(metrics: Sequence[Mapping[str, Any]]) -> Curves:
    """Read the events of a run; losses that are not finite are left out, as no axis can hold them."""
    train = [event for event in metrics if event.get("event") == "train"]
    summary = find_summary(metrics)
    return Curves(
        train=_losses(train),
        held_out=_losses([event for event in metrics if event.get("event") == "eval"]),
        depth=[(int(event["step"]), int(event["depth"])) for event in train if event.get("depth") is not None],
        unigram=summary.get("unigram_loss"),
        bigram=summary.get("bigram_loss"),
    )


def find_summary(metrics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last summary of a run, empty while it has none."""
    return next((event for event in reversed(metrics) if event.get("event") == "summary"), {})


def _losses(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return [(float(event["step"]), float(event["loss"])) for event in events if math.isfinite(event["loss"])]


def thin(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: the means of neighbours."""
    if not points:
        return []
    pieces = np.array_split(np.array(points, dtype=float), min(most, len(points)))
    return [(float(step), float(loss)) for step, loss in (piece.mean(0) for piece in pieces)]
