"""The task: digits, primitives that change all of them, programs of primitives, and which programs are held out.

Letters: B examples, N digits, S steps of a program, P primitives.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from lol.errors import UserError

NUM_DIGITS = 8
BASE = 10

PRIMITIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "inc": lambda digits: (digits + 1) % BASE,
    "rev": lambda digits: digits.flip(-1),
    "rot": lambda digits: digits.roll(-1, -1),
    "mul3": lambda digits: digits * 3 % BASE,
    "neg": lambda digits: -digits % BASE,
    "swap": lambda digits: digits.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    "rot5": lambda digits: torch.cat([digits[..., :5].roll(-1, -1), digits[..., 5:]], -1),
    "ramp": lambda digits: (digits + torch.arange(NUM_DIGITS)) % BASE,
    "mul3left": lambda digits: torch.cat([digits[..., :4] * 3 % BASE, digits[..., 4:]], -1),
    "same": lambda digits: digits.clone(),
}
"""Each maps digits (…, N) to digits: add 1, reverse, rotate left by one, times 3; negate, swap neighbours in pairs;
rotate the first five left by one, add to each digit its place from 0, times 3 in the left half; nothing."""

ARTICLE = ("inc", "rev", "rot", "mul3")
DISTINCT = ("rot", "rot5", "ramp", "mul3left")
"""Four primitives whose 64 programs of three steps compute 64 functions, as the article's do not. None is its own
inverse (a a b would be b a a) and no two commute. (Found by enumeration here.)"""
# Enough inputs to tell programs apart: two that agree on all of them are equal but for a chance of 10^-100.
_PROBES = 32

Program = tuple[int, ...]
"""The number of the primitive of each step."""


@dataclass(frozen=True)
class Task:
    """A set of primitives and the number of steps of a program."""

    primitives: tuple[str, ...] = ARTICLE
    steps: int = 3

    def __post_init__(self) -> None:
        unknown = [name for name in self.primitives if name not in PRIMITIVES]
        if unknown or self.steps < 1:
            raise UserError(f"a task needs primitives of {', '.join(PRIMITIVES)} and at least one step, not {self}")

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """All P^S programs, in the order of their digits."""
        return tuple(itertools.product(range(len(self.primitives)), repeat=self.steps))

    def run(self, digits: Int[Tensor, "*batch N"], program: Program) -> Int[Tensor, "*batch N"]:
        """What the program makes of the digits."""
        for primitive in program:
            digits = PRIMITIVES[self.primitives[primitive]](digits)
        return digits

    def run_each(self, digits: Int[Tensor, "B N"], programs: Int[Tensor, "B S"]) -> Int[Tensor, "B N"]:
        """What each row's own program makes of it."""
        for step in range(programs.shape[1]):
            outcomes = torch.stack([PRIMITIVES[name](digits) for name in self.primitives])
            digits = outcomes[programs[:, step], torch.arange(len(digits))]
        return digits

    @cached_property
    def functions(self) -> dict[Program, int]:
        """The number of the function that each program computes: equal for programs that compute the same."""
        numbers: dict[bytes, int] = {}
        return {program: numbers.setdefault(self.outcome(program), len(numbers)) for program in self.programs}

    def outcome(self, program: Program) -> bytes:
        """What a program of any length makes of some inputs: equal for programs that compute the same function."""
        generator = torch.Generator().manual_seed(0)
        probes = torch.randint(BASE, (_PROBES, NUM_DIGITS), generator=generator)
        return self.run(probes, program).numpy().tobytes()

    @property
    def is_distinct(self) -> bool:
        """Whether no two programs compute the same function."""
        return len(set(self.functions.values())) == len(self.programs)


@dataclass(frozen=True)
class Split:
    """Which programs are trained on and which are held out."""

    trained: tuple[Program, ...]
    held_out: tuple[Program, ...]


def split_programs(
    task: Task, kind: str, number: int, held_out: int, among: tuple[Program, ...] | None = None
) -> Split:
    """Hold out `held_out` programs so that every primitive still appears at every step in training.

    Args:
        task: Whose programs.
        kind: "programs": any, as the article does (it does not give its own choice). "functions": whole classes of
            programs that compute the same, so that no held-out program computes what a trained one computes.
        number: Which of the splits of this kind; a function of it and of nothing else.
        held_out: Programs to hold out.
        among: Split these alone; without it, all of the task.

    Raises:
        UserError: no such split was found.
    """
    programs = task.programs if among is None else among
    if kind == "programs":
        units = [[program] for program in programs]
    else:
        units = [[p for p in programs if task.functions[p] == f] for f in range(max(task.functions.values()) + 1)]
    generator = torch.Generator().manual_seed(number)
    for _ in range(1000):
        chosen: set[Program] = set()
        for unit in torch.randperm(len(units), generator=generator).tolist():
            if len(chosen) + len(units[unit]) <= held_out:
                chosen.update(units[unit])
        trained = tuple(program for program in programs if program not in chosen)
        seen = {(step, primitive) for program in trained for step, primitive in enumerate(program)}
        if len(chosen) == held_out and len(seen) == task.steps * len(task.primitives):
            return Split(trained, tuple(sorted(chosen)))
    raise UserError(f"{held_out} of {len(programs)} programs cannot be held out by {kind}: hold out fewer")
