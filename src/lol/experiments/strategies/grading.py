"""What a written trace is worth, and whose it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lol.experiments.harness import Numbers
from lol.experiments.strategies.puzzle import Puzzle, Verdict
from lol.paths.force import attribute, confusion


@dataclass(frozen=True)
class Grade:
    """The judgement on one trace."""

    verdict: Verdict
    strategy: str | None
    """Whose trace it is, or is nearest to; `TIED` where two are equally near, `None` where the puzzle is not solved."""
    exact: bool
    """It is that strategy's trace to the word."""


def grade(puzzle: Puzzle, instance: Any, written: Sequence[str], own: Mapping[str, Sequence[str]]) -> Grade:
    """Judge a trace that a model wrote.

    Args:
        puzzle: What it was asked to solve, with
        instance: the instance of it.
        written: The words. More than any strategy needs are no trace: the model did not end.
        own: What each strategy writes, all different.
    """
    verdict = puzzle.check(instance, written) if len(written) <= puzzle.longest_trace else Verdict(False, False)
    if not verdict.solves:
        return Grade(verdict, None, False)
    found = attribute(written, own)
    return Grade(verdict, found.label, found.distance == 0)


def tally(asked: Sequence[str], grades: Sequence[Grade], strategies: Sequence[str]) -> Numbers:
    """Count grades by the strategy that was asked for.

    Returns:
        By name, a list with an entry for each strategy asked for: `asked`, how many; `legal`, `solved`, `exact`, how
        many of them; `matrix`, how many are whose; `tied` and `unsolved`, those that are nobody's; `diagonal`, the
        share of all that are the asked strategy's own, to the word or nearest.
    """
    matrix = confusion(asked, [one.strategy for one in grades], strategies)

    def count(holds: Sequence[bool]) -> list[int]:
        return [sum(h for h, own in zip(holds, asked, strict=True) if own == name) for name in strategies]

    return {
        "asked": list(matrix.totals),
        "legal": count([one.verdict.legal for one in grades]),
        "solved": count([one.verdict.solves for one in grades]),
        "exact": count([one.exact and one.strategy == own for one, own in zip(grades, asked, strict=True)]),
        "matrix": [list(row) for row in matrix.counts],
        "tied": list(matrix.tied),
        "unsolved": list(matrix.unattributed),
        "diagonal": list(matrix.diagonal),
    }
