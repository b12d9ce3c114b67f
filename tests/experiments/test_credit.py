"""Counterfactual credit in a language model: what a block costs, and that the credit moves gradients alone."""

import argparse
import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lol import LoLConfig, LoLForCausalLM, UserError
from lol.experiments import credit
from lol.experiments.credit import CreditedModel, CreditExperiment, compare, measure
from lol.train.recipes import recipe


def small() -> LoLForCausalLM:
    torch.manual_seed(0)
    config = LoLConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_prelude_layers=1,
        num_coda_layers=1, num_experts=3, num_routed_depths=2, window_size=4, window_stride=2, initializer_range=0.5,
    )  # fmt: skip
    return LoLForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(20, (6, 12), generator=torch.Generator().manual_seed(1))
    # Two documents in the first row: one window more than in the others.
    places = torch.arange(12).repeat(6, 1)
    places[0, 5:] = torch.arange(7)
    return {"input_ids": ids, "position_ids": places}


def test_the_block_that_ran_costs_what_its_row_lost():
    model, rows = small(), batch()
    credited = CreditedModel(model, 1.0, 1.0)
    model.eval()
    with torch.no_grad():
        output = model(**rows, labels=rows["input_ids"], num_items_in_batch=1)
    chosen = output.routing.experts
    row, depth, window = torch.arange(6), torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([3, 0, 1, 1, 2, 2])
    cost = credited._try_blocks(rows | {"num_depths": 2}, chosen, row, depth, window)
    assert_close(cost.gather(1, chosen[row, depth, window][:, None]).sum(), output.loss)
    assert (cost.std(1) > 1e-4).all()
    # A part of the rows has fewer windows than the batch, and costs the same.
    alone = credited._try_blocks(rows | {"num_depths": 2}, chosen, row[2:], depth[2:], window[2:])
    assert_close(alone, cost[2:])


def test_credit_moves_gradients_alone():
    rows, losses, gradients = batch(), [], []
    for coefficient in (0.0, 1.0, 2.0):
        model = small()
        module = CreditedModel(model, 0.5, coefficient).train()
        generator = torch.Generator().manual_seed(2)
        output = module(
            **rows, labels=rows["input_ids"], num_depths=2, generator=generator, num_items_in_batch=60,
            output_router_logits=True,
        )  # fmt: skip
        output.loss.backward()
        assert model.training
        losses.append(output.loss.detach())
        gradients.append(model.model.router.bias.grad)
    assert_close(torch.stack(losses), losses[0].expand(3))
    none, once, twice = gradients
    assert (once - none).abs().max() > 1e-6
    assert_close(twice - none, 2 * (once - none), rtol=1e-3, atol=1e-7)


def test_other_paths_are_measured():
    numbers = measure(small(), [{name: part[row] for name, part in batch().items()} for row in range(6)], 3)
    assert len({numbers["loss"], numbers["loss_mode_path"], numbers["loss_foreign_path"]}) == 3
    assert 0 < numbers["choice_entropy"] <= torch.tensor(3.0).log()


@pytest.mark.slow
def test_the_experiment_does_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tmp_path / "text.txt"
    text.write_text(inspect.getsource(argparse), encoding="utf-8")
    tiny = recipe("tiny")
    tiny = replace(tiny, data=replace(tiny.data, source=str(text)), eval=replace(tiny.eval, rows=4))
    monkeypatch.setattr(credit, "recipe", lambda _name: tiny)
    result = compare(CreditExperiment(steps=2, shares=(0.25,), out=tmp_path / "credit.json"))
    assert [run["share"] for run in result["runs"]] == [None, 0.25]
    json.dumps(result, allow_nan=False)
    with pytest.raises(UserError, match="at most 1"):
        CreditExperiment(shares=(0.0,))
