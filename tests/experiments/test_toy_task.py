"""The toy's programs, the functions they compute, and the splits."""

import pytest
import torch

from lol import UserError
from lol.experiments.toy.task import ARTICLE, DISTINCT, PRIMITIVES, Task, split_programs

DIGITS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 9])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("inc", [1, 2, 3, 4, 5, 6, 7, 0]),
        ("rev", [9, 6, 5, 4, 3, 2, 1, 0]),
        ("rot", [1, 2, 3, 4, 5, 6, 9, 0]),
        ("mul3", [0, 3, 6, 9, 2, 5, 8, 7]),
        ("neg", [0, 9, 8, 7, 6, 5, 4, 1]),
        ("swap", [1, 0, 3, 2, 5, 4, 9, 6]),
        ("rot5", [1, 2, 3, 4, 0, 5, 6, 9]),
        ("ramp", [0, 2, 4, 6, 8, 0, 2, 6]),
        ("mul3left", [0, 3, 6, 9, 4, 5, 6, 9]),
    ],
)
def test_primitives(name: str, expected: list[int]):
    assert PRIMITIVES[name](DIGITS).tolist() == expected


def test_a_program_runs_its_primitives_in_order():
    task = Task()
    # inc, rot, mul3: (d + 1) rotated, times 3.
    assert task.run(DIGITS, (0, 2, 3)).tolist() == [6, 9, 2, 5, 8, 1, 0, 3]
    programs = torch.tensor([(0, 2, 3), (3, 3, 1)])
    each = task.run_each(DIGITS.expand(2, -1), programs)
    assert each.tolist() == [task.run(DIGITS, program).tolist() for program in [(0, 2, 3), (3, 3, 1)]]


@pytest.mark.parametrize(
    ("task", "programs", "functions"),
    [
        (Task(), 64, 30),
        (Task(steps=4), 256, 64),
        (Task((*ARTICLE, "neg", "swap")), 216, 72),
        (Task(DISTINCT), 64, 64),
        (Task(DISTINCT, steps=4), 256, 255),
    ],
)
def test_programs_compute_fewer_functions(task: Task, programs: int, functions: int):
    """The numbers were found by enumeration elsewhere too."""
    assert len(task.programs) == programs
    assert len(set(task.functions.values())) == functions
    assert task.is_distinct == (programs == functions)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", ["programs", "functions"])
def test_splits(kind: str, number: int):
    task = Task()
    split = split_programs(task, kind, number, 16)
    assert sorted(split.trained + split.held_out) == list(task.programs)
    assert len(split.held_out) == 16
    for step in range(3):
        assert {program[step] for program in split.trained} == {0, 1, 2, 3}
    known = {task.functions[program] for program in split.trained}
    repeats = sum(task.functions[program] in known for program in split.held_out)
    assert repeats == 0 if kind == "functions" else repeats > 8
    assert split == split_programs(task, kind, number, 16)
    assert split != split_programs(task, kind, number + 1, 16)


def test_mistakes_name_the_fix():
    with pytest.raises(UserError, match="hold out fewer"):
        split_programs(Task(), "programs", 0, 62)
    with pytest.raises(UserError, match="primitives of inc, rev"):
        Task(("inc", "dec"))
