"""The balancing rules and the depth schedule against the oracle."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import oracle
from lol.train.balance import sequence_auxiliary_losses, update_bias
from lol.train.config import BalanceConfig
from lol.train.curriculum import growing_depth
from model_cases import (
    CLOSE,
    bounded,
    check_against_oracle,
    make_batch,
    make_model,
    routed_specs,
    row_lengths,
    specs,
)
from oracle import Spec

seeds = st.integers(0, 10_000)


@bounded(25)
@given(spec=specs(), rows=row_lengths(), seed=seeds, depth=st.integers(1, 4))
def test_the_sequence_loss_of_every_document(spec: Spec, rows: list[list[int]], seed: int, depth: int):
    """The package gives the losses in no order."""
    model, batch, depth = make_model(spec, seed), make_batch(rows, seed), min(depth, spec.num_routed_depths)
    results = check_against_oracle(spec, model, batch, num_depths=depth)
    output = model(**batch.inputs(), num_depths=depth, output_router_logits=True)
    losses = sequence_auxiliary_losses(output.router_logits, output.routing, BalanceConfig())
    expected = [oracle.sequence_auxiliary_loss(result, spec.num_experts) for result in results]
    assert_close(losses.double().sort().values, torch.tensor(sorted(expected), dtype=torch.float64), **CLOSE)


@bounded(20)
@given(spec=routed_specs(), rows=row_lengths(), seed=seeds, rate=st.sampled_from([0.001, 0.25, 7.0]))
def test_one_step_of_the_bias(spec: Spec, rows: list[list[int]], seed: int, rate: float):
    model = make_model(spec, seed)
    load = model(**make_batch(rows, seed).inputs()).routing.load
    bias = model.model.expert_bias * 40
    expected = oracle.updated_bias(bias, load, rate, spec.balance_scope)
    update_bias(bias, load, BalanceConfig(rate=rate), step=0, steps=10)
    assert_close(bias.double(), expected, atol=1e-5, rtol=0)
    assert float(bias.abs().max()) <= 16.0


@bounded(100)
@given(period=st.integers(1, 3000), initial=st.integers(1, 8), more=st.integers(0, 16), data=st.data())
def test_growing(period: int, initial: int, more: int, data: st.DataObject):
    step = data.draw(st.integers(0, period + 2))
    assert growing_depth(step, initial, initial + more, float(period)) == oracle.growing_depth(
        step, initial, initial + more, period
    )


def test_growing_at_steps_that_give_whole_depths():
    """Where the root is rational the formula is a whole number exactly, and rounding must not push it over."""
    for root in range(1, 41):
        period, final = root * root, root + 1
        for left in range(root + 1):
            step = period - left * left
            expected = oracle.growing_depth(step, 1, final, period)
            assert expected == final - left
            assert growing_depth(step, 1, final, float(period)) == expected
