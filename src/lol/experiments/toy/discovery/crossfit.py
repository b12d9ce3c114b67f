"""Repairing the routes of programs by what fresh libraries make of them: select and repair, with nothing but training.

Only programs that a library was not trained on can tell a routing that composes from any other that fits. So a routing
is tried like this: the trained programs are cut into folds, whole functions at a time; for each fold a fresh library is
trained for some steps on the others along these routes; its loss on the fold and on the others adds up to the score.
Simpler routings are proposed, in an order that is drawn once and does not know the answer, and kept where they score
better. (Decided here.) Letters: Q programs, S steps, P primitives.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from lol.data.order import generator_named
from lol.experiments.toy.config import ToyConfig
from lol.experiments.toy.model import ToyModel
from lol.experiments.toy.task import Program
from lol.experiments.toy.train import Examples, draw

Routes = Int[Tensor, "Q S"]
_MEASURED = 1024


@dataclass(frozen=True)
class RepairConfig:
    """How routes are repaired."""

    folds: int = 3
    """Parts of the trained programs that are held out by turns."""
    test_steps: int = 120
    """Steps of each fresh library."""
    tests: int = 48
    """Routings that are tried at most, the first among them."""
    margin: float = 0.02
    """By so much, in nats of a digit and of both losses, a proposal has to be better."""


@dataclass(frozen=True)
class Move:
    """A routing that differs at one step, or at two that are swapped."""

    name: str
    apply: Callable[[Routes], Routes]


def number_of(toy: ToyConfig, program: Int[Tensor, "B S"]) -> Int[Tensor, "B"]:
    """The row of `Routes` of each program: its place in `toy.task.programs`."""
    place = len(toy.primitives) ** torch.arange(toy.steps).flip(0)
    return (program * place).sum(-1)


def moves(toy: ToyConfig, trained: tuple[Program, ...], generator: torch.Generator) -> list[Move]:
    """All moves, in an order that is drawn: a step reads one instruction, or two; two steps change places; and, as a
    control that no better routing needs, a step reads one instruction by a map that is drawn."""
    programs, known = torch.tensor(toy.task.programs), number_of(toy, torch.tensor(trained))
    found = []
    for step, count in itertools.product(range(toy.steps), (1, 2)):
        for places in itertools.combinations(range(toy.steps), count):
            name = f"step {step + 1} reads {' and '.join(str(place + 1) for place in places)}"
            found.append(Move(name, _reading(toy, programs, known, step, places)))
    for first, second in itertools.combinations(range(toy.steps), 2):
        found.append(Move(f"steps {first + 1} and {second + 1} change places", _swapping(first, second)))
    for step in range(toy.steps):
        place = int(torch.randint(toy.steps, (), generator=generator))
        drawn = torch.randint(toy.num_blocks, (len(toy.primitives),), generator=generator)
        found.append(Move(f"step {step + 1} reads {place + 1} by a drawn map", _mapping(programs, step, place, drawn)))
    return [found[place] for place in torch.randperm(len(found), generator=generator)]


def _reading(
    toy: ToyConfig, programs: Tensor, known: Tensor, step: int, places: tuple[int, ...]
) -> Callable[[Routes], Routes]:
    """The step runs what is most common among the trained programs with the same instructions at these places."""
    kind = sum(programs[:, place] * len(toy.primitives) ** power for power, place in enumerate(places))
    assert isinstance(kind, Tensor)

    def apply(routes: Routes) -> Routes:
        votes = F.one_hot(routes[known, step], toy.num_blocks)
        counts = votes.new_zeros(len(toy.primitives) ** len(places), toy.num_blocks).index_add(0, kind[known], votes)
        new = routes.clone()
        # Where no trained program has these instructions together, the routes stay.
        new[:, step] = torch.where(counts.sum(-1)[kind] > 0, counts.argmax(-1)[kind], routes[:, step])
        return new

    return apply


def _swapping(first: int, second: int) -> Callable[[Routes], Routes]:
    def apply(routes: Routes) -> Routes:
        new = routes.clone()
        new[:, [first, second]] = routes[:, [second, first]]
        return new

    return apply


def _mapping(programs: Tensor, step: int, place: int, drawn: Tensor) -> Callable[[Routes], Routes]:
    def apply(routes: Routes) -> Routes:
        new = routes.clone()
        new[:, step] = drawn[programs[:, place]]
        return new

    return apply


def cut_into_folds(toy: ToyConfig, trained: tuple[Program, ...], folds: int) -> list[tuple[Program, ...]]:
    """Parts of about the same size; programs that compute the same function are in the same part."""
    parts: list[list[Program]] = [[] for _ in range(folds)]
    functions = toy.task.functions
    kinds = [[p for p in trained if functions[p] == f] for f in sorted({functions[p] for p in trained})]
    for kind in sorted(kinds, key=len, reverse=True):
        min(parts, key=len).extend(kind)
    return [tuple(part) for part in parts]


def score_routes(
    toy: ToyConfig, repair: RepairConfig, folds: list[tuple[Program, ...]], routes: Routes, seed: int
) -> dict[str, float]:
    """Losses in nats of a digit after the test: on the programs of the fold, and on those that were trained on."""
    out_of_fold, in_fold = 0.0, 0.0
    for number, fold in enumerate(folds):
        others = tuple(program for other in folds if other is not fold for program in other)
        # Every routing is tried from the same first weights on the same examples.
        torch.manual_seed(seed)
        generator = generator_named(f"toy crossfit {seed} {number}")
        model = ToyModel(toy)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=toy.learning_rate, weight_decay=toy.weight_decay, fused=True
        )
        for _ in range(repair.test_steps):
            _loss(model, routes, draw(toy, others, toy.batch_size, generator)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), toy.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            out_of_fold += _loss(model, routes, draw(toy, fold, _MEASURED, generator)).item() / len(folds)
            in_fold += _loss(model, routes, draw(toy, others, _MEASURED, generator)).item() / len(folds)
    return {"out_of_fold": round(out_of_fold, 4), "in_fold": round(in_fold, 4)}


def _loss(model: ToyModel, routes: Routes, examples: Examples) -> Tensor:
    path = routes[number_of(model.toy, examples.program)]
    logits = model(examples.digits, examples.program, path=path).logits
    return F.cross_entropy(logits.flatten(0, 1), examples.target.flatten())


def repair_routes(
    toy: ToyConfig, repair: RepairConfig, trained: tuple[Program, ...], routes: Routes, seed: int
) -> tuple[Routes, list[dict[str, Any]]]:
    """Better routes, and every routing that was tried, with its losses and whether it was kept.

    Proposals go round until all moves in a row were tried in vain, or the tests are used up.
    """
    folds = cut_into_folds(toy, trained, repair.folds)
    proposals = moves(toy, trained, generator_named(f"toy crossfit moves {seed}"))
    losses = score_routes(toy, repair, folds, routes, seed)
    best, log = sum(losses.values()), [{"move": "none", **losses, "kept": True}]
    in_vain = 0
    for move in itertools.cycle(proposals):
        if in_vain == len(proposals) or len(log) == repair.tests:
            break
        proposed = move.apply(routes)
        in_vain += 1
        if torch.equal(proposed, routes):
            continue
        losses = score_routes(toy, repair, folds, proposed, seed)
        kept = sum(losses.values()) < best - repair.margin
        log.append({"move": move.name, **losses, "kept": kept})
        if kept:
            routes, best, in_vain = proposed, sum(losses.values()), 0
    return routes, log
