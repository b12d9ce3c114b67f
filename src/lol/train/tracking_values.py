"""What trackers are given of a record: numbers with names, and the load as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

_CELL = 16
"""Pixels of a block of a depth, to each side."""
_INK = np.array([66, 81, 194])
"""The first of the blocks' colours (paths/colors.py), which the picture of the load deepens to."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record as EVENT/FIELD, and the load as each block's share over all depths.

    Other lists are left out: what they hold has no name.
    """
    event = record.get("event", "train")
    found: dict[str, float] = {}
    for name, value in record.items():
        if name in ("load", "moe_load"):
            if event == "train":
                found |= _shares(name, value)
        elif name != "step":
            found |= _numbers(f"{event}/{name}", value)
    return found


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        parts = [_numbers(f"{name}/{key}", item) for key, item in value.items()]
        return {key: item for part in parts for key, item in part.items()}
    return {name: float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def _shares(name: str, load: Sequence[Sequence[int]]) -> dict[str, float]:
    total = np.array(load, dtype=np.int64).sum(0) if len(load) else np.zeros(0)
    kind, digits = ("block" if name == "load" else "expert"), len(str(max(len(total) - 1, 0)))
    whole = max(int(total.sum()), 1)
    return {f"{name}/{kind}_{block:0{digits}}": float(count / whole) for block, count in enumerate(total)}


def draw_load(load: Sequence[Sequence[int]]) -> UInt8[np.ndarray, "height width 3"] | None:
    """The load (depths, blocks) as a picture, a row per depth from the top: white never ran, full colour ran all.

    The colour deepens with the logarithm of 1 + share · blocks, so that an even share is well visible however many
    blocks there are. None for no depths.
    """
    counts = np.array(load, dtype=np.float64)
    if counts.size == 0:
        return None
    share = counts / counts.sum(1, keepdims=True).clip(min=1)
    depth = np.log1p(share * counts.shape[1]) / np.log1p(counts.shape[1])
    pixels = 255 + depth[..., None] * (_INK - 255)
    return np.kron(pixels.round().astype(np.uint8), np.ones((_CELL, _CELL, 1), dtype=np.uint8))
