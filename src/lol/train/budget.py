"""What a run costs, step by step, and the step at which a budget ends it."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.cost import count_parameters, training_flops
from lol.train.config import TrainConfig
from lol.train.curriculum import depth_at, executed_depth

Limit = Literal["steps", "tokens", "flops"]


@dataclass(frozen=True)
class Plan:
    """How long a run is and what each of its steps costs.

    All of it follows from the configuration, so a resumed run goes on by the plan that it began with. Made by
    `plan_run`. Only training counts: no evaluation, no optimizer step.
    """

    config: TrainConfig
    steps: int
    """Optimizer steps that are taken: the horizon of learning rate, growth and balancing."""
    limit: Limit
    """What ends the run; the steps, where a budget ends it at the same step."""
    flops_of_depth: tuple[int, ...]
    """Floating-point operations of a step that runs 0, 1, … D routed depths."""

    def due_depth(self, step: int) -> int:
        """Routed depths that are due at `step` (from 0)."""
        return depth_at(step, self.config, self.steps)

    def depth(self, step: int) -> int:
        """Routed depths that `step` (from 0) runs: those that are due, or a number drawn around them."""
        return executed_depth(step, self.config, self.steps)

    def flops(self, step: int) -> int:
        """Floating-point operations of `step` (from 0)."""
        return self.flops_of_depth[self.depth(step)]

    @property
    def total_flops(self) -> int:
        """Of the whole run."""
        return _total_flops(self.config, self.steps, self.flops_of_depth)

    @property
    def total_tokens(self) -> int:
        """Of the whole run."""
        return self.steps * self.config.tokens_per_step


def plan_run(config: TrainConfig, model: LoLConfig) -> Plan:
    """Find the last step of a run: `config.steps`, or the last one within every budget.

    Growth stretches over the run, so a shorter run has fewer steps of each depth, and the horizon is the longest whose
    steps, growth included, fit the budget. (Decided here.)

    Args:
        config: The run.
        model: Its model, with the vocabulary of its tokenizer.

    Raises:
        UserError: a budget is less than one step.
    """
    rows = config.batch_size * config.accumulation
    flops_of_depth = tuple(
        rows
        * training_flops(
            model,
            config.data.context_length,
            depth,
            backprop_depth=config.growth.backprop_depth,
            first_window=config.growth.first_window_full_backprop,
        )
        for depth in range(model.num_routed_depths + 1)
    )
    # A run of one more step costs more, whatever the growth does: a search in halves finds the longest. Sampled depth
    # may break that by a step or so; what is found is within the budget all the same.
    horizons = range(1, config.steps + 1)
    used: dict[Limit, Callable[[int], int]] = {
        "tokens": lambda steps: steps * config.tokens_per_step,
        "flops": lambda steps: _total_flops(config, steps, flops_of_depth),
    }
    steps, limit = config.steps, cast(Limit, "steps")
    for name, cost in used.items():
        budget = getattr(config.budget, name)
        if budget is None:
            continue
        if cost(1) > budget:
            raise UserError(f"budget.{name}={budget:g} is less than one step, which takes {cost(1):.3g}: raise it")
        within = bisect_right(horizons, budget, key=cost)
        if within < steps:
            steps, limit = within, name
    return Plan(config, steps, limit, flops_of_depth)


def _total_flops(config: TrainConfig, steps: int, flops_of_depth: tuple[int, ...]) -> int:
    """Of a run of so many steps. Depth that is not sampled never falls, so the steps of each depth lie between two that
    are searched."""
    if config.growth.sampled:
        return sum(flops_of_depth[executed_depth(step, config, steps)] for step in range(steps))

    def first_step_deeper_than(depth: int) -> int:
        return bisect_left(range(steps), depth + 1, key=lambda step: depth_at(step, config, steps))

    total, begin = 0, 0
    for depth, flops in enumerate(flops_of_depth):
        end = first_step_deeper_than(depth)
        total += (end - begin) * flops
        begin = end
    return total


def checkpoint_bytes(model: LoLConfig) -> int:
    """Bytes of the tensors in a checkpoint: the weights and AdamW's two moments in float32, and the balancing bias."""
    biases = (model.num_prelude_layers + model.num_coda_layers) * (model.moe_num_experts or 0)
    if model.routing == "learned" and model.num_routed_depths:
        biases += model.num_experts * (1 if model.balance_scope == "global" else model.num_routed_depths)
    return 4 * (3 * count_parameters(model).total + biases)
