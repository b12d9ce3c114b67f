"""Sampled depth: Huginn's law by its moments and probabilities, and the same draw for whoever asks."""

import math

import pytest
import torch

from lol.model.config import LoLConfig
from lol.train.config import GrowthConfig, TrainConfig
from lol.train.curriculum import depth_at, executed_depth, sampled_depth

DRAWS = 8000


def draws(**given: float) -> torch.Tensor:
    return torch.tensor([sampled_depth(5, step, **given) for step in range(DRAWS)], dtype=torch.float64)


def test_mean_and_variance() -> None:
    # λ has mean r = 8 and variance r²(e^{σ²} - 1); a Poisson of it plus 1 has mean r + 1 and variance r more.
    drawn = draws(mean=8, most=10**6)
    variance = 8 + 64 * (math.exp(0.25) - 1)
    assert drawn.mean().item() == pytest.approx(9, abs=4 * math.sqrt(variance / DRAWS))
    assert drawn.var().item() == pytest.approx(variance, rel=0.15)
    assert drawn.min() >= 1


def test_without_spread_it_is_poisson_cut_at_the_models_depth() -> None:
    # P(1) = e^-2, P(2) = 2 e^-2, and the rest is 3.
    shares = torch.bincount(draws(mean=2, most=3, sigma=0.0).long(), minlength=4) / DRAWS
    expected = [0.0, math.exp(-2), 2 * math.exp(-2), 1 - 3 * math.exp(-2)]
    assert shares.tolist() == pytest.approx(expected, abs=0.02)


def test_loops_come_whole() -> None:
    # r = 16 / 4 loops: 5 on average before the limit of 4.
    drawn = draws(mean=16, most=16, unit=4)
    assert set(drawn.tolist()) == {4.0, 8.0, 12.0, 16.0}
    free = draws(mean=16, most=10**6, unit=4)
    assert free.mean().item() / 4 == pytest.approx(5, abs=0.15)
    assert torch.equal(drawn, free.clamp(max=16))


def test_a_function_of_seed_and_step_that_touches_no_generator() -> None:
    before = torch.get_rng_state()
    once = [sampled_depth(1, step, 8, 16) for step in range(50)]
    torch.rand(3)
    assert [sampled_depth(1, step, 8, 16) for step in reversed(range(50))] == once[::-1]
    assert [sampled_depth(2, step, 8, 16) for step in range(50)] != once
    torch.set_rng_state(before)
    sampled_depth(1, 0, 8, 16)
    assert torch.equal(torch.get_rng_state(), before)


def config(**growth: object) -> TrainConfig:
    return TrainConfig(model=LoLConfig(num_routed_depths=8), growth=GrowthConfig(**growth), steps=100)


def test_off_by_default_and_around_the_growing_depth() -> None:
    fixed = config(initial_depth=1)
    assert [executed_depth(step, fixed, 100) for step in range(100)] == [
        depth_at(step, fixed, 100) for step in range(100)
    ]
    sampled = config(initial_depth=1, sampled=True)
    depths = [executed_depth(step, sampled, 100) for step in range(100)]
    assert [depth_at(step, sampled, 100) for step in range(100)] == [depth_at(step, fixed, 100) for step in range(100)]
    # Around 2 at the beginning, 3 on average; around 8 at the end.
    assert sum(depths[:10]) / 10 < 4.5 < sum(depths[90:]) / 10
    assert {*depths} <= {*range(1, 9)}
    assert len({*depths[75:]}) > 1


def test_a_model_without_a_core_samples_nothing() -> None:
    without = TrainConfig(model=LoLConfig(num_routed_depths=0), growth=GrowthConfig(sampled=True))
    assert executed_depth(0, without, 100) == 0
