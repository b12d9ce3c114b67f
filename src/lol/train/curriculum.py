"""Depth as a function of the step."""

import math

from lol.train.config import TrainConfig


def growing_depth(step: int, initial: int, final: int, period: float) -> int:
    """Routed depths to run at `step` (from 0): `ceil(D0 + (D - D0)(1 - sqrt(1 - step/T)))`, D from T on. (Article.)

    The depth rises slowly at first and fastest at the end. The article calls it the mean depth; every step here runs
    exactly this depth (decided here).
    """
    if step >= period:
        return final
    grown = initial + (final - initial) * (1 - math.sqrt(1 - step / period))
    # Rounding may put a whole depth a hair above itself.
    return math.ceil(grown - 1e-9)


def depth_at(step: int, config: TrainConfig, steps: int) -> int:
    """Routed depths that a run of `steps` steps executes at `step` (from 0); it never falls."""
    final = config.model.num_routed_depths
    initial = config.growth.initial_depth
    if initial is None:
        return final
    return growing_depth(step, initial, final, config.growth.until * steps)
