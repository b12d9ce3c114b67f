"""What a training step does, and what a run measures."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lol.data.ngram import NGramBaselines
from lol.data.packing import held_out_rows, token_documents
from lol.data.text import open_documents, split_documents
from lol.data.tokenizer import load_tokenizer
from lol.errors import UserError
from lol.train.config import BalanceConfig, TrainConfig
from lol.train.evaluate import evaluate
from lol.train.metrics import read_metrics
from lol.train.optim import learning_rate_at
from lol.train.session import Session, prepare
from lol.train.step import take_step
from lol.train.trainer import train
from small_run import saved_tensors, small_config, timeless


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose bias rests from its 6th step on."""
    run = tmp_path_factory.mktemp("runs") / "run"
    train(small_config(corpus, balance={"rate": 0.01, "stop": 0.6}, eval={"every": 3, "ngrams": True}), run)
    return run


def start(corpus: Path, tmp_path: Path, **changes: Any) -> Session:
    session = prepare(small_config(corpus, **changes), tmp_path / "run", None)
    session.model.train()
    return session


def train_records(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run) if record["event"] == "train"]


def gradients(session: Session) -> dict[str, Tensor]:
    """Of the first step, as AdamW got them: its first moments are a tenth of them."""
    states = session.optimizer.state
    used = [item for item in session.model.named_parameters() if item[1] in states]
    assert {name for name, _ in session.model.named_parameters()} - {name for name, _ in used} <= {
        "model.router.noise_weight",
        "model.router.noise_bias",
    }
    return {name: 10 * states[parameter]["exp_avg"] for name, parameter in used}


def windows_of(position_ids: Tensor, shift: int, size: int) -> int:
    """Windows that the documents of some rows have, counted document by document."""
    ends = [[*places.nonzero()[1:, 0].tolist(), len(places)] for places in position_ids == 0]
    lengths = [end - begin for row in ends for begin, end in zip([0, *row], row, strict=False)]
    return sum((length - 1 + shift) // size + 1 for length in lengths)


# --- steps


def test_a_batch_is_its_micro_batches(corpus: Path, tmp_path: Path) -> None:
    changes = {"model": {"router_noise_max": 0}, "optim": {"clip_norm": 0.0}, "balance": {"sequence_aux": 0.5}}
    whole = start(corpus, tmp_path, batch_size=4, accumulation=1, growth={"initial_depth": None}, **changes)
    parts = start(corpus, tmp_path, batch_size=2, accumulation=2, growth={"initial_depth": None}, **changes)
    batch = next(iter(whole.loader))
    halves = [{name: tensor[half] for name, tensor in batch.items()} for half in (slice(0, 2), slice(2, 4))]
    # Documents and targets are spread unevenly, so that a mean of means would be another number.
    assert len({int((half["position_ids"] > 0).sum()) for half in halves}) == 2

    record, other = take_step(whole, [batch]), take_step(parts, halves)
    assert other["loss"] == pytest.approx(record["loss"], abs=1e-6)
    assert other["load"] == record["load"]
    assert other["tokens"] == record["tokens"] == 4 * 32
    assert torch.equal(whole.model.model.expert_bias, parts.model.model.expert_bias)
    assert whole.model.model.expert_bias.abs().max() > 0
    expected = gradients(whole)
    assert expected["model.router.weight"].abs().max() > 1e-4
    for name, gradient in gradients(parts).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6, msg=name)


def test_every_window_of_the_step_counts_once(corpus: Path, tmp_path: Path) -> None:
    session = start(corpus, tmp_path, growth={"initial_depth": 3})
    rows = iter(session.loader)
    batches = [next(rows), next(rows)]
    evaluate(session.model, session.held_out, 2, 4)
    load = take_step(session, batches)["load"]
    positions = torch.cat([batch["position_ids"] for batch in batches])
    assert [sum(depth) for depth in load] == [windows_of(positions, shift, size=8) for shift in (0, 4, 0)]


def test_the_loss_is_the_models_own(corpus: Path, tmp_path: Path) -> None:
    """The balancing losses are in the gradient and not in the number."""
    session = start(corpus, tmp_path, model={"router_noise_max": 0}, growth={"initial_depth": None})
    batch = next(iter(session.loader))
    expected = session.model(**batch, labels=batch["input_ids"]).loss.item()
    assert take_step(session, [batch])["loss"] == pytest.approx(expected, abs=1e-6)


def test_the_bias_moves_once_a_step_and_then_rests(run: Path) -> None:
    expected = torch.zeros(3)
    for record in train_records(run)[:5]:  # stop · steps = 4.8
        load = torch.tensor(record["load"]).sum(0).double()
        expected += 0.01 * torch.sign(load.mean() - load).float()
    bias = saved_tensors(run, 8)["model.safetensors/model.expert_bias"]
    assert expected.abs().max() > 0.015
    torch.testing.assert_close(bias, expected, rtol=0, atol=1e-7)
    assert torch.equal(bias, saved_tensors(run, 6)["model.safetensors/model.expert_bias"])


def test_depth_and_learning_rate_of_every_step(run: Path, corpus: Path) -> None:
    records, config = train_records(run), small_config(corpus)
    # ceil(1 + 3 (1 - sqrt(1 - t/6)))
    assert [record["depth"] for record in records] == [1, 2, 2, 2, 3, 3, 4, 4]
    assert [len(record["load"]) for record in records] == [record["depth"] for record in records]
    rates = [learning_rate_at(step, 8, config.optim) for step in range(8)]
    assert [record["learning_rate"] for record in records] == rates
    assert [record["tokens"] for record in records] == [128 * step for step in range(1, 9)]
    measured = [(record["step"], record["depth"]) for record in read_metrics(run) if record["event"] == "eval"]
    assert measured == [(3, 2), (6, 3), (8, 4)]


def test_the_learning_rate_is_the_optimizers(corpus: Path, tmp_path: Path) -> None:
    """AdamW's first step is as long as the rate, here half of 0.01 in the warm-up, wherever there is a gradient."""
    session = start(corpus, tmp_path, optim={"weight_decay": 0.0})
    before = session.model.lm_head.weight.detach().clone()
    take_step(session, [next(iter(session.loader))])
    assert (session.model.lm_head.weight - before).abs().max().item() == pytest.approx(0.005, rel=1e-3)


@pytest.mark.parametrize("clip", [1e-3, 0.0])
def test_the_gradient_is_clipped_to_the_norm(corpus: Path, tmp_path: Path, clip: float) -> None:
    session = start(corpus, tmp_path, optim={"clip_norm": clip})
    record = take_step(session, [next(iter(session.loader))])
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients(session).values()])).item()
    assert record["grad_norm"] > 0.1
    assert norm == pytest.approx(clip or record["grad_norm"], rel=1e-3)


# --- seeds


def test_a_seed_is_a_run(corpus: Path, tmp_path: Path) -> None:
    seeds = {name: start(corpus, tmp_path, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))}
    first = {name: next(iter(session.loader)) for name, session in seeds.items()}
    for session in seeds.values():
        take_step(session, [first["a"]])
    weights = {name: dict(session.model.named_parameters()) for name, session in seeds.items()}
    assert all(torch.equal(tensor, weights["b"][name]) for name, tensor in weights["a"].items())
    assert torch.equal(first["a"]["input_ids"], first["b"]["input_ids"])
    assert not torch.equal(first["a"]["input_ids"], first["c"]["input_ids"])
    assert not torch.equal(weights["a"]["lm_head.weight"], weights["c"]["lm_head.weight"])


def test_noise_is_a_function_of_seed_step_and_micro_batch(corpus: Path, tmp_path: Path) -> None:
    def seeds_of(seed: int) -> list[int]:
        session = start(corpus, tmp_path, seed=seed)
        drawn = []
        session.model.register_forward_pre_hook(
            lambda _module, _args, kwargs: drawn.append(kwargs["generator"].initial_seed()), with_kwargs=True
        )
        batch = next(iter(session.loader))
        for _ in range(2):
            take_step(session, [batch, batch])
        return drawn

    assert len(set(seeds_of(1) + seeds_of(2))) == 8
    assert seeds_of(1) == seeds_of(1)


# --- strategies and baselines


@pytest.mark.parametrize("strategy", ["aux_loss", "none"])
def test_without_the_bias(corpus: Path, tmp_path: Path, strategy: str) -> None:
    balance = {"strategy": strategy, "global_aux": 5.0, "sequence_aux": 5.0}
    session = start(corpus, tmp_path, balance=balance, optim={"clip_norm": 0.0})
    plain = start(corpus, tmp_path, balance={"sequence_aux": 0.0}, optim={"clip_norm": 0.0})
    batch = next(iter(session.loader))
    take_step(session, [batch])
    take_step(plain, [batch])
    assert not session.model.model.expert_bias.any()
    same = torch.equal(gradients(session)["model.router.weight"], gradients(plain)["model.router.weight"])
    assert same == (strategy == "none")


def test_a_bias_per_depth_leaves_depths_that_did_not_run(corpus: Path, tmp_path: Path) -> None:
    session = start(corpus, tmp_path, model={"balance_scope": "depth"}, growth={"initial_depth": 2})
    take_step(session, [next(iter(session.loader))])
    bias = session.model.model.expert_bias
    assert bias.shape == (4, 3)
    assert bias[:2].abs().amax(1).tolist() == [pytest.approx(0.001)] * 2
    assert not bias[2:].any()


@pytest.mark.parametrize("attention", ["full", "sliding"])
def test_the_fixed_path_baselines_train(corpus: Path, tmp_path: Path, attention: str) -> None:
    model = {"routing": "fixed", "fixed_path": [0, 1, 2, 0], "core_attention": attention}
    outcome = train(small_config(corpus, model=model, steps=2, growth={"initial_depth": None}), tmp_path / "run")
    assert outcome.summary is not None
    load = torch.tensor(outcome.summary["load"])
    assert (load > 0).int().argmax(1).tolist() == [0, 1, 2, 0]
    assert (load > 0).sum(1).tolist() == [1] * 4
    assert outcome.summary["busiest_block_share"] == 0.5


def test_a_model_without_a_core_trains(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model={"num_routed_depths": 0}, steps=2, growth={"initial_depth": None})
    outcome = train(config, tmp_path / "run")
    assert outcome.summary is not None
    assert outcome.summary["load"] == []
    assert outcome.summary["busiest_block_share"] == 0


# --- measuring


def test_evaluation_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus, steps=4, eval={"every": 1}), tmp_path / "often")
    train(small_config(corpus, steps=4, eval={"every": 0}), tmp_path / "never")
    often, never = saved_tensors(tmp_path / "often", 4), saved_tensors(tmp_path / "never", 4)
    assert [name for name in often if not torch.equal(often[name], never[name])] == []
    assert [record["event"] for record in timeless(tmp_path / "never")] == ["train"] * 4 + ["summary"]
    assert [record["event"] for record in timeless(tmp_path / "often")] == ["train", "eval"] * 4 + ["summary"]


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_mode_generators_and_bias(corpus: Path, tmp_path: Path, training: bool) -> None:
    session = start(corpus, tmp_path)
    session.model.train(training)
    state, bias = torch.get_rng_state(), session.model.model.expert_bias.clone()
    first = evaluate(session.model, session.held_out, 2, 4)
    assert session.model.training == training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(session.model.model.expert_bias, bias)
    second = evaluate(session.model, session.held_out, 2, 4)
    assert first.loss == second.loss
    assert torch.equal(first.load, second.load)


def test_the_evaluation_loss_is_the_mean_over_targets(corpus: Path, tmp_path: Path) -> None:
    session = start(corpus, tmp_path)
    session.model.eval()
    losses = []
    for row in session.held_out:
        logits = session.model(**{name: tensor[None] for name, tensor in row.items()}).logits[0].double()
        for place in range(1, len(row["input_ids"])):
            if row["position_ids"][place] > 0:
                losses.append(-logits[place - 1].log_softmax(-1)[row["input_ids"][place]].item())
    assert len(session.held_out) == 5
    assert len(losses) < 5 * 31
    for batch_size in (1, 2, 5, 64):
        measured = evaluate(session.model, session.held_out, batch_size, 4)
        assert measured.loss == pytest.approx(np.mean(losses), abs=2e-6)
        assert measured.load.sum(1).tolist() == [
            windows_of(torch.stack([row["position_ids"] for row in session.held_out]), shift, 8)
            for shift in (0, 4, 0, 4)
        ]


def test_the_summary_and_its_counted_models(run: Path, corpus: Path) -> None:
    summary = read_metrics(run)[-1]
    last_measured = [record for record in read_metrics(run) if record["event"] == "eval"][-1]
    assert (summary["event"], summary["step"], summary["tokens"]) == ("summary", 8, 8 * 128)
    assert summary["held_out_loss"] == last_measured["loss"]
    load = np.array(summary["load"])
    assert summary["busiest_block_share"] == load.sum(0).max() / load.sum()

    tokenizer = load_tokenizer(run / "checkpoints" / "step-00000008")
    documents, held_out = split_documents(open_documents(str(corpus), document_chars=40), 0.2)
    rows = held_out_rows(held_out, tokenizer, 32, 5)
    targets = [
        int(token)
        for row in rows
        for token, position in zip(row["input_ids"], row["position_ids"], strict=True)
        if position > 0
    ]
    counts = Counter(token for ids in token_documents(documents, tokenizer) for token in ids[1:])
    total = sum(counts.values()) + len(tokenizer)
    by_hand = -np.mean([np.log((counts[token] + 1) / total) for token in targets])
    assert summary["unigram_loss"] == pytest.approx(by_hand, abs=1e-9)
    counted = NGramBaselines.count(token_documents(documents, tokenizer), len(tokenizer))
    assert summary["bigram_loss"] == pytest.approx(counted.bigram_loss(rows), abs=1e-12)


# --- configurations that cannot work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"accumulation": 0}, "accumulation must be at least 1, not 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"optim": {"clip_norm": -1.0}}, "optim.clip_norm must be at least 0"),
        ({"optim": {"betas": (0.9, 1.0)}}, "optim.betas must be two numbers from 0 to below 1"),
        ({"optim": {"learning_rate": float("nan")}}, "optim.learning_rate must be at least 0, not nan"),
        ({"eval": {"every": -1}}, "eval.every must be at least 0"),
        ({"growth": {"initial_depth": 5}}, "growth.initial_depth=5, but the model has 4 routed depths: 1 to 4"),
        ({"growth": {"until": 1.5}}, "growth.until must be 0 to 1, not 1.5"),
        ({"growth": {"backprop_depth": 0}}, "growth.backprop_depth=0, but the last depth"),
        ({"growth": {"sampled": True, "unit": 3}}, "growth.unit=3 does not divide the model's 4 routed depths"),
        ({"growth": {"sigma": -1.0}}, "growth.sigma must be at least 0"),
        ({"balance": {"stop": -0.1}}, "balance.stop must be 0 to 1"),
    ],
)
def test_numbers_that_cannot_work(corpus: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small_config(corpus, **changes)


def test_the_defaults_can_work() -> None:
    assert TrainConfig().balance == BalanceConfig()
