"""`lol toy codes`: what the state says after each step of a program, as a map of the digits that would be right.

Blocks that run programs of S steps rightly may hand on other digits in between: nobody asks for those. Let σ_k be the
map from the right digits to those that are written after k steps; σ_0 and σ_S change nothing. The block of a primitive
f does the same at every step, so σ_{k+1} f = σ_1 f σ_k for every f. Any other σ_1 that this allows is a twist, which no
program of S steps can rule out: for example a σ_1 that commutes with all primitives and comes round after S times.
Where the blocks see the program, each may do another thing at another step, and there is nothing to rule out.
(Decided here.)

Letters: B examples, N digits, S steps.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from jaxtyping import Int
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lol.data.order import generator_named
from lol.errors import UserError
from lol.experiments.toy.config import Between
from lol.experiments.toy.play import Trained, load_run
from lol.experiments.toy.process import prepare_process
from lol.experiments.toy.task import BASE, NUM_DIGITS, PRIMITIVES, Task
from lol.experiments.toy.train import NUM_EXAMPLES, draw, percent

_BETWEEN: dict[str, Between] = {"as it is": "nothing", "as probabilities": "digits", "as hard digits": "hard digits"}
_IN_PLACE = tuple(range(NUM_DIGITS))
_TURNED = {
    tuple((place + by) % NUM_DIGITS for place in _IN_PLACE): f"turned by {by}" if by else "" for by in range(NUM_DIGITS)
}
_MIRRORED = {places[::-1]: f"{name} and reversed" if name else "reversed" for places, name in _TURNED.items()}
# Every way to turn or mirror the places, and what it is called.
_PLACES = _TURNED | _MIRRORED
# In percent: a map that explains less is noise. The file has it all the same.
_WORTH_SAYING = 5.0
# Enough inputs for every digit to stand at every place.
_PROBES = 400


@dataclass(frozen=True)
class ToyCodes:
    """Say what the state is after each step of the trained programs: the right digits, or a map of them.

    Example: lol toy codes results/toy/discovery/ord.programs-0.seed-0.json
    """

    records: tyro.conf.Positional[tuple[Path, ...]]
    """Records that `lol toy run` or `lol toy discover` wrote; the weights are beside them."""
    without: tuple[str, ...] = ()
    """Leave out programs with these primitives."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the numbers to this file."""


@dataclass(frozen=True)
class Code:
    """A map of digits: which place of the right digits each place shows, and what it shows of each digit."""

    places: tuple[int, ...] = _IN_PLACE
    digits: tuple[int, ...] = tuple(range(BASE))

    def apply(self, right: Int[Tensor, "*batch N"]) -> Int[Tensor, "*batch N"]:
        return torch.tensor(self.digits)[right[..., list(self.places)]]

    def __str__(self) -> str:
        parts = [_PLACES.get(self.places, f"places {self.places}"), _name_of_digits(self.digits)]
        return ", ".join(part for part in parts if part) or "right"


def toy_codes(command: ToyCodes) -> dict[str, Any]:
    """Print a table for each record, and return the numbers: accuracies in percent, uncertainty in nats of a digit.

    Raises:
        UserError: there is no record, one or its weights cannot be read, `without` names an unknown primitive, or no
            program is left.
    """
    if not command.records:
        raise UserError("name a record that `lol toy run` or `lol toy discover` wrote, with its weights beside it")
    prepare_process()
    console = Console(highlight=False)
    result: dict[str, Any] = {"command": {"without": list(command.without)}, "runs": {}}
    for file in command.records:
        trained = load_run(file)
        toy = trained.model.toy
        steps = read_codes(trained, command.without)
        result["runs"][file.stem] = {"states": steps}
        said = "its blocks see the program, so no twist is looked for"
        if toy.blind:
            primitives = tuple(name for name in toy.primitives if name not in command.without)
            free = [str(code) for code in twists(Task(primitives, toy.steps))]
            result["runs"][file.stem]["twists"] = free
            said = f"twists that its programs cannot rule out: {'; '.join(free) or 'none'}"
        console.print(f"{file.stem}: {said}", soft_wrap=True)
        console.print(_table(steps))
    return result


@torch.no_grad()
def read_codes(trained: Trained, without: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
    """What each step's state says, with the state handed on as it is, as probabilities and as hard digits (the latter
    two where the blocks are blind)."""
    model, toy = trained.model, trained.model.toy
    unknown = set(without) - set(toy.primitives)
    if unknown:
        raise UserError(f"the run has no primitive {', '.join(sorted(unknown))}: it has {', '.join(toy.primitives)}")
    programs = tuple(p for p in trained.known if not {toy.primitives[i] for i in p} & set(without))
    if not programs:
        raise UserError(f"no trained program does without {', '.join(without)}: leave out fewer primitives")
    examples = draw(toy, programs, NUM_EXAMPLES, generator_named("toy codes"))
    path = trained.find_path(examples.program)
    rights = [toy.task.run_each(examples.digits, examples.program[:, :step]) for step in range(1, toy.steps + 1)]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, between in _BETWEEN.items():
        if between != "nothing" and not toy.blind:
            continue
        states = model(examples.digits, examples.program, path=path, between=between).states
        found[name] = []
        for state, right in zip(states[1:], rights, strict=True):
            logits = model.read(state[:, :NUM_DIGITS])
            written, share = logits.argmax(-1), logits.softmax(-1)
            code = find_code(written, right)
            found[name].append(
                {
                    "right": percent((written == right).all(-1)),
                    "uncertainty": round(-(share * F.log_softmax(logits, -1)).sum(-1).mean().item(), 3),
                    "code": str(code),
                    "explained": percent((written == code.apply(right)).all(-1)),
                    **asdict(code),
                }
            )
    return found


def find_code(written: Int[Tensor, "B N"], right: Int[Tensor, "B N"]) -> Code:
    """The code that explains most written digits: each place's own source, and one map of digits for all places."""
    pairs = F.one_hot(right, BASE).float().flatten(1).T @ F.one_hot(written, BASE).float().flatten(1)
    # Source place, source digit, place, digit: how often the two came together.
    counts = pairs.view(NUM_DIGITS, BASE, NUM_DIGITS, BASE)
    places = counts.amax(-1).sum(1).argmax(0)
    chosen = counts[places, :, torch.arange(NUM_DIGITS)].sum(0)
    return Code(tuple(places.tolist()), tuple(chosen.argmax(-1).tolist()))


@cache
def twists(task: Task) -> tuple[Code, ...]:
    """The codes after one step, other than the right digits, that no program of the task can rule out, among all that
    turn or mirror the places and map a digit x to ax + b."""
    probes = torch.randint(BASE, (_PROBES, NUM_DIGITS), generator=generator_named("toy codes"))
    found = []
    for places, a, b in itertools.product(_PLACES, (1, 3, 7, 9), range(BASE)):
        first = Code(places, tuple((a * digit + b) % BASE for digit in range(BASE)))
        code: Code | None = first
        for _ in range(task.steps - 1):
            code = code and _next_code(task, first, code, probes)
        if code == Code() and first != Code():
            found.append(first)
    return tuple(found)


def _next_code(task: Task, first: Code, code: Code, probes: Int[Tensor, "B N"]) -> Code | None:
    """The code that follows where the first is `first`; `None` where primitives do not agree on one."""
    primitives = [PRIMITIVES[name] for name in task.primitives]
    pairs = [(primitive(probes), first.apply(primitive(code.apply(probes)))) for primitive in primitives]
    right, written = pairs[0]
    following = find_code(written, right)
    agree = all(torch.equal(following.apply(right), written) for right, written in pairs)
    return following if agree else None


def _name_of_digits(digits: tuple[int, ...]) -> str:
    b, a = digits[0], (digits[1] - digits[0]) % BASE
    if digits != tuple((a * digit + b) % BASE for digit in range(BASE)):
        return f"digits {''.join(map(str, digits))}"
    return " ".join([f"times {a}"] * (a != 1) + [f"plus {b}"] * (b != 0))


def _table(states: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("state handed on", "step", "right %", "uncertainty", "what is written", "explains %"):
        table.add_column(head, justify="left" if head in ("state handed on", "what is written") else "right")
    for name, steps in states.items():
        for step, one in enumerate(steps, 1):
            numbers = f"{one['right']:.1f}", f"{one['uncertainty']:.2f}"
            code = one["code"] if one["explained"] >= _WORTH_SAYING else "something else"
            table.add_row(name if step == 1 else "", str(step), *numbers, code, f"{one['explained']:.1f}")
    return table
