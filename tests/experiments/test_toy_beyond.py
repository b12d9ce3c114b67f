"""Discoveries with parts taken away or more asked of them: credit, what is read, lengths, the state between blocks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch.testing import assert_close

from lol import UserError
from lol.experiments.toy.discovery import figures
from lol.experiments.toy.discovery.beyond import BEYOND, TAKEN_AWAY
from lol.experiments.toy.discovery.config import RULES, DiscoverConfig, programs_of_length, selection_programs
from lol.experiments.toy.discovery.instruction import InstructionRouter
from lol.experiments.toy.discovery.table import discovery_section
from lol.experiments.toy.discovery.train import Discovery, discover
from lol.experiments.toy.model import ToyModel
from lol.experiments.toy.task import Task


def short(config: DiscoverConfig, **changes: object) -> DiscoverConfig:
    small = replace(config.toy, hidden_size=16, intermediate_size=16, batch_size=8)
    return replace(config, toy=small, **{"explore_steps": 6, "settle_steps": 2, "tries": 64} | changes)


@pytest.mark.parametrize("name", [*TAKEN_AWAY, *BEYOND])
def test_every_setting_is_a_function_of_its_seed(name: str):
    first, again = (Discovery(short((TAKEN_AWAY | BEYOND)[name]), 3) for _ in range(2))
    for discovery in (first, again):
        for _ in range(4):
            discovery.explore()
        discovery.settle()
    assert_close(first.model.state_dict(), again.model.state_dict(), rtol=0, atol=0)
    assert_close(first.router.state_dict(), again.router.state_dict(), rtol=0, atol=0)


def moved_by_one_step(config: DiscoverConfig, losses) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's table, and what a step of plain gradient descent adds to it."""
    discovery = Discovery(replace(config, entropy=0.0, balance=0.0), 0)
    discovery._losses = losses
    discovery.router_optimizer = torch.optim.SGD(discovery.router.parameters(), lr=1.0)
    before = discovery.router.score.detach().clone()
    discovery.explore()
    return before, discovery.router.score.detach() - before


def test_credit_of_whole_paths_is_the_gradient_of_the_expected_loss_on_average():
    config = short(RULES["pc"], credit="whole path", tries=1_200_000)
    before, moved = moved_by_one_step(
        config, lambda _examples, paths, _between, _weight: paths.sum(-1).float().requires_grad_()
    )
    share, cost = before.softmax(-1), torch.arange(4.0)
    slope = share * (cost - (share * cost).sum(-1, keepdim=True))
    used = F.one_hot(torch.tensor(selection_programs(config)[0]), 4).float().mean(0)
    assert_close(moved, -8 * used[..., None] * slope, atol=0.1, rtol=0.1)


def test_the_weight_is_credited_with_its_own_gradient():
    seen = {}

    def losses(_examples, paths, _between, weight):
        seen["paths"] = paths
        return weight.sum(-1)

    before, moved = moved_by_one_step(short(RULES["pc"], credit="weight"), losses)
    share, top = before.softmax(-1), before.argmax(-1, keepdim=True)
    slope = share.gather(-1, top) * (torch.zeros_like(share).scatter(-1, top, 1.0) - share)
    # 64 examples, one path of each: a row moves by a multiple of 8 / 64 of the slope of its most probable block.
    times = (moved / (-8 / 64 * slope)).mean(-1)
    assert_close(moved, -8 / 64 * times.round()[..., None] * slope, atol=1e-5, rtol=1e-4)
    assert times.round().sum() == 64 * 3
    assert seen["paths"].shape == (64, 1, 3)


def test_the_weight_weighs_the_update():
    torch.manual_seed(0)
    model = ToyModel(short(RULES["pc"]).toy).eval()
    digits, program = torch.randint(10, (5, 8)), torch.randint(4, (5, 3))
    with torch.no_grad():
        whole = model(digits, program, path=program).states
        half = model(digits, program, path=program, weight=torch.full((5, 3), 0.5)).states
        none = model(digits, program, path=program, weight=torch.zeros(5, 3)).states
    assert_close(none[-1], whole[0])
    assert_close(half[1], (whole[0] + whole[1]) / 2)


def test_a_given_table_stays_while_the_order_is_learned():
    discovery = Discovery(short(TAKEN_AWAY["ord-given"]), 0)
    discovery.train()
    programs = torch.tensor(discovery.trained)
    assert torch.equal(discovery.router(programs).argmax(-1), programs)
    assert_close(discovery.router(programs).amax(-1), torch.ones(len(programs), 3))
    assert discovery.router.reading.any()


def test_what_the_other_routers_read():
    torch.manual_seed(0)
    toy = RULES["ord"].toy
    programs = torch.tensor([[0, 1, 2], [0, 1, 3]])
    added = InstructionRouter("sum", toy)
    logits = added.score[:, torch.arange(3), programs].sum(2).transpose(0, 1)
    assert_close(added(programs), logits.softmax(-1))
    # The last instruction moves the first step, as it moves none of `pc`.
    assert not torch.equal(added(programs)[0, 0], added(programs)[1, 0])
    mapped = InstructionRouter("ord", toy, maps=True)
    assert len(mapped.orders) == 27
    with torch.no_grad():
        mapped.reading[mapped.orders.tolist().index([2, 0, 2])] = 1
    best = mapped(programs).argmax(-1)
    assert torch.equal(mapped.path(programs), best[:, [2, 0, 2]])
    assert mapped.path_of_any_length(programs) is None


def test_one_table_serves_every_place_and_length():
    torch.manual_seed(0)
    router = InstructionRouter("pc", RULES["ord"].toy, tied=True)
    table = router.score[0].argmax(-1)
    for length in (1, 3, 5):
        program = torch.randint(4, (20, length))
        assert torch.equal(router.path(program), table[program])
        assert torch.equal(router.path_of_any_length(program), table[program])
    # Untied, the tables of all places vote.
    voting = InstructionRouter("pc", RULES["ord"].toy)
    with torch.no_grad():
        voting.score.zero_()[:2, :, 1] = 5
        voting.score[2, :, 3] = 5
    assert (voting.path_of_any_length(torch.tensor([[2, 0, 1, 3]])) == 1).all()


def test_programs_of_other_lengths_compute_nothing_held_out():
    config = BEYOND["pc-lengths"]
    config = replace(config, toy=replace(config.toy, split="functions"))
    task = config.toy.task
    known = {task.outcome(program) for program in Discovery(config, 0).trained}
    others = {task.outcome(program) for program in task.programs} - known
    for length in (1, 2):
        kept = programs_of_length(config, length)
        assert kept
        assert not {task.outcome(program) for program in kept} & others
        left_out = set(Task(task.primitives, length).programs) - set(kept)
        assert {task.outcome(program) for program in left_out} <= others
    record, discovery = discover(short(config, lengths_tested=(1, 4)), 0)
    assert set(discovery.programs) == {1, 2, 3}
    for key in ("lengths", "lengths_as_digits", "lengths_as_hard_digits"):
        assert set(record["held_out"][key]) == {"1", "4"}


def test_the_state_between_blocks():
    digits, program = torch.randint(10, (40, 8)), torch.randint(4, (40, 3))

    def states(between: str, training: bool = False):
        torch.manual_seed(0)
        config = short(RULES["pc"])
        model = ToyModel(replace(config.toy, between=between))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1) if training else None
            return model, model(digits, program, path=program, generator=generator).states

    _, plain = states("nothing")
    # Noise and chance are for training.
    for between in ("noise", "digits at random", "hard digits at random"):
        assert_close(states(between)[1], plain)
        assert not torch.equal(states(between, training=True)[1][2], plain[2])
    # Between blocks the digits are written and read again: sure digits are what the model is given at the start.
    model, _ = states("digits")
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()[7] = 100.0
        first = model(torch.full((1, 8), 7), program[:1], path=program[:1]).states
        any_digits = model(digits[:1], program[:1], path=program[:1]).states
    _, own = first[0], any_digits[1]
    assert not torch.equal(own, first[1])
    assert_close(any_digits[2], first[2])
    # A model can be told to write digits that was not trained to.
    config = short(RULES["pc"])
    untold = ToyModel(config.toy)
    untold.load_state_dict(model.state_dict())
    with torch.no_grad():
        told = untold(digits[:1], program[:1], path=program[:1], between="digits").states
    assert_close(told[2], first[2])


def test_hard_digits_are_the_most_probable_ones():
    torch.manual_seed(0)
    model = ToyModel(replace(short(RULES["pc"]).toy, between="hard digits"))
    digits, program = torch.randint(10, (40, 8)), torch.randint(4, (40, 2))
    output = model(digits, program, path=program)
    # One step, the digits that the head says, and from them the other step.
    first = model(digits, program[:, :1], path=program[:, :1]).logits
    second = model(first.argmax(-1), program[:, 1:], path=program[:, 1:]).logits
    assert_close(output.logits, second)
    # The gradient comes to what was written as through the mean under the probabilities.
    (own,) = torch.autograd.grad(output.logits.square().sum(), model.head.weight, retain_graph=True)
    last = model.head.weight.detach().requires_grad_()
    logits = torch.nn.functional.linear(model.norm(output.states[-1]).detach(), last, model.head.bias)
    (only_the_last,) = torch.autograd.grad(logits.square().sum(), last)
    assert not torch.allclose(own, only_the_last)


def test_the_state_may_be_left_alone_until_the_router_is_frozen():
    plain = short(RULES["ord"])
    digits = replace(plain, toy=replace(plain.toy, between="digits at random"))
    runs = [Discovery(config, 0) for config in (plain, replace(digits, between_from="settling"), digits)]
    for run in runs:
        run.explore()
    untouched, later, always = (run.model.state_dict() for run in runs)
    assert_close(later, untouched, rtol=0, atol=0)
    assert not torch.equal(always["head.weight"], untouched["head.weight"])
    for run in runs[:2]:
        run.settle()
    assert not torch.equal(runs[1].model.head.weight, runs[0].model.head.weight)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rule": "mix", "tied": True}, "tied and given tables are for pc and ord"),
        ({"rule": "mix", "readings": "maps"}, "readings=maps is for ord"),
        ({"rule": "ord", "tied": True, "lengths": (1, 3)}, "lengths need rule=pc"),
        ({"between_from": "settling"}, "needs toy.between"),
        ({"rule": "pc", "tied": True, "lengths": (1, 2)}, "the task's own steps among them"),
    ],
)
def test_settings_that_contradict_each_other(changes, said: str):
    with pytest.raises(UserError, match=said):
        replace(RULES["ord"], **changes)


def test_lengths_have_their_table_and_figure(monkeypatch: pytest.MonkeyPatch):
    def record(seed: int, one: float | None, four: float) -> dict:
        held_out = {"accuracy": 50.0, "separation": 1.0, "known_functions": None, "new_functions": 50.0}
        held_out |= {"lengths": {"1": one, "4": four}, "lengths_as_digits": {"1": 100.0, "4": 90.0}}
        if seed:  # the others are measured in newer records
            held_out["lengths_as_hard_digits"] = {"1": 80.0, "4": 70.0}
        # Two blocks, which two primitives exchange at the second step.
        side = {"accuracy": 99.0, "uses": [[[3, 0], [0, 1]], [[0, 2], [2, 0]]]}
        toy = {"split": "functions", "split_number": 0}
        return {"model": "ord-noise", "seed": seed, "command": "lol toy discover ord-noise", "config": {"toy": toy},
                "held_out": held_out, "validation": side, "trained": side}  # fmt: skip

    text = discovery_section([record(0, None, 10.0), record(1, 40.0, 20.0)])
    assert "| ord-noise | functions 0 | 2 | 40.0 / 100.0 / 80.0 | 15.0 / 90.0 / 70.0 |" in text
    assert "| 99.0 | 1.00, 1.00 | 0.62, 0.62 |" in text
    # The figure says the same, and nothing where nothing was measured.
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, _file: drawn.append(figure))
    figures.draw_lengths([record(0, None, 10.0), record(1, 40.0, 20.0)], Path("unused"))
    figures.draw_lengths([record(0, None, 10.0)], Path("unused"))
    shown = [[[text.get_text() for text in axes.texts] for axes in figure.axes] for figure in drawn]
    assert shown == [[["40", "15"], ["100", "90"], ["80", "70"]], [["10"], ["100", "90"], []]]
    plain = record(0, 1.0, 1.0)
    del plain["held_out"]["lengths"]
    assert "other lengths" not in discovery_section([plain])
