"""Sudoku: the shape of a grid, a board with the digits that cells can still hold, and a solver.

Cells are numbered in reading order, digits are 1..n, 0 is an empty cell. A set of digits is a bit mask, digit d in bit
d - 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random

from lol.errors import UserError

Grid = tuple[int, ...]
"""The digit of each cell in reading order; 0 where it is empty."""


@dataclass(frozen=True)
class Shape:
    """A grid of n × n cells, n = box_height · box_width, in boxes of so many rows and columns."""

    box_height: int
    box_width: int

    @property
    def size(self) -> int:
        """n: digits, and cells of a row."""
        return self.box_height * self.box_width

    @property
    def num_cells(self) -> int:
        return self.size**2

    @property
    def all_digits(self) -> int:
        """The set of all digits."""
        return (1 << self.size) - 1

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The cells of each row."""
        return tuple(tuple(range(row * self.size, (row + 1) * self.size)) for row in range(self.size))

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The cells of each column."""
        return tuple(zip(*self.rows, strict=True))

    @cached_property
    def boxes(self) -> tuple[tuple[int, ...], ...]:
        """The cells of each box, boxes in reading order."""
        return tuple(
            tuple(
                self.rows[top + down][left + right]
                for down in range(self.box_height)
                for right in range(self.box_width)
            )
            for top in range(0, self.size, self.box_height)
            for left in range(0, self.size, self.box_width)
        )

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Rows, then columns, then boxes: cells that hold every digit once."""
        return self.rows + self.columns + self.boxes

    @cached_property
    def units_of(self) -> tuple[tuple[int, int, int], ...]:
        """The number of each cell's row, column and box among `units`."""
        indices = [[u for u, unit in enumerate(self.units) if cell in unit] for cell in range(self.num_cells)]
        return tuple((row, column, box) for row, column, box in indices)

    @cached_property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """The cells that share a unit with each cell, in reading order."""
        return tuple(
            tuple(sorted({peer for u in units for peer in self.units[u]} - {cell}))
            for cell, units in enumerate(self.units_of)
        )

    @cached_property
    def crossings(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """Box by box, its rows and then its columns: cells in both, the rest of the box, the rest of the line, each in
        reading order."""
        found = []
        for box in self.boxes:
            for line in (*self.rows, *self.columns):
                shared = tuple(cell for cell in box if cell in line)
                if shared:
                    rest = (tuple(cell for cell in cells if cell not in shared) for cells in (box, line))
                    found.append((shared, *rest))
        return tuple(found)


SHAPES = {"4x4": Shape(2, 2), "6x6": Shape(2, 3), "9x9": Shape(3, 3)}
"""Boxes of 2 × 2, of 2 rows × 3 columns, of 3 × 3."""


def digits_of(mask: int) -> Iterator[int]:
    """The digits of a set, smallest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length()
        mask ^= lowest


class Board:
    """A grid that is being solved: its digits, and what its empty cells can still hold."""

    def __init__(self, shape: Shape, grid: Grid):
        """
        Raises:
            UserError: the grid has another number of cells or a digit that is none, or a unit holds a digit twice.
        """
        if len(grid) != shape.num_cells or not all(0 <= digit <= shape.size for digit in grid):
            raise UserError(f"a grid of this shape has {shape.num_cells} cells of 0 (empty) to {shape.size}")
        self.shape = shape
        self.digits = [0] * shape.num_cells
        self.candidates = [shape.all_digits] * shape.num_cells
        """Of each empty cell: digits that no peer holds and nobody eliminated. Nothing at filled cells."""
        for cell, digit in enumerate(grid):
            if digit:
                if not self.candidates[cell] >> (digit - 1) & 1:
                    raise UserError(f"the digit {digit} stands twice in a row, column or box: give a legal puzzle")
                self.place(cell, digit)

    @property
    def is_full(self) -> bool:
        return 0 not in self.digits

    def place(self, cell: int, digit: int) -> None:
        self.digits[cell] = digit
        self.candidates[cell] = 0
        keep = ~(1 << (digit - 1))
        for peer in self.shape.peers[cell]:
            self.candidates[peer] &= keep

    def eliminate(self, cell: int, digit: int) -> None:
        self.candidates[cell] &= ~(1 << (digit - 1))


def solve(shape: Shape, grid: Grid, limit: int = 2, random: Random | None = None) -> list[Grid]:
    """The first `limit` solutions; with limit 2, one solution in the list means that it is the only one.

    Fills an empty cell with fewest candidates first, so that a puzzle with one solution takes few wrong turns. Digits
    are tried from small to large, or in random order.
    """
    used, cells, units_of = [0] * len(shape.units), list(grid), shape.units_of
    for cell, digit in enumerate(grid):
        if digit:
            for u in units_of[cell]:
                used[u] |= 1 << (digit - 1)
    empty = [cell for cell, digit in enumerate(grid) if not digit]
    found: list[Grid] = []

    def fill() -> None:
        fewest, chosen, chosen_mask = shape.size + 1, -1, 0
        for place, cell in enumerate(empty):
            row, column, box = units_of[cell]
            mask = shape_digits & ~(used[row] | used[column] | used[box])
            count = mask.bit_count()
            if count < fewest:
                fewest, chosen, chosen_mask = count, place, mask
                if count < 2:
                    break
        if chosen < 0:
            found.append(tuple(cells))
            return
        cell = empty[chosen]
        empty[chosen] = empty[-1]
        empty.pop()
        row, column, box = units_of[cell]
        digits = list(digits_of(chosen_mask))
        if random:
            random.shuffle(digits)
        for digit in digits:
            if len(found) == limit:
                break
            bit = 1 << (digit - 1)
            cells[cell] = digit
            used[row] |= bit
            used[column] |= bit
            used[box] |= bit
            fill()
            used[row] ^= bit
            used[column] ^= bit
            used[box] ^= bit
        cells[cell] = 0
        empty.append(cell)
        empty[chosen], empty[-1] = empty[-1], empty[chosen]

    shape_digits = shape.all_digits
    fill()
    return found
