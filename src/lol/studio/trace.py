"""A text and the path that a model takes through it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lol.data.tokenizer import encode_prompt
from lol.decoding import Decoding, GivenPath, lay_path
from lol.decoding import Window as Begun
from lol.errors import UserError
from lol.model.base import check_ids
from lol.model.config import LoLConfig
from lol.paths.record import token_texts
from lol.studio.limits import MAX_TEXT_TOKENS
from lol.studio.models import Loaded


@dataclass(frozen=True)
class Source:
    """Where a router's input came from: the means of so many windows, tokens `start` to `end`, each counted once. For a
    first window: no window, but the first token's state and the depth vector, half each."""

    start: int
    end: int
    windows: int


@dataclass(frozen=True)
class Window:
    """A window of a text and the block that it runs."""

    depth: int
    window: int
    start: int
    end: int
    """The token behind its last."""
    expert: int
    weight: float
    forced: bool
    """Whether the block was asked for; else the router chose it, or the model's own path has it."""
    probabilities: list[float] | None
    """The router's, without balancing bias, whatever is forced; `None` where there is no router."""
    input: Source


@dataclass(frozen=True)
class TextToken:
    id: int
    text: str
    """Together they are the text; where tokens share a character, the last of them has it."""


@dataclass(frozen=True)
class Depth:
    shift: int
    windows: list[Window]


@dataclass(frozen=True)
class Trace:
    tokens: list[TextToken]
    depths: list[Depth]


def read_text(loaded: Loaded, text: str) -> list[int]:
    """The tokens of a text as the beginning of a document.

    Raises:
        UserError: there are none, or too many.
    """
    ids = encode_prompt(loaded.tokenizer, text)
    if not ids:
        raise UserError("the text is empty, and this model's documents have no token to begin with: type something")
    if len(ids) > MAX_TEXT_TOKENS:
        raise UserError(f"the text has {len(ids):,} tokens: this server reads at most {MAX_TEXT_TOKENS:,}")
    check_ids(torch.tensor(ids, dtype=torch.long), loaded.model.config.vocab_size)
    return ids


def trace(loaded: Loaded, text: str, path: GivenPath | None, path_weight: float | None) -> Iterator[Trace | None]:
    """The trace of a text, behind a `None` for each pass of the model, between which the work may be given up.

    Raises:
        UserError: a text or a path that the model cannot run.
    """
    ids = read_text(loaded, text)
    decoding = begin(loaded, path, path_weight)
    for _ in decoding.read(ids):
        yield None
    view = View(loaded.model.config, decoding.path, most=len(ids))
    config = loaded.model.config
    depths = [Depth(config.window_shift(depth), []) for depth in range(config.num_routed_depths)]
    for window in decoding.windows():
        depths[window.depth].windows.append(view.of(window))
    texts = token_texts(loaded.tokenizer, ids)
    yield Trace([TextToken(id_, part) for id_, part in zip(ids, texts, strict=True)], depths)


def begin(loaded: Loaded, path: GivenPath | None, path_weight: float | None, **rest: Any) -> Decoding:
    """A decoding whose windows tell probabilities. Where nothing is forced, no weight of it is asked for."""
    weight = None if path is None else path_weight
    return Decoding(loaded.model, path=path, path_weight=weight, with_probabilities=True, **rest)


class View:
    """Windows as they are shown."""

    def __init__(self, config: LoLConfig, path: GivenPath | None, most: int):
        """
        Args:
            config: The model's.
            path: The blocks that were asked for.
            most: Tokens that the text may have in the end: no window ends behind them.
        """
        self.path: Int[Tensor, "..."] | None = None if path is None else lay_path(path, config)
        self.most = most

    def of(self, window: Begun) -> Window:
        return Window(
            depth=window.depth,
            window=window.window,
            start=window.start,
            end=self.most if window.end is None else min(window.end, self.most),
            expert=window.expert,
            weight=window.weight,
            forced=self._is_forced(window),
            probabilities=None if window.probabilities is None else list(window.probabilities),
            input=Source(0, window.start, window.window) if window.window else Source(0, 1, 0),
        )

    def all_of(self, windows: Sequence[Begun]) -> list[Window]:
        return [self.of(window) for window in windows]

    def _is_forced(self, window: Begun) -> bool:
        if self.path is None:
            return False
        row = self.path[window.depth].reshape(-1)
        place = 0 if len(row) == 1 else window.window
        return place < len(row) and int(row[place]) >= 0
