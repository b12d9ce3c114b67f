"""Where windows lie, what reaches a token through them, and how many pairs of queries and keys that is."""

from dataclasses import dataclass
from itertools import accumulate

from lol.errors import UserError
from lol.model.cost import window_lengths


@dataclass(frozen=True)
class DepthLayout:
    shift: int
    windows: list[tuple[int, int]]
    """First token, and the token behind the last."""


@dataclass(frozen=True)
class Reach:
    start: int
    """The earliest token from which something can flow into the chosen one through attention of this depth and those
    behind it."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of a query and a key, summed over depths; counted as `lol.model.cost` does, masked ones included."""

    core: int
    full: int
    """Where every depth sees the whole text."""
    ratio: float
    """core / full."""


@dataclass(frozen=True)
class Layout:
    depths: list[DepthLayout]
    reach: list[Reach] | None
    """By depth; `None` where no token was chosen."""
    pairs: Pairs


def lay_out(num_tokens: int, window_size: int, window_stride: int, num_depths: int, token: int | None) -> Layout:
    """Lay the windows of a text at every depth.

    Raises:
        UserError: a stride larger than the window, or a token that is not in the text.
    """
    if window_stride > window_size:
        raise UserError(f"window_stride is {window_stride}: choose at most window_size, {window_size}")
    if token is not None and token >= num_tokens:
        raise UserError(f"token is {token}: the text has tokens 0 to {num_tokens - 1}")
    shifts = [depth * window_stride % window_size for depth in range(num_depths)]
    lengths = {shift: window_lengths(num_tokens, shift, window_size) for shift in set(shifts)}
    ends = {shift: list(accumulate(own)) for shift, own in lengths.items()}
    windows = {shift: list(zip([0, *own[:-1]], own, strict=True)) for shift, own in ends.items()}
    core = sum(length**2 for shift in shifts for length in lengths[shift])
    full = num_depths * num_tokens**2
    return Layout(
        depths=[DepthLayout(shift, windows[shift]) for shift in shifts],
        reach=None if token is None else _reach(token, shifts, window_size),
        pairs=Pairs(core, full, core / full),
    )


def _reach(token: int, shifts: list[int], window_size: int) -> list[Reach]:
    """Backwards: what a depth reaches begins where the window of the earliest token behind it does."""
    start, found = token, []
    for shift in reversed(shifts):
        start = max((start + shift) // window_size * window_size - shift, 0)
        found.append(Reach(start))
    return found[::-1]
