"""What a puzzle must offer so that a model can learn several ways of solving it.

A solved puzzle is one document: the words of the prompt, then those of the trace, all words of `vocabulary`, joined by
spaces. The end of the trace is the end of the document (EOS); no word stands for it. The strategy's name is the text
that the router alone reads: it is in no prompt and in no trace, and all strategies write in one syntax.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Verdict:
    """What a trace is worth, whichever strategy it may follow."""

    legal: bool
    """It keeps to the syntax that all strategies share, and to the puzzle's rules."""
    solves: bool
    """It is legal and ends in a solution."""


@runtime_checkable
class Puzzle(Protocol):
    """A kind of puzzle at one size, and its strategies. What `draw` returns, an instance, only it reads."""

    @property
    def name(self) -> str:
        """Of the experiment, such as `maze`."""
        ...

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the strategies, single words that are not in `vocabulary`, in the order of tables."""
        ...

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word that a prompt or a trace may hold."""
        ...

    @property
    def scored_after(self) -> str:
        """The word that ends every prompt and stands nowhere else: only what follows it is learned."""
        ...

    @property
    def longest_trace(self) -> int:
        """The most words that any trace of a strategy has; decoding stops a little behind it."""
        ...

    def draw(self, generator: np.random.Generator, count: int) -> Sequence[Any]:
        """So many instances, a function of the generator's state. They need not be different ones."""
        ...

    def prompt(self, instance: Any) -> list[str]:
        """The words that state the puzzle. Of equal instances only they are equal, and all are equally long."""
        ...

    def trace(self, instance: Any, strategy: str) -> list[str]:
        """The words that this strategy writes: what it does step by step, and the solution."""
        ...

    def check(self, instance: Any, trace: Sequence[str]) -> Verdict:
        """Judge the words that a model wrote; they may be any, and any number."""
        ...


def distinct(traces: Sequence[Sequence[str]]) -> bool:
    """Whether no two strategies give the same trace, so that a trace says whose it is."""
    return len({tuple(trace) for trace in traces}) == len(traces)
