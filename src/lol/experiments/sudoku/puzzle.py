"""Sudokus as a `Puzzle`: which are drawn, and the words of their five strategies.

Drawn are puzzles that every strategy's own rule solves, so that no trace of naked singles, say, ends in backtracking;
and whose five traces all fit into `longest_trace` words, which cuts off backtracking's longest searches. The choice
depends on all five strategies alike: which puzzles there are says nothing about the strategy that is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from lol.errors import UserError
from lol.experiments.strategies.puzzle import Verdict
from lol.experiments.sudoku.board import SHAPES, Grid, Shape
from lol.experiments.sudoku.generate import Sudoku, draw, image
from lol.experiments.sudoku.strategies import STRATEGIES, is_solved_by, solve_by
from lol.experiments.sudoku.trace import COLON, judge, puzzle_words, solution_words, step_words, vocabulary

# The fewest givens that a puzzle with one solution can have, by the size of the grid (found by others' full searches).
_FEWEST_GIVENS = {4: 4, 6: 8, 9: 17}
# Images of each drawn puzzle: drawing costs tens of times what an image does.
_IMAGES = 8
# Images without a single one that fits, after which no puzzle will.
_PATIENCE = 400


@dataclass(frozen=True)
class TracedSudoku:
    """A puzzle, its only solution, and what each strategy writes about it."""

    puzzle: Grid
    solution: Grid
    traces: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class SudokuPuzzle:
    """Sudokus of one shape with one number of givens.

    The defaults are the tiny run's: 17 words of puzzle and at most 72 of trace. (The article gives neither givens nor
    lengths: decided here.)

    Raises:
        UserError: there is no such shape, or it has no puzzles with so few givens or so short traces.
    """

    shape: str = "4x4"
    """4x4, 6x6 (boxes of 2 rows and 3 columns) or 9x9."""
    givens: int = 5
    """Cells that are given; fewer make backtracking longer and the strategies easier to tell apart."""
    longest_trace: int = 72
    """The most words of a trace; puzzles with a longer one under any strategy are not drawn."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UserError(f"there is no shape {self.shape!r}: choose one of {', '.join(SHAPES)}")
        fewest, cells = _FEWEST_GIVENS[self.grid.size], self.grid.num_cells
        if not fewest <= self.givens < cells:
            raise UserError(f"a {self.shape} puzzle has {fewest} to {cells - 1} givens, not {self.givens}")
        needed = 2 * (cells - self.givens) + 1 + cells
        if self.longest_trace < needed:
            raise UserError(
                f"every trace of {self.givens} givens has {needed} words or more: raise longest_trace to it"
            )

    @property
    def grid(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def name(self) -> str:
        return "sudoku"

    @property
    def strategies(self) -> tuple[str, ...]:
        return tuple(STRATEGIES)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return vocabulary(self.grid)

    @property
    def scored_after(self) -> str:
        return COLON

    def draw(self, generator: np.random.Generator, count: int) -> list[TracedSudoku]:
        """Eight images of each puzzle that is drawn, mixed.

        Raises:
            UserError: the settings leave hardly any puzzle.
        """
        random = Random(int(generator.integers(2**62)))
        found, failed = list[TracedSudoku](), 0
        while len(found) < count:
            drawn = draw(self.grid, self.givens, random)
            fitting = list[TracedSudoku]()
            if all(is_solved_by(strategy, self.grid, drawn.puzzle) for strategy in STRATEGIES):
                images = (image(self.grid, drawn, random) for _ in range(_IMAGES))
                fitting = [traced for sudoku in images if (traced := self._traced(sudoku))]
            failed = 0 if fitting else failed + _IMAGES
            if failed >= _PATIENCE:
                raise UserError("hardly any such puzzle is solved by all strategies: raise givens or longest_trace")
            found += fitting
        random.shuffle(found)
        return found[:count]

    def prompt(self, instance: TracedSudoku) -> list[str]:
        return puzzle_words(instance.puzzle)

    def trace(self, instance: TracedSudoku, strategy: str) -> list[str]:
        return list(instance.traces[strategy])

    def check(self, instance: TracedSudoku, trace: Sequence[str]) -> Verdict:
        """As `judge`."""
        return judge(self.grid, instance.puzzle, instance.solution, trace)

    def _traced(self, sudoku: Sudoku) -> TracedSudoku | None:
        """The puzzle with its traces, unless one is too long; backtracking, which fails most, is tried first."""
        traces = dict[str, tuple[str, ...]]()
        for strategy in reversed(STRATEGIES):
            words, end = list[str](), solution_words(sudoku.solution)
            for step in solve_by(strategy, self.grid, sudoku.puzzle):
                words += step_words(self.grid, step)
                if len(words) + len(end) > self.longest_trace:
                    return None
            traces[strategy] = (*words, *end)
        return TracedSudoku(sudoku.puzzle, sudoku.solution, traces)
