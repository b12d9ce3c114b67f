"""Five ways to search a maze: what each visits, in order, and the way that it finds.

A grid is each cell's open neighbours, in the order north, east, south, west: wherever a strategy has to choose and its
rule leaves the choice open, it takes them in this order. Start and goal differ and are connected.

| strategy | visits, in order | ends | its way |
|---|---|---|---|
| `bfs` | cells leaving the queue | at the goal | shortest |
| `dfs` | cells entered, the first open neighbour first | at the goal | its branch |
| `astar` | cells leaving the heap | at the goal | shortest |
| `bidirectional` | cells leaving either queue, a level from the start, one from the goal | where they meet | shortest |
| `deadend` | dead ends in reading order, each filled back to a crossing | when none is left | shortest of the rest |

A*'s heap is by least g + h, then least h, then first come, g being steps so far and h the Manhattan distance to go.
(The names are the article's; the rules are decided here.)
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence

Grid = Sequence[Sequence[int]]
Search = tuple[list[int], list[int]]
"""Cells visited, and the way from start to goal with both."""


def breadth_first(grid: Grid, start: int, goal: int) -> Search:
    """Level by level from the start."""
    visited, before = [], {start: start}
    waiting = deque([start])
    while waiting:
        cell = waiting.popleft()
        visited.append(cell)
        if cell == goal:
            break
        for near in grid[cell]:
            if near not in before:
                before[near] = cell
                waiting.append(near)
    return visited, _way(before, goal)


def depth_first(grid: Grid, start: int, goal: int) -> Search:
    """As far as it goes, then back to the last crossing."""
    visited, before = [], {}
    waiting = [(start, start)]
    while waiting:
        cell, came_from = waiting.pop()
        if cell in before:
            continue
        before[cell] = came_from
        visited.append(cell)
        if cell == goal:
            break
        waiting.extend((near, cell) for near in reversed(grid[cell]) if near not in before)
    return visited, _way(before, goal)


def a_star(grid: Grid, start: int, goal: int) -> Search:
    """The most promising cell first, by steps so far and the Manhattan distance to go, which is never too long and
    never falls by more than a step, so that a cell is done when it leaves the heap."""
    size = round(len(grid) ** 0.5)
    row, column = divmod(goal, size)
    far = [abs(cell // size - row) + abs(cell % size - column) for cell in range(len(grid))]
    visited, before, steps = [], {start: start}, {start: 0}
    heap, pushed = [(far[start], far[start], 0, start)], 0
    done = set()
    while heap:
        cell = heapq.heappop(heap)[-1]
        if cell in done:
            continue
        done.add(cell)
        visited.append(cell)
        if cell == goal:
            break
        for near in grid[cell]:
            if steps[cell] + 1 < steps.get(near, len(grid)):
                before[near], steps[near] = cell, steps[cell] + 1
                pushed += 1
                heapq.heappush(heap, (steps[near] + far[near], far[near], pushed, near))
    return visited, _way(before, goal)


def bidirectional(grid: Grid, start: int, goal: int) -> Search:
    """Breadth first from both ends, by turns a level each, until a cell is seen that the other side has seen. All
    but the last level are whole, so the two halves are a shortest way."""
    visited: list[int] = []
    before, behind = {start: start}, {goal: goal}
    own, other = (before, [start]), (behind, [goal])
    while True:
        (seen, level), (theirs, _) = own, other
        found: list[int] = []
        for cell in level:
            visited.append(cell)
            for near in grid[cell]:
                if near in seen:
                    continue
                seen[near] = cell
                if near in theirs:
                    return visited, _way(before, near) + _way(behind, near)[-2::-1]
                found.append(near)
        own, other = other, (seen, found)


def dead_end_filling(grid: Grid, start: int, goal: int) -> Search:
    """Fill what leads nowhere: from each dead end, in reading order, back until a crossing is left. Filling a cell can
    make a dead end of the next one only, so one pass finds all. Breadth first in what is left, which without loops is
    the way itself."""
    filled: list[int] = []
    left = [set(near) for near in grid]
    for first in range(len(grid)):
        cell = first
        while cell not in (start, goal) and len(left[cell]) == 1:
            filled.append(cell)
            (following,) = left[cell]
            left[cell].clear()
            left[following].discard(cell)
            cell = following
    rest = [[near for near in nears if near in left[cell]] for cell, nears in enumerate(grid)]
    return filled, breadth_first(rest, start, goal)[1]


SOLVERS: dict[str, Callable[[Grid, int, int], Search]] = {
    "bfs": breadth_first,
    "dfs": depth_first,
    "astar": a_star,
    "bidirectional": bidirectional,
    "deadend": dead_end_filling,
}


def _way(before: dict[int, int], end: int) -> list[int]:
    """The cells that led to `end`, the first being its own predecessor."""
    way = [end]
    while before[way[-1]] != way[-1]:
        way.append(before[way[-1]])
    return way[::-1]
