"""Five ways to solve a sudoku, from naked singles to backtracking, each writing down every step it takes.

The article names the two ends of the list; the three between them, and every order and tie below, are decided here.
Cells go in reading order, units as rows, columns, boxes, digits from small to large; the first that fits is taken, and
after every find the search for the next begins anew.

- **naked-singles**: put down the digit of the first cell that can hold only one.
- **hidden-singles**: put down the first digit that only one cell of a unit can hold.
- **locked-candidates**: where a digit of a box can only lie on one row or column of it, strike it out in the rest of
  that line; where a digit of a line can only lie in one box, strike it out in the rest of the box. Box by box, its rows
  and then its columns, the former rule first, one digit at a time. Where nothing can be struck out: a naked single.
- **naked-pairs**: where two cells of a unit can hold only the same two digits, strike these out in the rest of it.
  Where nothing can be struck out: a naked single.
- **backtracking**: into the first empty cell the smallest digit that no peer has; where there is none, take the latest
  digit back and try the next.

Locked candidates and naked pairs are tried before a single, not after it as a person would: a puzzle that singles solve
would otherwise have the same trace under three strategies. A strategy that is stuck goes on as backtracking does, among
the candidates that it has left.
"""

from collections.abc import Callable, Iterator
from itertools import combinations

from lol.errors import UserError
from lol.experiments.sudoku.board import Board, Grid, Shape, digits_of
from lol.experiments.sudoku.trace import Step


def solve_by(strategy: str, shape: Shape, puzzle: Grid) -> Iterator[Step]:
    """The strategy's steps up to the solution, one after the other; a function of strategy and puzzle alone.

    Raises:
        UserError: there is no such strategy, or the puzzle has no solution.
    """
    board = Board(shape, puzzle)
    yield from _deduce(strategy, board)
    yield from _backtrack(board)


def is_solved_by(strategy: str, shape: Shape, puzzle: Grid) -> bool:
    """Whether the strategy's own rule is enough, so that it never goes on as backtracking. The puzzle's images under
    symmetries of the grid have the same answer: what can be deduced does not depend on the order of the deductions."""
    board = Board(shape, puzzle)
    for _ in _deduce(strategy, board):
        pass
    return strategy == BACKTRACKING or board.is_full


def _deduce(strategy: str, board: Board) -> Iterator[Step]:
    """What the strategy's own rule finds, done on the board."""
    if strategy not in STRATEGIES:
        raise UserError(f"there is no strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}")
    while steps := STRATEGIES[strategy](board):
        for step in steps:
            (board.place if step.action == "place" else board.eliminate)(step.cell, step.digit)
            yield step


def _naked_single(board: Board) -> list[Step]:
    for cell, mask in enumerate(board.candidates):
        if mask and not mask & (mask - 1):
            return [Step("place", cell, mask.bit_length())]
    return []


def _hidden_single(board: Board) -> list[Step]:
    for unit in board.shape.units:
        once = more = 0
        for cell in unit:
            more |= once & board.candidates[cell]
            once |= board.candidates[cell]
        for digit in digits_of(once & ~more):
            bit = 1 << (digit - 1)
            return [Step("place", cell, digit) for cell in unit if board.candidates[cell] & bit]
    return []


def _locked_candidates(board: Board) -> list[Step]:
    candidates = board.candidates
    for shared, box_rest, line_rest in board.shape.crossings:
        here = in_box = in_line = 0
        for cell in shared:
            here |= candidates[cell]
        if not here:
            continue
        for cell in box_rest:
            in_box |= candidates[cell]
        for cell in line_rest:
            in_line |= candidates[cell]
        if struck := here & ~in_box & in_line:
            return _strike(board, line_rest, struck & -struck)
        if struck := here & ~in_line & in_box:
            return _strike(board, box_rest, struck & -struck)
    return _naked_single(board)


def _naked_pairs(board: Board) -> list[Step]:
    candidates = board.candidates
    twos = {cell for cell, mask in enumerate(candidates) if mask.bit_count() == 2}
    for unit in board.shape.units:
        for one, other in combinations([cell for cell in unit if cell in twos], 2):
            mask = candidates[one]
            if mask == candidates[other]:
                rest = tuple(cell for cell in unit if cell not in (one, other))
                if struck := _strike(board, rest, mask):
                    return struck
    return _naked_single(board)


BACKTRACKING = "backtracking"
STRATEGIES: dict[str, Callable[[Board], list[Step]]] = {
    "naked-singles": _naked_single,
    "hidden-singles": _hidden_single,
    "locked-candidates": _locked_candidates,
    "naked-pairs": _naked_pairs,
    BACKTRACKING: lambda _: [],
}
"""What each deduces next from a board: no steps where it is stuck."""


def _strike(board: Board, cells: tuple[int, ...], mask: int) -> list[Step]:
    """Strikes these digits out in the cells that have them: cell by cell, smallest digit first."""
    return [Step("eliminate", cell, digit) for cell in cells for digit in digits_of(board.candidates[cell] & mask)]


def _backtrack(board: Board) -> Iterator[Step]:
    """Fills the board, from what it has, by trial; every trial and every digit taken back is a step."""
    shape, digits = board.shape, board.digits
    cells = [cell for cell, digit in enumerate(digits) if not digit]
    untried, depth, arrived = [0] * len(cells), 0, True
    while depth < len(cells):
        cell = cells[depth]
        if arrived:
            untried[depth] = board.candidates[cell]
            for peer in shape.peers[cell]:
                if digits[peer]:
                    untried[depth] &= ~(1 << (digits[peer] - 1))
        arrived = untried[depth] != 0
        if arrived:
            lowest = untried[depth] & -untried[depth]
            untried[depth] ^= lowest
            digits[cell] = lowest.bit_length()
            yield Step("place", cell, digits[cell])
            depth += 1
        elif depth == 0:
            raise UserError("this puzzle has no solution")
        else:
            depth -= 1
            yield Step("undo", cells[depth], digits[cells[depth]])
            digits[cells[depth]] = 0
