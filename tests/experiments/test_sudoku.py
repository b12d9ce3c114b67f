"""Sudokus: the draw against a SAT solver, strategies against their descriptions, the judge against bad traces."""

from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sudoku_oracle import Literal, sat_solutions, units

from lol.errors import UserError
from lol.experiments.strategies.puzzle import Verdict, distinct
from lol.experiments.sudoku.board import SHAPES, Board, Shape, solve
from lol.experiments.sudoku.experiment import paper
from lol.experiments.sudoku.generate import draw, image
from lol.experiments.sudoku.puzzle import SudokuPuzzle
from lol.experiments.sudoku.strategies import STRATEGIES, is_solved_by, solve_by
from lol.experiments.sudoku.trace import judge, read_trace, solution_words, step_words

SIZES = [("4x4", 4), ("4x4", 5), ("6x6", 11), ("9x9", 34)]
PUZZLES = {"4x4": SudokuPuzzle(), "6x6": SudokuPuzzle("6x6", 12, 200), "9x9": paper().puzzle}
DRAWN = SudokuPuzzle().draw(np.random.default_rng(6), 8)


def box(shape: Shape) -> tuple[int, int]:
    return shape.box_height, shape.box_width


def written(shape: Shape, strategy: str, puzzle: tuple[int, ...], solution: tuple[int, ...]) -> list[str]:
    steps = solve_by(strategy, shape, puzzle)
    return [*(word for step in steps for word in step_words(shape, step)), *solution_words(solution)]


@pytest.mark.parametrize("name", SHAPES)
def test_units_and_crossings_are_those_of_the_coordinates(name: str):
    shape = SHAPES[name]
    assert [list(unit) for unit in shape.units] == units(*box(shape))
    for shared, box_rest, line_rest in shape.crossings:
        assert sorted(shared + box_rest) in [list(box) for box in shape.boxes]
        assert sorted(shared + line_rest) in [list(line) for line in shape.rows + shape.columns]
    assert len(shape.crossings) == shape.size * (shape.box_height + shape.box_width)


@pytest.mark.parametrize(("name", "givens"), SIZES)
def test_drawn_puzzles_and_their_images_have_one_solution(name: str, givens: int):
    shape, random = SHAPES[name], Random(1)
    for _ in range(4):
        drawn = draw(shape, givens, random)
        moved = image(shape, drawn, random)
        for sudoku in (drawn, moved):
            assert sum(digit > 0 for digit in sudoku.puzzle) == givens
            assert sat_solutions(*box(shape), sudoku.puzzle, 2) == {sudoku.solution}
        assert moved != drawn
        assert all(is_solved_by(s, shape, drawn.puzzle) == is_solved_by(s, shape, moved.puzzle) for s in STRATEGIES)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_solver_finds_what_sat_finds(data: st.DataObject):
    """All solutions, also where there are many or none."""
    shape = SHAPES[data.draw(st.sampled_from(["4x4", "6x6"]))]
    random = data.draw(st.randoms(use_true_random=False))
    (full,) = solve(shape, (0,) * shape.num_cells, limit=1, random=random)
    puzzle = [digit if data.draw(st.booleans()) else 0 for digit in full]
    cell = data.draw(st.integers(0, shape.num_cells - 1))
    if candidates := [d for d in range(1, shape.size + 1) if all(puzzle[p] != d for p in shape.peers[cell])]:
        puzzle[cell] = data.draw(st.sampled_from(candidates))
    found = solve(shape, tuple(puzzle), limit=300)
    assert len(set(found)) == len(found)
    if len(found) < 300:
        assert set(found) == sat_solutions(*box(shape), tuple(puzzle), 300)


@pytest.mark.parametrize(("name", "givens"), SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_trace_is_the_described_one_and_solves(name: str, givens: int, strategy: str):
    """Also where the strategy is stuck and goes on as backtracking."""
    shape, random = SHAPES[name], Random(2)
    for _ in range({"4x4": 18, "6x6": 3, "9x9": 1}[name]):
        sudoku = draw(shape, givens, random)
        words = written(shape, strategy, sudoku.puzzle, sudoku.solution)
        assert judge(shape, sudoku.puzzle, sudoku.solution, words) == Verdict(legal=True, solves=True)
        steps, grid = read_trace(shape, words) or ([], ())
        assert [tuple(step) for step in steps] == Literal(*box(shape), sudoku.puzzle).solve(strategy)
        assert grid == sudoku.solution


def test_the_five_traces_of_one_puzzle_by_hand():
    """How docs/experiments.md shows them: two cells of row 1 can hold only 1 and 2, and so on."""
    shape, puzzle = SHAPES["4x4"], (0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 4, 0, 4, 0, 0, 2)
    begins = {
        "naked-singles": "r3c4 1 r2c4 4 r3c1 2 r1c1 1 r1c3 2 r1c2 4 r2c2 2 r2c3 1 r3c2 3 r4c2 1 r4c3 3",
        "hidden-singles": "r1c2 4 r2c4 4 r3c2 3 r3c1 2 r1c3 2 r1c1 1 r2c3 1 r2c2 2 r3c4 1 r4c2 1 r4c3 3",
        "locked-candidates": "x r2c2 4 x r4c2 3 r3c4 1 x r1c2 1 x r2c2 1 x r1c3 1 r1c3 2 x r3c2 2 r1c1 1",
        "naked-pairs": "x r1c2 1 x r1c2 2 x r4c3 1 x r2c4 1 r1c2 4 r2c4 4 r3c4 1 r3c1 2 r1c1 1",
        "backtracking": "r1c1 1 r1c2 2 undo r1c2 2 r1c2 4 r1c3 2 r2c2 2 r2c3 1 r2c4 4 r3c1 2",
    }
    assert list(begins) == list(STRATEGIES) == list(SudokuPuzzle().strategies)
    for strategy, begin in begins.items():
        words = written(shape, strategy, puzzle, (1, 4, 2, 3, 3, 2, 1, 4, 2, 3, 4, 1, 4, 1, 3, 2))
        assert " ".join(words).startswith(begin)
        assert " ".join(words).endswith("= 1 4 2 3 3 2 1 4 2 3 4 1 4 1 3 2")


def test_a_strategy_that_is_stuck_goes_on_as_backtracking():
    """A known puzzle of 17 givens: of the deductions, hidden singles alone are enough."""
    shape = SHAPES["9x9"]
    text = "000000010400000000020000000000050407008000300001090000300400200050100000000806000"
    puzzle = tuple(int(digit) for digit in text)
    (solution,) = solve(shape, puzzle)
    assert sat_solutions(3, 3, puzzle, 2) == {solution}
    assert {s for s in STRATEGIES if is_solved_by(s, shape, puzzle)} == {"hidden-singles", "backtracking"}
    # The whole search takes very many steps.
    locked = list(islice(solve_by("locked-candidates", shape, puzzle), 200))
    assert {step.action for step in locked} == {"place", "eliminate", "undo"}
    assert "undo" not in {step.action for step in solve_by("hidden-singles", shape, puzzle)}


@pytest.mark.parametrize("name", PUZZLES)
def test_a_puzzle_keeps_the_promises_of_the_interface(name: str):
    puzzle = PUZZLES[name]
    drawn = puzzle.draw(np.random.default_rng(3), 4)
    words = set(puzzle.vocabulary)
    assert len(words) == len(puzzle.vocabulary)
    assert not words & set(puzzle.strategies)
    for instance in drawn:
        prompt = puzzle.prompt(instance)
        assert prompt.index(puzzle.scored_after) == len(prompt) - 1 == puzzle.grid.num_cells
        for strategy in puzzle.strategies:
            trace = puzzle.trace(instance, strategy)
            assert len(trace) <= puzzle.longest_trace
            assert words.issuperset(prompt + trace)
            assert puzzle.scored_after not in trace
            assert trace == written(puzzle.grid, strategy, instance.puzzle, instance.solution)
            assert puzzle.check(instance, trace) == Verdict(legal=True, solves=True)
            assert ("undo" in trace) <= (strategy == "backtracking")


def test_draws_are_a_function_of_the_generator():
    one, same, other = (SudokuPuzzle().draw(np.random.default_rng(seed), 10) for seed in (3, 3, 4))
    assert one == same
    assert one != other


def test_most_puzzles_tell_the_strategies_apart():
    """Of the tiny run's puzzles, 71 % of very many; images of one puzzle are alike in this, so 120 say little more."""
    drawn = SudokuPuzzle().draw(np.random.default_rng(5), 120)
    share = sum(distinct(list(instance.traces.values())) for instance in drawn) / len(drawn)
    assert share > 0.5
    assert len({instance.puzzle for instance in drawn}) > 115


def test_the_judge_tells_illegal_unsolved_and_solved():
    puzzle, instance = SudokuPuzzle(), DRAWN[0]
    shape, solution = puzzle.grid, instance.solution
    size, end = shape.size, solution_words(solution)
    free = [cell for cell, digit in enumerate(instance.puzzle) if not digit]
    fill = [f"r{cell // size + 1}c{cell % size + 1} {solution[cell]}" for cell in free]
    board = Board(shape, instance.puzzle)
    open_cell = next(cell for cell in free if board.candidates[cell].bit_count() > 1)
    name = f"r{open_cell // size + 1}c{open_cell % size + 1}"
    right, wrong = (
        solution[open_cell],
        next(d for d in range(1, size + 1) if d != solution[open_cell] and board.candidates[open_cell] >> (d - 1) & 1),
    )
    impossible = next(d for d in range(1, size + 1) if not board.candidates[open_cell] >> (d - 1) & 1)
    given_cell = next(cell for cell, digit in enumerate(instance.puzzle) if digit)
    given = f"r{given_cell // size + 1}c{given_cell % size + 1} {instance.puzzle[given_cell]}"
    illegal, unsolved, solved = (Verdict(*flags) for flags in ((False, False), (True, False), (True, True)))
    cases = {
        "": solved,
        f"x {name} {wrong}": solved,
        f"{name} {wrong} undo {name} {wrong}": solved,
        f"{name} {right} undo {name} {right} x {name} {wrong}": solved,
        f"{name} {impossible} undo {name} {impossible}": illegal,
        f"x {name} {impossible}": illegal,
        f"x {name} {right}": illegal,
        f"x {name} {wrong} {name} {wrong} undo {name} {wrong}": illegal,
        f"x {name} {wrong} x {name} {wrong}": illegal,
        f"undo {given}": illegal,
        f"{name} {wrong} undo {name} {right}": illegal,
        given: illegal,
        f"{name} {right}": illegal,  # twice, with what follows
        "x": illegal,
        name: illegal,
        f"x undo {name} {wrong}": illegal,
        "=": illegal,
        ".": illegal,
    }
    for steps, verdict in cases.items():
        assert puzzle.check(instance, [*steps.split(), *" ".join(fill).split(), *end]) == verdict, steps
    moves = " ".join(fill).split()
    assert puzzle.check(instance, [*moves[:-2], *end]) == unsolved
    other = [word if place else str(solution[0] % size + 1) for place, word in enumerate(end[1:])]
    assert puzzle.check(instance, [*moves, "=", *other]) == unsolved
    two_open = [*moves, "undo", *moves[-2:], "undo", *moves[-4:-2]]
    assert puzzle.check(instance, [*two_open, *end]) == unsolved
    wrong_order = [*moves, "undo", *moves[-4:-2]]
    for broken in (moves, [*moves, *end[:-1]], [*moves, *end, "1"], [*moves, "x", "="], wrong_order, ["x", "="], []):
        assert puzzle.check(instance, broken) == illegal


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_words_break_the_judge(data: st.DataObject):
    """Words of the vocabulary or none, in any number; a real trace with one word changed solves only if it says so."""
    puzzle = SudokuPuzzle()
    instance = data.draw(st.sampled_from(DRAWN))
    word = st.sampled_from((*puzzle.vocabulary, "bfs"))
    assert not puzzle.check(instance, data.draw(st.lists(word, max_size=30))).solves
    trace = puzzle.trace(instance, data.draw(st.sampled_from(puzzle.strategies)))
    place = data.draw(st.integers(0, len(trace) - 1))
    changed = [*trace[:place], data.draw(word), *trace[place + 1 :]]
    if puzzle.check(instance, changed).solves:
        assert changed[-16:] == trace[-16:]


def test_mistakes_name_the_fix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lol.experiments.sudoku.generate._ATTEMPTS", 5)
    monkeypatch.setattr("lol.experiments.sudoku.puzzle._PATIENCE", 40)
    with pytest.raises(UserError, match="choose one of 4x4, 6x6, 9x9"):
        SudokuPuzzle("5x5")
    with pytest.raises(UserError, match="has 17 to 80 givens, not 16"):
        SudokuPuzzle("9x9", givens=16)
    with pytest.raises(UserError, match="has 39 words or more"):
        SudokuPuzzle(longest_trace=38)
    with pytest.raises(UserError, match="raise givens or longest_trace"):
        SudokuPuzzle(longest_trace=39).draw(np.random.default_rng(0), 100)
    with pytest.raises(UserError, match="ask for more givens"):
        draw(SHAPES["4x4"], 3, Random(0))
    shape = SHAPES["4x4"]
    with pytest.raises(UserError, match="no solution"):
        list(solve_by("naked-singles", shape, (1, 2, 3, 0, *[0] * 3, 4, *[0] * 8)))
    with pytest.raises(UserError, match="twice"):
        list(solve_by("naked-singles", shape, (1, 1, *[0] * 14)))
    with pytest.raises(UserError, match="16 cells"):
        Board(shape, (1,) * 15)
    with pytest.raises(UserError, match="choose one of naked-singles"):
        list(solve_by("x-wing", shape, (0,) * 16))
