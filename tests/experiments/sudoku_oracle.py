"""Sudoku the slow way: the rules by arithmetic, solutions by a SAT solver, the five strategies with sets, literally."""

from collections.abc import Iterator

from pysat.card import CardEnc, EncType
from pysat.solvers import Minisat22

Puzzle = tuple[int, ...]
Found = tuple[str, int, int]


def units(height: int, width: int) -> list[list[int]]:
    """Rows, columns, boxes in reading order, from the coordinates of the cells."""
    n = height * width
    cells = range(n * n)
    rows = [[cell for cell in cells if cell // n == row] for row in range(n)]
    columns = [[cell for cell in cells if cell % n == column] for column in range(n)]
    corners = [(top, left) for top in range(n // height) for left in range(n // width)]
    boxes = [[c for c in cells if (c // n // height, c % n // width) == corner] for corner in corners]
    return rows + columns + boxes


def sat_solutions(height: int, width: int, puzzle: Puzzle, limit: int) -> set[Puzzle]:
    """Up to `limit` solutions; variable cell · n + digit says that the cell holds the digit."""
    n = height * width
    cells = range(n * n)
    ones = [[cell * n + digit for digit in range(1, n + 1)] for cell in cells]
    ones += [[cell * n + digit for cell in unit] for unit in units(height, width) for digit in range(1, n + 1)]
    with Minisat22([[cell * n + digit] for cell, digit in enumerate(puzzle) if digit]) as solver:
        for literals in ones:
            solver.append_formula(CardEnc.equals(literals, encoding=EncType.pairwise))
        found: set[Puzzle] = set()
        while len(found) < limit and solver.solve():
            true = [literal for literal in solver.get_model() or [] if 0 < literal <= n**3]
            found.add(tuple((literal - 1) % n + 1 for literal in true))
            solver.add_clause([-literal for literal in true])
        return found


class Literal:
    """A strategy as its description says it, with a set of digits for each empty cell."""

    def __init__(self, height: int, width: int, puzzle: Puzzle):
        self.n = height * width
        self.units = units(height, width)
        self.grid = list(puzzle)
        self.struck: set[tuple[int, int]] = set()

    def can(self, cell: int) -> set[int]:
        if self.grid[cell]:
            return set()
        seen = {self.grid[peer] for unit in self.units if cell in unit for peer in unit}
        return {d for d in range(1, self.n + 1) if d not in seen and (cell, d) not in self.struck}

    def naked_singles(self) -> list[Found]:
        for cell in range(self.n**2):
            if len(self.can(cell)) == 1:
                return [("place", cell, min(self.can(cell)))]
        return []

    def hidden_singles(self) -> list[Found]:
        for unit in self.units:
            for digit in range(1, self.n + 1):
                places = [cell for cell in unit if digit in self.can(cell)]
                if len(places) == 1:
                    return [("place", places[0], digit)]
        return []

    def locked_candidates(self) -> list[Found]:
        for box in self.units[2 * self.n :]:
            for line in self.units[: 2 * self.n]:
                if not set(box) & set(line):
                    continue
                for inside, outside in ((box, line), (line, box)):
                    for digit in range(1, self.n + 1):
                        here = [cell for cell in inside if digit in self.can(cell)]
                        rest = [c for c in outside if c not in inside and digit in self.can(c)]
                        if here and rest and set(here) <= set(outside):
                            return [("eliminate", cell, digit) for cell in rest]
        return self.naked_singles()

    def naked_pairs(self) -> list[Found]:
        for unit in self.units:
            for i, one in enumerate(unit):
                for other in unit[i + 1 :]:
                    pair = self.can(one)
                    if len(pair) == 2 and pair == self.can(other):
                        rest = [cell for cell in unit if cell not in (one, other)]
                        if found := [("eliminate", c, d) for c in rest for d in sorted(pair & self.can(c))]:
                            return found
        return self.naked_singles()

    def backtracking(self) -> list[Found]:
        return []

    def solve(self, strategy: str) -> list[Found]:
        steps: list[Found] = []
        while found := getattr(self, strategy.replace("-", "_"))():
            for action, cell, digit in found:
                if action == "place":
                    self.grid[cell] = digit
                else:
                    self.struck.add((cell, digit))
            steps += found
        return [*steps, *self.search()]

    def search(self) -> Iterator[Found]:
        """Ends as soon as the grid is full."""
        if 0 not in self.grid:
            return
        cell = self.grid.index(0)
        for digit in sorted(self.can(cell)):
            self.grid[cell] = digit
            yield "place", cell, digit
            yield from self.search()
            if 0 not in self.grid:
                return
            self.grid[cell] = 0
            yield "undo", cell, digit
