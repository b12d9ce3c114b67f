"""The one syntax in which every strategy writes how it solves a sudoku, and what makes a trace legal.

A step puts a digit into a cell, strikes a candidate out of it, or takes the latest digit back. In words, 4 × 4:

    4 . . 1 . . 3 . …  :  r1c2 3 x r2c4 2 r3c1 1 undo r3c1 1 …  = 4 3 2 1 …

First the cells in reading order and a colon; then the trace: the steps, the word `=`, and the solved grid. A digit that
is put down needs no mark. (Decided here: the article says of the mazes alone that all strategies share one syntax.)
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lol.experiments.strategies.puzzle import Verdict
from lol.experiments.sudoku.board import Grid, Shape

EMPTY, COLON, SOLVED = ".", ":", "="
MARKS = {"place": (), "eliminate": ("x",), "undo": ("undo",)}


class Step(NamedTuple):
    """What happens to a digit in a cell (numbered in reading order)."""

    action: Literal["place", "eliminate", "undo"]
    cell: int
    digit: int


def vocabulary(shape: Shape) -> tuple[str, ...]:
    """Every word of puzzles and traces of this shape: 25 for 4 × 4, 47 for 6 × 6, 95 for 9 × 9."""
    cells = (_cell_word(shape, cell) for cell in range(shape.num_cells))
    marks = (word for words in MARKS.values() for word in words)
    return (EMPTY, COLON, SOLVED, *marks, *map(str, range(1, shape.size + 1)), *cells)


def puzzle_words(puzzle: Grid) -> list[str]:
    """The givens in reading order, and the word behind which the trace begins."""
    return [*(str(digit) if digit else EMPTY for digit in puzzle), COLON]


def step_words(shape: Shape, step: Step) -> list[str]:
    """Mark, cell, digit; a digit that is put down has no mark."""
    return [*MARKS[step.action], _cell_word(shape, step.cell), str(step.digit)]


def solution_words(solution: Grid) -> list[str]:
    """How every trace ends."""
    return [SOLVED, *map(str, solution)]


def read_trace(shape: Shape, words: Sequence[str]) -> tuple[list[Step], Grid] | None:
    """The steps and the grid behind them, or None where the words do not keep to the syntax."""
    cells = {_cell_word(shape, cell): cell for cell in range(shape.num_cells)}
    digits = {str(digit): digit for digit in range(1, shape.size + 1)}
    if SOLVED not in words:
        return None
    end = list(words).index(SOLVED)
    steps, place = list[Step](), 0
    while place < end:
        action = "eliminate" if words[place] == "x" else "undo" if words[place] == "undo" else "place"
        place += len(MARKS[action])
        pair = words[place : min(place + 2, end)]
        if len(pair) < 2 or pair[0] not in cells or pair[1] not in digits:
            return None
        steps.append(Step(action, cells[pair[0]], digits[pair[1]]))
        place += 2
    grid = tuple(digits.get(word, 0) for word in words[end + 1 :])
    return (steps, grid) if len(grid) == shape.num_cells and 0 not in grid else None


def judge(shape: Shape, puzzle: Grid, solution: Grid, words: Sequence[str]) -> Verdict:
    """What a trace is worth by the rules, whatever strategy it follows.

    Legal: a digit goes into an empty cell that can hold it, so no peer has it and it was not struck out there; what is
    struck out could have been put there and is not the solution's digit; only the latest digit still on the board is
    taken back, and no given. Solves: legal, and the board after the last step and the grid behind it are the solution.

    Args:
        shape: Of the puzzle.
        puzzle: The givens.
        solution: The puzzle's only solution.
        words: Of the trace; they may be any, and any number.
    """
    trace = read_trace(shape, words)
    if trace is None:
        return Verdict(legal=False, solves=False)
    steps, grid = trace
    digits, placed, struck = list(puzzle), list[Step](), set[tuple[int, int]]()
    for step in steps:
        action, cell, digit = step
        if action == "undo":
            if not placed or placed.pop()[1:] != (cell, digit):
                return Verdict(legal=False, solves=False)
            digits[cell] = 0
            continue
        if digits[cell] or (cell, digit) in struck or any(digits[peer] == digit for peer in shape.peers[cell]):
            return Verdict(legal=False, solves=False)
        if action == "place":
            digits[cell] = digit
            placed.append(step)
        elif digit == solution[cell]:
            return Verdict(legal=False, solves=False)
        else:
            struck.add((cell, digit))
    return Verdict(legal=True, solves=tuple(digits) == solution == grid)


def _cell_word(shape: Shape, cell: int) -> str:
    return f"r{cell // shape.size + 1}c{cell % shape.size + 1}"
