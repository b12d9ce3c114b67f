"""Sudokus with one solution: drawn, and moved about by the symmetries of the grid.

A drawn puzzle is a random solved grid from which cells were cleared, in random order, as long as one solution is left.
That takes tens of solver calls, so each drawn puzzle is handed out in several images: a grid stays a sudoku, and its
number of solutions the same, when digits are renamed, bands and the rows inside a band are permuted, stacks and columns
likewise, and, where boxes are square, when it is mirrored on its diagonal.
"""

from dataclasses import dataclass
from random import Random

from lol.errors import UserError
from lol.experiments.sudoku.board import Grid, Shape, solve

# Random grids that may fail to come down to the wanted givens before the wish counts as one that cannot be had.
_ATTEMPTS = 50


@dataclass(frozen=True)
class Sudoku:
    """A puzzle and its only solution."""

    puzzle: Grid
    solution: Grid


def draw(shape: Shape, givens: int, random: Random) -> Sudoku:
    """A puzzle with one solution and exactly so many givens.

    Not uniform over such puzzles: a grid with few puzzles of so few givens is drawn as often as one with many.

    Raises:
        UserError: no puzzle with so few givens was found.
    """
    for _ in range(_ATTEMPTS):
        (solution,) = solve(shape, (0,) * shape.num_cells, limit=1, random=random)
        puzzle = _clear(shape, solution, givens, random)
        if puzzle is not None:
            return Sudoku(puzzle, solution)
    raise UserError(f"no puzzle with {givens} givens in {_ATTEMPTS} grids: ask for more givens")


def image(shape: Shape, sudoku: Sudoku, random: Random) -> Sudoku:
    """The puzzle under a random symmetry of the grid."""
    rows = _shuffled_lines(shape.size, shape.box_height, random)
    columns = _shuffled_lines(shape.size, shape.box_width, random)
    order = [shape.rows[row][column] for row in rows for column in columns]
    if shape.box_height == shape.box_width and random.random() < 0.5:
        order = [order[cell] for column in shape.columns for cell in column]
    names = [0, *random.sample(range(1, shape.size + 1), shape.size)]
    puzzle, solution = (tuple(names[grid[cell]] for cell in order) for grid in (sudoku.puzzle, sudoku.solution))
    return Sudoku(puzzle, solution)


def _clear(shape: Shape, solution: Grid, givens: int, random: Random) -> Grid | None:
    """Clears cells in random order where the solution stays the only one, or None if too many givens are left."""
    puzzle, left = list(solution), shape.num_cells
    for cell in random.sample(range(shape.num_cells), shape.num_cells):
        if left == givens:
            break
        puzzle[cell] = 0
        if len(solve(shape, tuple(puzzle))) == 1:
            left -= 1
        else:
            puzzle[cell] = solution[cell]
    return tuple(puzzle) if left == givens else None


def _shuffled_lines(size: int, band: int, random: Random) -> list[int]:
    """The lines 0..size-1, bands shuffled and the lines inside each."""
    starts = random.sample(range(0, size, band), size // band)
    return [start + line for start in starts for line in random.sample(range(band), band)]
