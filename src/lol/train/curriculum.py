"""Depth as a function of the step."""

import math

import torch

from lol.data.order import generator_named
from lol.train.config import TrainConfig


def growing_depth(step: int, initial: int, final: int, period: float) -> int:
    """Routed depths to run at `step` (from 0): `ceil(D0 + (D - D0)(1 - sqrt(1 - step/T)))`, D from T on. (Article.)

    The depth rises slowly at first and fastest at the end. The article calls it the mean depth; unless it is sampled
    around, every step here runs exactly this depth (decided here).
    """
    if step >= period:
        return final
    grown = initial + (final - initial) * (1 - math.sqrt(1 - step / period))
    # Rounding may put a whole depth a hair above itself.
    return math.ceil(grown - 1e-9)


def sampled_depth(seed: int, step: int, mean: int, most: int, *, sigma: float = 0.5, unit: int = 1) -> int:
    """A depth drawn for one step: `unit · (Poisson(λ) + 1)`, λ log-normal, and at most `most`. (Huginn's law.)

    ln λ is normal with standard deviation sigma and mean ln r - sigma²/2, r = mean / unit, so that λ's own mean is r:
    what is drawn is r + 1 units on average, before the limit. A model has no more depths than it is built with, so a
    draw beyond runs all of them (decided here).

    A function of the seed and the step alone: every rank and every resumed run draws the same, without a word.

    Args:
        seed: Of the run.
        step: From 0.
        mean: Depths around which to draw, at least 1.
        most: Depths of the model.
        sigma: Spread of ln λ.
        unit: Depths that come and go together: the blocks of one loop in a looped model.
    """
    generator = generator_named(f"sampled depth {seed} {step}")
    normal = torch.randn((), generator=generator, dtype=torch.float64)
    rate = torch.exp(math.log(mean / unit) - sigma**2 / 2 + sigma * normal)
    return min(most, unit * (int(torch.poisson(rate, generator=generator)) + 1))


def depth_at(step: int, config: TrainConfig, steps: int) -> int:
    """Routed depths that are due at `step` (from 0) of a run of `steps` steps; it never falls.

    Evaluation runs these, and a sampled depth is drawn around them.
    """
    final = config.model.num_routed_depths
    initial = config.growth.initial_depth
    if initial is None:
        return final
    return growing_depth(step, initial, final, config.growth.until * steps)


def executed_depth(step: int, config: TrainConfig, steps: int) -> int:
    """Routed depths that training executes at `step`."""
    depth = depth_at(step, config, steps)
    if not config.growth.sampled or depth == 0:
        return depth
    most, growth = config.model.num_routed_depths, config.growth
    return sampled_depth(config.seed, step, depth, most, sigma=growth.sigma, unit=growth.unit)
