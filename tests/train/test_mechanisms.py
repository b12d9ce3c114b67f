"""The trainer with truncated backprop, sampled depth, mixture-of-experts layers and router-only tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from lol.data.collate import collate_packed
from lol.train.evaluate import evaluate
from lol.train.metrics import read_metrics
from lol.train.session import Session, prepare
from lol.train.step import take_step
from lol.train.trainer import train
from small_run import assert_same_run, saved_tensors, small_config

QUIET = {"router_noise_max": 0}


def start(corpus: Path, tmp_path: Path, **changes: Any) -> Session:
    session = prepare(small_config(corpus, **changes), tmp_path / "run", None)
    session.model.train()
    return session


def first_gradients(session: Session) -> dict[str, Tensor]:
    """As AdamW got them: its first moments are a tenth of them. 0 where it got none."""
    states = session.optimizer.state
    return {
        name: 10 * states[parameter]["exp_avg"] if parameter in states else torch.zeros_like(parameter)
        for name, parameter in session.model.named_parameters()
    }


def records(run: Path, event: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run) if record["event"] == event]


# --- truncated backprop


@pytest.mark.parametrize("first", [False, True])
def test_the_steps_gradient_is_truncated(corpus: Path, tmp_path: Path, first: bool) -> None:
    growth = {"initial_depth": None, "backprop_depth": 2, "first_window_full_backprop": first}
    changes = {"model": QUIET, "balance": {"sequence_aux": 0.0}, "optim": {"clip_norm": 0.0}}
    session = start(corpus, tmp_path, growth=growth, **changes)
    batch = next(iter(session.loader))
    session.model(
        **batch, labels=batch["input_ids"], backprop_depth=2, first_window_full_backprop=first
    ).loss.backward()
    expected = {name: parameter.grad for name, parameter in session.model.named_parameters()}
    session.optimizer.zero_grad()
    take_step(session, [batch])
    found = first_gradients(session)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], torch.zeros_like(found[name]) if grad is None else grad)
    assert bool(found["model.depth_embedding"][0].any()) == first
    assert found["model.depth_embedding"][3].any()


# --- sampled depth


def test_a_run_of_sampled_depth(corpus: Path, tmp_path: Path) -> None:
    changes = {"growth": {"initial_depth": None, "sampled": True}, "eval": {"every": 1}}
    train(small_config(corpus, **changes), tmp_path / "run")
    depths = [record["depth"] for record in records(tmp_path / "run", "train")]
    assert len({*depths}) > 1
    assert [len(record["load"]) for record in records(tmp_path / "run", "train")] == depths
    # Evaluations are comparable: they run what is due.
    assert {record["depth"] for record in records(tmp_path / "run", "eval")} == {4}


# --- mixture-of-experts layers

MOE = {"moe_num_experts": 3, "moe_intermediate_size": 8}


@pytest.mark.parametrize("depths", [0, 4])
def test_the_biases_of_moe_layers_follow_the_load_of_the_step(corpus: Path, tmp_path: Path, depths: int) -> None:
    model = MOE | {"num_routed_depths": depths}
    session = start(corpus, tmp_path, model=model, growth={"initial_depth": None}, balance={"rate": 0.5})
    rows = iter(session.loader)
    record = take_step(session, [next(rows), next(rows)])
    load = torch.tensor(record["moe_load"]).double()
    # Two layers, two micro-batches of two rows of 32 tokens, two experts each.
    assert load.sum(1).tolist() == [256.0, 256.0]
    for layer, used in zip(session.model.model.moe_layers, load, strict=True):
        expected = 0.5 * torch.sign(used.mean() - used).float()
        assert torch.equal(layer.moe.router.expert_bias, expected)
        assert expected.any()
    before = [layer.moe.router.expert_bias.clone() for layer in session.model.model.moe_layers]
    evaluate(session.model, session.held_out, 2, depths)
    assert all(
        torch.equal(bias, layer.moe.router.expert_bias)
        for bias, layer in zip(before, session.model.model.moe_layers, strict=True)
    )


@pytest.mark.parametrize("strategy", ["loss_free", "aux_loss"])
def test_moe_layers_learn_from_the_auxiliary_loss(corpus: Path, tmp_path: Path, strategy: str) -> None:
    """With and without the loss, routers get different gradients; the micro-batches count as one batch."""
    changes = {"model": QUIET | MOE, "growth": {"initial_depth": None}, "optim": {"clip_norm": 0.0}}
    grads = []
    for coefficient in (0.0, 1.0):
        balance = {"strategy": strategy, "sequence_aux": coefficient, "global_aux": coefficient}
        session = start(corpus, tmp_path, balance=balance, **changes)
        take_step(session, [next(iter(session.loader))])
        grads.append(first_gradients(session))
    for name in ("model.prelude.0.moe.router.weight", "model.coda.0.moe.router.weight", "model.router.weight"):
        assert (grads[0][name] - grads[1][name]).abs().max() > 1e-4
    assert torch.equal(grads[0]["lm_head.weight"], grads[1]["lm_head.weight"])


def test_a_run_with_everything_on_resumes_exactly(corpus: Path, tmp_path: Path) -> None:
    changes = {
        "model": MOE | {"depth_film": True, "input_injection": "diagonal", "balance_scope": "depth"},
        "growth": {"sampled": True, "backprop_depth": 2, "first_window_full_backprop": True},
        "checkpoint_every": 2,
        "keep_checkpoints": 10,
    }
    train(small_config(corpus, steps=4, **changes), tmp_path / "whole")
    (tmp_path / "part").mkdir()
    for entry in (tmp_path / "whole").iterdir():
        if entry.name in ("config.json", "metrics.jsonl"):
            (tmp_path / "part" / entry.name).write_bytes(entry.read_bytes())
    folder = "checkpoints/step-00000002"
    (tmp_path / "part" / folder).mkdir(parents=True)
    for file in (tmp_path / "whole" / folder).iterdir():
        (tmp_path / "part" / folder / file.name).write_bytes(file.read_bytes())
    train(small_config(corpus, steps=4, **changes), tmp_path / "part", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "part", 4)
    biases = {name: tensor for name, tensor in saved_tensors(tmp_path / "part", 4).items() if "expert_bias" in name}
    assert len(biases) == 3
    assert all(bias.dtype == torch.float32 and bias.any() for bias in biases.values())


# --- router-only tokens


def with_router_only(batch: Mapping[str, Tensor], token: int) -> dict[str, Tensor]:
    """The second token of every document is for the router only."""
    hidden = torch.where(batch["position_ids"] == 1, token, -1)
    return dict(batch) | {"router_only_ids": hidden}


def test_a_column_of_router_only_tokens_trains(corpus: Path, tmp_path: Path) -> None:
    changes = {"model": QUIET | {"router_only_tokens": True}, "growth": {"initial_depth": None}}
    session = start(corpus, tmp_path, optim={"clip_norm": 0.0}, **changes)
    batch = with_router_only(next(iter(session.loader)), token=7)
    logits = session.model(**batch).logits
    scored = pad(batch["position_ids"][:, 1:] > 1, (0, 1))
    targets = batch["input_ids"].roll(-1, 1)[scored]
    expected = torch.nn.functional.cross_entropy(logits[scored], targets).item()
    assert 0 < int(scored.sum()) < int((batch["position_ids"] > 0).sum())
    assert take_step(session, [batch])["loss"] == pytest.approx(expected, abs=1e-5)
    assert first_gradients(session)["model.filler_embedding"].any()

    # What stands at the hidden place is read by nothing, not by the loss either.
    other = dict(batch) | {"input_ids": torch.where(batch["router_only_ids"] >= 0, 9, batch["input_ids"])}
    session.model.eval()
    losses = [session.model(**given, labels=given["input_ids"]).loss.item() for given in (batch, other)]
    assert losses[0] == losses[1]
    elsewhere = dict(batch) | {"router_only_ids": torch.where(batch["router_only_ids"] >= 0, 11, -1)}
    routes = [session.model(**given, output_router_logits=True).router_logits[0] for given in (batch, elsewhere)]
    assert not torch.equal(*routes)


def test_held_out_rows_with_router_only_tokens(corpus: Path, tmp_path: Path) -> None:
    session = start(corpus, tmp_path, model={"router_only_tokens": True})
    rows = [with_router_only(row, token=5) for row in session.held_out]
    found = evaluate(session.model, rows, 2, 4)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        expected = session.model.eval()(**batch, labels=batch["input_ids"]).loss.item()
    assert found.loss == pytest.approx(expected, abs=1e-5)


def test_labels_for_the_trainer_leave_router_only_tokens_out() -> None:
    row = {"input_ids": torch.tensor([3, 4, 5, 6]), "position_ids": torch.tensor([0, 1, 2, 0])}
    hidden = row | {"router_only_ids": torch.tensor([-1, 8, -1, -1])}
    assert collate_packed([row])["labels"].tolist() == [[-100, 4, 5, -100]]
    batch = collate_packed([hidden])
    assert batch["labels"].tolist() == [[-100, -100, 5, -100]]
    assert batch["router_only_ids"].tolist() == [[-1, 8, -1, -1]]
