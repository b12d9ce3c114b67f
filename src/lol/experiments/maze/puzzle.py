"""Mazes on a square grid: how they are drawn, written in words, and judged.

A maze is a spanning tree of the grid's cells, with some of the walls that it leaves opened, so that there may be
several ways. In words, a 2 × 2 maze from its first cell to its last, searched breadth first:

    ES SW N N a1 b2 :  a1 a2 b1 b2 path a1 a2 b2

First each cell in reading order by the sides on which it is open (N, E, S, W), then start, goal and a colon; then the
trace: the cells in the order in which the strategy visits them, the word `path`, and the way from start to goal.
(Decided here: the article says that the strategies share one syntax and differ in the order of the visits.)
"""

import functools
import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lol.errors import UserError
from lol.experiments.maze.solvers import SOLVERS, Grid
from lol.experiments.strategies.puzzle import Verdict

PATH, COLON = "path", ":"
_SIDES = "NESW"


@dataclass(frozen=True)
class Maze:
    """A maze with a start and a goal; cells are numbered in reading order."""

    grid: Grid
    start: int
    goal: int


@dataclass(frozen=True)
class MazePuzzle:
    """Mazes of `size` × `size` cells, as a `Puzzle`.

    Raises:
        UserError: a size without a way or without names for its rows, or a share that is none.
    """

    size: int = 4
    extra_openings: float = 0.15
    """Share of the walls left by the tree that are opened, on average."""

    def __post_init__(self) -> None:
        if not 2 <= self.size <= len(string.ascii_lowercase):
            raise UserError(f"a maze has 2 to {len(string.ascii_lowercase)} cells a side, not {self.size}")
        if not 0 <= self.extra_openings <= 1:
            raise UserError(f"the share of extra openings is from 0 to 1, not {self.extra_openings}")

    @property
    def name(self) -> str:
        return "maze"

    @property
    def strategies(self) -> tuple[str, ...]:
        return tuple(SOLVERS)

    @functools.cached_property
    def cells(self) -> tuple[str, ...]:
        """The cells' names in reading order: the row's letter and the column's number."""
        rows = string.ascii_lowercase[: self.size]
        return tuple(f"{row}{column + 1}" for row in rows for column in range(self.size))

    @property
    def vocabulary(self) -> tuple[str, ...]:
        sides = range(1, len(_SIDES) + 1)
        openings = ["".join(some) for number in sides for some in itertools.combinations(_SIDES, number)]
        return (*openings, *self.cells, COLON, PATH)

    @property
    def scored_after(self) -> str:
        return COLON

    @property
    def longest_trace(self) -> int:
        return 2 * self.size**2 + 1

    def draw(self, generator: np.random.Generator, count: int) -> list[Maze]:
        """Each tree is the lightest one under random weights, so all trees may come, though not equally often."""
        walls = np.array(self._walls)
        orders = generator.random((count, len(walls))).argsort(1).tolist()
        opened = (generator.random((count, len(walls))) < self.extra_openings).tolist()
        starts = generator.integers(self.size**2, size=count)
        goals = (starts + generator.integers(1, self.size**2, size=count)) % self.size**2
        ends = zip(starts.tolist(), goals.tolist(), strict=True)
        return [
            Maze(self._carve(order, extra), start, goal)
            for order, extra, (start, goal) in zip(orders, opened, ends, strict=True)
        ]

    def prompt(self, instance: Maze) -> list[str]:
        size = self.size
        side_of = {-size: "N", 1: "E", size: "S", -1: "W"}
        openings = ["".join(side_of[near - cell] for near in nears) for cell, nears in enumerate(instance.grid)]
        return [*openings, self.cells[instance.start], self.cells[instance.goal], COLON]

    def trace(self, instance: Maze, strategy: str) -> list[str]:
        visited, way = SOLVERS[strategy](instance.grid, instance.start, instance.goal)
        return [*(self.cells[cell] for cell in visited), PATH, *(self.cells[cell] for cell in way)]

    def check(self, instance: Maze, trace: Sequence[str]) -> Verdict:
        """Legal: cells, none twice; `path`; cells that begin at the start, each open to the one before, none twice.
        Solved: the last one is the goal."""
        if list(trace).count(PATH) != 1:
            return Verdict(False, False)
        middle = list(trace).index(PATH)
        visited, way = trace[:middle], trace[middle + 1 :]
        number = {name: cell for cell, name in enumerate(self.cells)}
        legal = (
            all(word in number for word in (*visited, *way))
            and len(set(visited)) == len(visited)
            and len(set(way)) == len(way)
            and list(way[:1]) == [self.cells[instance.start]]
            and all(number[there] in instance.grid[number[here]] for here, there in itertools.pairwise(way))
        )
        return Verdict(legal, legal and way[-1] == self.cells[instance.goal])

    @functools.cached_property
    def _walls(self) -> list[tuple[int, int]]:
        """The pairs of cells that lie side by side."""
        size = self.size
        across = [(cell, cell + 1) for cell in range(size**2) if (cell + 1) % size]
        return across + [(cell, cell + size) for cell in range(size**2 - size)]

    def _carve(self, order: Sequence[int], extra: Sequence[bool]) -> Grid:
        """Open walls in this order wherever they part cells that are not connected yet, and the `extra` ones."""
        nears: list[list[int]] = [[] for _ in range(self.size**2)]
        group = list(range(self.size**2))

        def find(cell: int) -> int:
            while group[cell] != cell:
                group[cell] = cell = group[group[cell]]
            return cell

        for wall in order:
            one, other = self._walls[wall]
            root, other_root = find(one), find(other)
            if root != other_root:
                group[root] = other_root
            if root != other_root or extra[wall]:
                nears[one].append(other)
                nears[other].append(one)
        size = self.size
        rank = {-size: 0, 1: 1, size: 2, -1: 3}
        return tuple(tuple(sorted(near, key=lambda n, c=cell: rank[n - c])) for cell, near in enumerate(nears))
