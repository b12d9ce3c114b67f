"""A budget ends a run at the step that the plan says, resumed or not, and the log counts what is used up."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lol.errors import UserError
from lol.model.cost import count_flops, training_flops
from lol.train.budget import Plan, checkpoint_bytes, plan_run
from lol.train.config import BudgetConfig, TrainConfig, as_json, from_json
from lol.train.curriculum import depth_at
from lol.train.metrics import read_metrics
from lol.train.optim import learning_rate_at
from lol.train.trainer import train
from model_cases import bounded
from small_run import assert_same_run, saved_tensors, small_config, stop_after


def plan(**changes: Any) -> Plan:
    config = small_config(Path("corpus"), **changes)
    return plan_run(config, config.model)


def summed(made: Plan) -> int:
    return sum(made.flops(step) for step in range(made.steps))


def trained(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run) if record["event"] == "train"]


# --- the plan


def test_without_a_budget_the_steps_are_all_taken():
    made = plan(steps=8)
    assert (made.steps, made.limit) == (8, "steps")
    depths = [made.depth(step) for step in range(8)]
    assert depths == [1, 2, 2, 2, 3, 3, 4, 4]
    # 2 · 2 rows of 32 tokens, forward and backward at the depth of each step.
    model = made.config.model
    expected = [4 * count_flops(model, 32, depth).training for depth in depths]
    assert [made.flops(step) for step in range(8)] == expected
    assert made.total_flops == sum(expected)
    assert made.total_tokens == 8 * 128


def test_sampled_depth_and_truncated_backprop_are_counted_as_they_run():
    made = plan(steps=40, growth={"initial_depth": None, "sampled": True, "backprop_depth": 2})
    depths = [made.depth(step) for step in range(40)]
    assert len({*depths}) > 2
    assert {made.due_depth(step) for step in range(40)} == {4}
    flops = [4 * training_flops(made.config.model, 32, depth, backprop_depth=2) for depth in depths]
    assert [made.flops(step) for step in range(40)] == flops
    assert made.total_flops == sum(flops)
    half = plan(
        steps=40,
        growth={"initial_depth": None, "sampled": True, "backprop_depth": 2},
        budget=BudgetConfig(flops=sum(flops) // 2),
    )
    assert half.total_flops <= sum(flops) // 2 < half.total_flops + half.flops(half.steps)


@bounded(50)
@given(
    steps=st.integers(1, 25),
    initial=st.none() | st.integers(1, 4),
    until=st.floats(0, 1),
    share=st.floats(0.02, 1.3),
)
def test_a_flop_budget_ends_the_longest_run_that_it_pays_for(
    steps: int, initial: int | None, until: float, share: float
):
    """Compared with trying every horizon, each with its own growth."""
    growth = {"initial_depth": initial, "until": until}
    whole = plan(steps=steps, growth=growth)
    assert whole.total_flops == summed(whole)
    budget = max(share * whole.total_flops, whole.flops_of_depth[-1])
    made = plan(steps=steps, growth=growth, budget={"flops": budget})
    costs = {
        horizon: sum(whole.flops_of_depth[depth_at(step, whole.config, horizon)] for step in range(horizon))
        for horizon in range(1, steps + 1)
    }
    assert made.steps == max(horizon for horizon, cost in costs.items() if cost <= budget)
    assert made.limit == ("flops" if made.steps < steps else "steps")
    assert made.total_flops == summed(made) <= budget


def test_whichever_comes_first_ends_the_run():
    flops = plan(steps=5).total_flops
    limits = {
        (6, None, None): (6, "steps"),
        (6, 128 * 6, None): (6, "steps"),
        (6, 128 * 5 + 127, None): (5, "tokens"),
        (6, 128 * 4, flops): (4, "tokens"),
        (6, 128 * 6, flops): (5, "flops"),
        (6, 128 * 6, flops - 1): (4, "flops"),
    }
    for (steps, tokens, budget), expected in limits.items():
        made = plan(steps=steps, budget={"tokens": tokens, "flops": budget})
        assert (made.steps, made.limit) == expected


@pytest.mark.parametrize("name", ["tokens", "flops"])
def test_a_budget_that_pays_for_no_step_is_a_mistake(name: str):
    with pytest.raises(UserError, match=f"budget.{name}=127 is less than one step, which takes .*: raise it"):
        plan(budget={name: 127})


@pytest.mark.parametrize("budget", [{"tokens": 0}, {"tokens": -5}, {"flops": float("inf")}, {"flops": float("nan")}])
def test_a_budget_is_positive_and_finite(budget: dict[str, Any]):
    name = next(iter(budget))
    with pytest.raises(UserError, match=f"budget.{name} must be positive and finite, or None for no budget"):
        TrainConfig(budget=BudgetConfig(**budget))


def test_a_budget_survives_json():
    config = TrainConfig(budget=BudgetConfig(tokens=10**10, flops=1.73e19))
    assert from_json(json.loads(json.dumps(as_json(config)))).budget == config.budget


# --- the run

# The bias rests after half of the steps.
BALANCE = {"rate": 0.01, "stop": 0.5}


@pytest.fixture(scope="module")
def budget() -> dict[str, Any]:
    """Pays for 6 of the 8 steps, growth stretched over 6."""
    return {"flops": float(plan(steps=6).total_flops + 1)}


@pytest.fixture(scope="module")
def straight(corpus: Path, budget: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    outcome = train(small_config(corpus, budget=budget, balance=BALANCE), run)
    assert (outcome.step, outcome.stopped_by) == (6, None)
    assert outcome.summary is not None
    assert outcome.summary["ended_by"] == "flops"
    return run


def test_the_schedules_end_with_the_budget(straight: Path, corpus: Path):
    """Depth and learning rate are those of a run of 6 steps, not the beginning of one of 8."""
    records, config = trained(straight), small_config(corpus)
    short = plan(steps=6)
    assert [record["depth"] for record in records] == [short.depth(step) for step in range(6)] == [1, 2, 2, 3, 3, 4]
    assert [record["learning_rate"] for record in records] == [
        learning_rate_at(step, 6, config.optim) for step in range(6)
    ]
    assert records[-1]["learning_rate"] == pytest.approx(0.1 * config.optim.learning_rate)
    biases = [saved_tensors(straight, step)["model.safetensors/model.expert_bias"] for step in (3, 6)]
    assert biases[0].abs().max() > 0
    assert torch.equal(*biases)


def test_the_log_counts_tokens_and_flops(straight: Path, budget: dict[str, Any]):
    records, short = trained(straight), plan(steps=6)
    assert [record["tokens"] for record in records] == [128 * step for step in range(1, 7)]
    steps = [short.flops(step) for step in range(6)]
    assert [record["flops"] for record in records] == [sum(steps[: count + 1]) for count in range(6)]
    assert records[-1]["flops"] == read_metrics(straight)[-1]["flops"] <= budget["flops"]
    saved = json.loads((straight / "checkpoints/step-00000006/training.json").read_text())["state"]
    assert saved["flops"] == records[-1]["flops"]


def test_a_resumed_run_keeps_the_count_and_stops_at_the_same_step(
    corpus: Path, straight: Path, budget: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, config = tmp_path / "run", small_config(corpus, budget=budget, balance=BALANCE)
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        assert train(config, run).step == 4
    assert train(config, run, resume=True).step == 6
    assert_same_run(run, straight, 6)


def test_another_budget_is_another_run(corpus: Path, straight: Path, budget: dict[str, Any]):
    """It would move the schedules under the steps that are taken."""
    with pytest.raises(UserError) as caught:
        train(small_config(corpus, budget={"flops": 2 * budget["flops"]}, balance=BALANCE), straight, resume=True)
    assert str(caught.value).splitlines()[1:] == [
        f"  budget.flops: {budget['flops']} in the run, {2 * budget['flops']} now"
    ]


def test_the_run_says_what_its_budget_pays_for(
    corpus: Path, budget: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train(small_config(corpus, budget=budget | {"tokens": 128}), tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert "1 steps of 128 tokens" in lines[0]
    assert lines[0].endswith("as many of 8 as budget.tokens allows")
    assert "  128 tokens, " in lines[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"routing": "fixed", "fixed_path": [0, 1, 2, 0]}},
        {"model": {"moe_num_experts": 3}},
        {"model": {"moe_num_experts": 3, "num_routed_depths": 0}, "growth": {"initial_depth": None}},
    ],
    ids=str,
)
def test_a_checkpoint_is_as_large_as_counted(corpus: Path, tmp_path: Path, changes: dict[str, Any]):
    config = small_config(corpus, steps=1, **changes)
    train(config, tmp_path / "run")
    tensors = saved_tensors(tmp_path / "run", 1)
    floats = [
        tensor.nbytes
        for name, tensor in tensors.items()
        if not name.startswith("training.") and not name.endswith(".step") and tensor.dtype == torch.float32
    ]
    assert sum(floats) == checkpoint_bytes(config.model)
