"""Discovery by itself: what the rules read, the credit, and that nothing reads the held-out programs but the score."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lol import UserError
from lol.cli import main
from lol.experiments.toy.discovery import runs as discovery_runs
from lol.experiments.toy.discovery import train as module
from lol.experiments.toy.discovery.config import RULES, DiscoverConfig, selection_programs
from lol.experiments.toy.discovery.train import Discovery, InstructionRouter, discover, score_held_out
from lol.experiments.toy.line import Job
from lol.experiments.toy.task import split_programs


def short(rule: str, **toy: object) -> DiscoverConfig:
    config = RULES[rule]
    small = {"hidden_size": 16, "intermediate_size": 16, "batch_size": 8} | toy
    return replace(config, toy=replace(config.toy, **small), explore_steps=6, settle_steps=3, tries=24)


@pytest.mark.parametrize("rule", ["pc", "mix", "ord"])
def test_a_discovery_is_a_function_of_its_seed(rule: str):
    (first, _), (again, _), (other, _) = (discover(short(rule), seed) for seed in (1, 1, 2))
    for record in (first, again):
        del record["cpu_seconds"]
    assert first == again
    assert first["history"] != other["history"]
    json.dumps(first, allow_nan=False)


@pytest.mark.parametrize("split", ["programs", "functions"])
def test_held_out_programs_are_read_by_the_score_alone(split: str, monkeypatch: pytest.MonkeyPatch):
    config = short("ord", split=split)
    task = config.toy.task
    held_out = set(split_programs(task, split, 0, 16).held_out)
    seen = []
    draw = module.draw
    monkeypatch.setattr(
        module, "draw", lambda config, programs, *rest: seen.append(programs) or draw(config, programs, *rest)
    )
    discovery = Discovery(config, 0)
    log: list[str] = []
    with pytest.raises(UserError, match="scored once, after step 9"):
        score_held_out(discovery, log)
    discovery.train()
    discovery.measure(discovery.validation)
    assert len(seen) == 10
    assert not held_out & {program for programs in seen for program in programs}
    score = score_held_out(discovery, log)
    assert log == ["held-out programs read after step 9 of 9"]
    assert set(seen[-1]) == held_out
    with pytest.raises(UserError, match="scored once"):
        score_held_out(discovery, log)
    # On a split by function no held-out program computes what a trained one does, selection included.
    assert (score["known_functions"] is None) == (split == "functions")
    trained, validation = selection_programs(config)
    assert (len(trained), len(validation)) == (40, 8)
    if split == "functions":
        functions = task.functions
        kinds = [{functions[program] for program in side} for side in (trained, validation, held_out)]
        assert len(set.union(*kinds)) == sum(map(len, kinds))


def test_what_each_rule_reads():
    torch.manual_seed(0)
    programs = torch.tensor([[0, 1, 2], [0, 1, 3], [3, 1, 2]])
    toy = RULES["ord"].toy
    ordered, by_step, mixed = (InstructionRouter(rule, toy) for rule in ("ord", "pc", "mix"))
    for router in (ordered, by_step):
        choices = router(programs)
        # The first choice reads the first instruction and no other.
        assert torch.equal(choices[0, :2], choices[1, :2])
        assert not torch.equal(choices[0, 2], choices[1, 2])
        assert torch.equal(choices[0, 1:], choices[2, 1:])
    best = ordered(programs).argmax(-1)
    assert torch.equal(by_step.path(programs), by_step(programs).argmax(-1))
    for number, order in enumerate(ordered.orders.tolist()):
        with torch.no_grad():
            ordered.reading.zero_()[number] = 1
        assert torch.equal(ordered.path(programs), best[:, order])
    # At the start a step of `mix` reads all instructions alike; then the one that it leans on.
    assert not torch.equal(mixed(programs)[0, 0], mixed(programs)[1, 0])
    with torch.no_grad():
        mixed.reading.copy_(30 * torch.eye(3)[[2, 0, 1]])
    expected = mixed.score[0, 2, programs[:, 2]].softmax(-1)
    assert_close(mixed(programs)[:, 0], expected)
    assert_close(mixed(programs).sum(-1), torch.ones(3, 3))


def test_credit_is_the_gradient_of_the_expected_loss():
    """Each block costs its number, wherever it runs: a step down the gradient of Σ π_m m, mean over the examples."""
    config = replace(short("pc"), entropy=0.0, balance=0.0)
    discovery = Discovery(config, 0)
    discovery._losses = lambda _examples, paths, _between, _weight: paths.sum(-1).float().requires_grad_()
    discovery.router_optimizer = torch.optim.SGD(discovery.router.parameters(), lr=1.0)
    before = discovery.router.score.detach().clone()
    discovery.explore()
    moved = discovery.router.score.detach() - before
    share = before.softmax(-1)
    cost = torch.arange(4.0)
    slope = share * (cost - (share * cost).sum(-1, keepdim=True))
    # Six examples, one choice of each: every row moved by a multiple of 8 / 6 slopes, six times in all.
    times = (moved / (-8 / 6 * slope)).mean(-1)
    assert_close(moved, -8 / 6 * times.round()[..., None] * slope, atol=1e-5, rtol=1e-4)
    assert times.round().sum() == 6


def test_the_order_waits_and_then_moves():
    discovery = Discovery(short("ord"), 0)
    for _ in range(3):
        discovery.explore()
    assert not discovery.router.reading.any()
    for _ in range(3):
        discovery.explore()
    assert discovery.router.reading.any()
    frozen = discovery.router.score.detach().clone()
    discovery.settle()
    assert torch.equal(frozen, discovery.router.score)


def test_the_command_writes_a_record_once(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(discovery_runs.DISCOVERIES, "ord", short("ord"))
    command = ["toy", "discover", "ord", "--split", "functions", "--out", str(tmp_path)]
    assert main(command) == 0
    record = json.loads((tmp_path / "ord.functions-0.seed-0.json").read_text())
    assert record["config"]["toy"]["split"] == "functions"
    assert record["command"] == "lol toy discover ord --seed 0 --split functions --split-number 0"
    assert "separation" in capsys.readouterr().out
    assert main(command) == 0
    assert "done before" in capsys.readouterr().out
    assert main(["toy", "discover", "none"]) == 2
    assert "ord-six" in capsys.readouterr().err


def test_many_are_the_single_ones_side_by_side(tmp_path: Path, monkeypatch, capsys):
    started = []

    def instead(jobs: list[Job], at_once: int) -> int:
        started.extend(jobs)
        return at_once

    monkeypatch.setattr(discovery_runs, "run_side_by_side", instead)
    done = tmp_path / "ord.programs-0.seed-1.json"
    done.write_text("{}")
    flags = ["--seed", "1", "--seeds", "2", "--splits", "programs", "functions", "--split-numbers", "0", "2"]
    # As many failed as there are jobs at once: the command fails too.
    assert main(["toy", "discover", "ord", "pc", *flags, "--jobs", "3", "--out", str(tmp_path)]) == 1
    assert "16 runs, 1 done before" in capsys.readouterr().out
    assert len({job.name for job in started}) == 15
    assert started[1].name == "ord.programs-2.seed-1"
    single = ["toy", "discover", "ord", "--seed", "1", "--split", "programs", "--split-number", "2"]
    assert list(started[1].args) == [*single, "--out", str(tmp_path)]
    assert main(["toy", "discover"]) == 2


def test_six_primitives_have_their_splits():
    for name in ("ord-six", "mix-six"):
        trained, validation = selection_programs(discovery_runs.DISCOVERIES[name])
        assert (len(trained), len(validation)) == (64, 8)
