"""Mazes and the five ways through them, against networkx and by hand."""

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lol.errors import UserError
from lol.experiments.maze.puzzle import Maze, MazePuzzle
from lol.experiments.maze.solvers import SOLVERS
from model_cases import bounded

# a1 a2 a3      a1─a2 a3
# b1 b2 b3  as  │  │  │       from a1 to a3
# c1 c2 c3      b1 b2─b3
#               │     │
#               c1─c2 c3
BY_HAND = Maze(((1, 3), (4, 0), (5,), (0, 6), (1, 5), (2, 8, 4), (3, 7), (6,), (5,)), start=0, goal=2)


SIZES, SHARES, SEEDS = st.integers(2, 6), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 10**6)


def draw_one(size: int, extra_openings: float, seed: int) -> tuple[MazePuzzle, Maze]:
    puzzle = MazePuzzle(size, extra_openings)
    return puzzle, puzzle.draw(np.random.default_rng(seed), 1)[0]


def graph_of(maze: Maze) -> networkx.Graph:
    return networkx.Graph((cell, near) for cell, nears in enumerate(maze.grid) for near in nears)


@given(SIZES, SHARES, SEEDS)
@bounded(60)
def test_every_trace_is_legal_and_shortest_where_promised(size, share, seed):
    puzzle, maze = draw_one(size, share, seed)
    graph = graph_of(maze)
    assert networkx.is_connected(graph)
    assert len(graph) == puzzle.size**2
    if puzzle.extra_openings == 0:
        assert networkx.is_tree(graph)
    shortest = networkx.shortest_path_length(graph, maze.start, maze.goal)
    own_words = set(puzzle.vocabulary)
    assert len(own_words) == len(puzzle.vocabulary)
    for name in puzzle.strategies:
        trace = puzzle.trace(maze, name)
        verdict = puzzle.check(maze, trace)
        assert verdict.legal, (name, trace)
        assert verdict.solves, (name, trace)
        assert set(puzzle.prompt(maze) + trace) <= own_words
        assert puzzle.prompt(maze).index(puzzle.scored_after) == len(puzzle.prompt(maze)) - 1
        assert puzzle.scored_after not in trace
        assert len(trace) <= puzzle.longest_trace
        length = len(SOLVERS[name](maze.grid, maze.start, maze.goal)[1]) - 1
        # Filling dead ends takes no cell of any way without detours, so its way is a shortest one too.
        assert length == shortest or (name == "dfs" and length > shortest)


@given(SIZES, SHARES, SEEDS)
@bounded(60)
def test_each_strategy_visits_as_it_says(size, share, seed):
    _, maze = draw_one(size, share, seed)
    graph = graph_of(maze)
    start, goal = maze.start, maze.goal
    visited = {name: solve(maze.grid, start, goal)[0] for name, solve in SOLVERS.items()}

    away = networkx.single_source_shortest_path_length(graph, start)
    order = [away[cell] for cell in visited["bfs"]]
    assert order == sorted(order)
    assert {cell for cell in away if away[cell] < away[goal]} <= set(visited["bfs"])

    assert visited["dfs"] == depth_first_by_recursion(maze)

    estimate = {cell: away[cell] + abs(cell // size - goal // size) + abs(cell % size - goal % size) for cell in away}
    # Never beyond what is certain to be no further than the goal, and all that is nearer.
    assert all(estimate[cell] <= away[goal] for cell in visited["astar"])
    assert {cell for cell in away if estimate[cell] < away[goal]} <= set(visited["astar"])

    back = networkx.single_source_shortest_path_length(graph, goal)
    assert all(min(away[cell], back[cell]) <= (away[goal] + 1) // 2 for cell in visited["bidirectional"])
    assert visited["bidirectional"][0] == start
    assert len(set(visited["bidirectional"])) == len(visited["bidirectional"])

    left = graph.copy()
    while dead := [cell for cell in left if left.degree(cell) <= 1 and cell not in (start, goal)]:
        left.remove_nodes_from(dead)
    assert set(visited["deadend"]) == set(graph) - set(left)


def depth_first_by_recursion(maze: Maze) -> list[int]:
    seen: list[int] = []

    def enter(cell: int) -> bool:
        seen.append(cell)
        return cell == maze.goal or any(near not in seen and enter(near) for near in maze.grid[cell])

    enter(maze.start)
    return seen


def test_the_five_traces_of_one_maze_by_hand():
    puzzle = MazePuzzle(3)
    assert puzzle.prompt(BY_HAND) == ["ES", "SW", "S", "NS", "NE", "NSW", "NE", "W", "N", "a1", "a3", ":"]
    assert {name: " ".join(puzzle.trace(BY_HAND, name)) for name in puzzle.strategies} == {
        "bfs": "a1 a2 b1 b2 c1 b3 c2 a3 path a1 a2 b2 b3 a3",
        "dfs": "a1 a2 b2 b3 a3 path a1 a2 b2 b3 a3",
        "astar": "a1 a2 b2 b3 a3 path a1 a2 b2 b3 a3",
        "bidirectional": "a1 a3 a2 b1 b3 path a1 a2 b2 b3 a3",
        "deadend": "c2 c1 b1 c3 path a1 a2 b2 b3 a3",
    }


@pytest.mark.parametrize(
    ("trace", "legal", "solves"),
    [
        ("path a1 a2 b2 b3 a3", True, True),
        ("a1 a2 path a1 a2 b2", True, False),
        ("a1 a2 a1 path a1 a2 b2 b3 a3", False, False),  # visited twice
        ("a1 a2 a1 a2 b2 b3 a3", False, False),  # no way
        ("a1 path path a1 a2 b2 b3 a3", False, False),
        ("a1 path a1 a2 a3", False, False),  # through a wall
        ("a1 path a2 b2 b3 a3", False, False),  # not from the start
        ("a1 path a1 a2 b2 b3 c3 b3 a3", False, False),  # back over the same cell
        ("a1 : path a1 a2 b2 b3 a3", False, False),
        ("a1 path", False, False),
        ("", False, False),
    ],
)
def test_traces_that_a_model_may_write(trace, legal, solves):
    verdict = MazePuzzle(3).check(BY_HAND, trace.split())
    assert (verdict.legal, verdict.solves) == (legal, solves)


def test_mazes_are_a_function_of_the_generator_and_differ():
    puzzle = MazePuzzle(4)
    one, again = (puzzle.draw(np.random.default_rng([3, 1]), 200) for _ in range(2))
    assert one == again
    assert len({tuple(puzzle.prompt(maze)) for maze in one}) > 195
    openings = [sum(map(len, maze.grid)) // 2 for maze in one]
    # 15 of the tree, and of the 9 other walls 0.15 on average.
    assert 15 + 0.7 < np.mean(openings) < 15 + 2.0


@pytest.mark.parametrize(("size", "share"), [(1, 0.1), (27, 0.1), (4, 1.1), (4, -0.1)])
def test_mazes_that_cannot_be(size, share):
    with pytest.raises(UserError, match=r"maze has 2 to 26 cells|from 0 to 1"):
        MazePuzzle(size, share)
