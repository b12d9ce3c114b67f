"""Repair of routes: what the moves do, what a test measures, and that the search keeps what scores better."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from lol import UserError
from lol.experiments.toy.discovery import crossfit as module
from lol.experiments.toy.discovery.beyond import BEYOND
from lol.experiments.toy.discovery.config import RULES, selection_programs
from lol.experiments.toy.discovery.crossfit import (
    RepairConfig,
    cut_into_folds,
    moves,
    number_of,
    repair_routes,
    score_routes,
)
from lol.experiments.toy.discovery.runs import restore
from lol.experiments.toy.discovery.train import Discovery, discover
from lol.experiments.toy.play import _read_config

TOY = replace(RULES["ord"].toy, hidden_size=16, intermediate_size=16, batch_size=16)
TRAINED = selection_programs(RULES["ord"])[0]
PROGRAMS = torch.tensor(TOY.task.programs)


def test_moves_name_what_they_do():
    assert torch.equal(number_of(TOY, PROGRAMS), torch.arange(64))
    found = {move.name: move.apply for move in moves(TOY, TRAINED, torch.Generator().manual_seed(0))}
    assert len(found) == 3 * 3 + 3 * 3 + 3 + 3
    # The last step follows the first instruction, but for a trained program in which it does not.
    routes = PROGRAMS.clone()
    routes[:, 2] = 3 - PROGRAMS[:, 0]
    broken = routes.clone()
    broken[number_of(TOY, torch.tensor([TRAINED[0]])), 2] = PROGRAMS[number_of(TOY, torch.tensor([TRAINED[0]])), 0]
    assert not torch.equal(broken, routes)
    assert torch.equal(found["step 3 reads 1"](broken), routes)
    assert not torch.equal(found["step 3 reads 2"](broken), routes)
    assert torch.equal(found["step 3 reads 1 and 2"](routes), routes)
    swapped = found["steps 1 and 2 change places"](routes)
    assert torch.equal(swapped, routes[:, [1, 0, 2]])
    drawn = [apply(routes) for name, apply in found.items() if name.startswith("step 1") and "drawn" in name]
    assert len(drawn) == 1
    assert torch.equal(drawn[0][:, 1:], routes[:, 1:])


def test_a_function_is_in_one_fold():
    folds = cut_into_folds(TOY, TRAINED, 3)
    assert sorted(p for fold in folds for p in fold) == sorted(TRAINED)
    assert max(map(len, folds)) - min(map(len, folds)) <= 4
    kinds = [{TOY.task.functions[p] for p in fold} for fold in folds]
    assert len(set.union(*kinds)) == sum(map(len, kinds))


def test_a_fold_is_not_trained_on(monkeypatch: pytest.MonkeyPatch):
    seen = []
    draw = module.draw
    monkeypatch.setattr(
        module, "draw", lambda toy, programs, *rest: seen.append(programs) or draw(toy, programs, *rest)
    )
    folds = cut_into_folds(TOY, TRAINED, 2)
    repair = RepairConfig(folds=2, test_steps=2)
    first, again = (score_routes(TOY, repair, folds, PROGRAMS, 0) for _ in range(2))
    assert first == again
    for fold, drawn in zip(folds, (seen[:4], seen[4:8]), strict=True):
        assert [set(programs) == set(fold) for programs in drawn] == [False, False, True, False]
        assert not set(fold) & {program for at in (0, 1, 3) for program in drawn[at]}


def test_the_search_keeps_what_scores_better(monkeypatch: pytest.MonkeyPatch):
    """A score that counts the programs' steps that are not run by their own instruction."""

    def score(_toy, _repair, _folds, routes, _seed):
        return {"out_of_fold": (routes != PROGRAMS).float().mean().item(), "in_fold": 0.0}

    monkeypatch.setattr(module, "score_routes", score)
    generator = torch.Generator().manual_seed(0)
    wrong = torch.where(torch.rand(PROGRAMS.shape, generator=generator) < 0.2, 0, PROGRAMS)
    repaired, log = repair_routes(TOY, RepairConfig(tests=200, margin=0.0), TRAINED, wrong, 0)
    assert torch.equal(repaired, PROGRAMS)
    scores = [entry["out_of_fold"] for entry in log if entry["kept"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] == 0
    assert len(repair_routes(TOY, RepairConfig(tests=3), TRAINED, wrong, 0)[1]) == 3


def test_a_repaired_discovery_settles_on_its_routes():
    config = BEYOND["sum-repaired"]
    repair = RepairConfig(folds=2, test_steps=1, tests=3)
    config = replace(config, toy=TOY, explore_steps=3, settle_steps=2, tries=24, repair=repair)
    record, discovery = discover(config, 0)
    assert len(record["repairs"]) == 3
    assert torch.equal(discovery.router.path(PROGRAMS), discovery.router.routes)
    state = load(save({f"router.{name}": value for name, value in discovery.router.state_dict().items()}
                      | {f"model.{name}": value for name, value in discovery.model.state_dict().items()}))  # fmt: skip
    settings = json.loads(json.dumps(record["config"]))
    assert _read_config(settings) == config
    again = Discovery(config, 0)
    restore(again, state)
    assert again.measure(again.trained) == record["trained"]
    with pytest.raises(UserError, match="rules that have one order"):
        replace(config, rule="ord")


def test_the_bonus_on_whole_paths_is_their_entropy():
    from lol.experiments.toy.discovery.train import _entropy, _path_shares

    torch.manual_seed(0)
    probability = torch.rand(5, 3, 4).softmax(-1)
    shares = _path_shares(probability)
    assert shares.shape == (5, 64)
    path = 1 * 16 + 3 * 4 + 2
    torch.testing.assert_close(shares[:, path], probability[:, 0, 1] * probability[:, 1, 3] * probability[:, 2, 2])
    # Independent choices: entropies add.
    torch.testing.assert_close(_entropy(shares), _entropy(probability).sum(-1))
