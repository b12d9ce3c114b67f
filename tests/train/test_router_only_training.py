"""Training on a file with a column of strategies that the router alone reads."""

import json
import signal
from pathlib import Path

import pytest
import torch

from lol.errors import UserError
from lol.paths.record import record_paths
from lol.reports.run import report_run
from lol.train.config import TrainConfig
from lol.train.corpus import open_held_out
from lol.train.loading import load_model
from lol.train.session import prepare
from lol.train.trainer import train
from small_run import FLAGS, Lol, assert_same_run, small_config, stop_after

# Of bytes that no text has, so that their embeddings are read by the router or by nobody.
STRATEGIES = ("#", "%")


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("puzzles") / "puzzles.jsonl"
    texts = [f"{k} the path of a token goes by the shelf again" for k in range(60)]
    rows = [{"text": text, "strategy": STRATEGIES[k % 2]} for k, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def puzzle_config(puzzles: Path, **changes) -> TrainConfig:
    model = {"router_only_tokens": True} | changes.pop("model", {})
    return small_config(puzzles, model=model, data={"router_only_column": "strategy"}, **changes)


def test_the_strategy_reaches_the_loss_through_the_router_alone(puzzles: Path, tmp_path: Path) -> None:
    session = prepare(puzzle_config(puzzles, model={"router_noise_max": 0.0}), tmp_path, None)
    model, batch = session.model, next(iter(session.loader))
    told = batch["router_only_ids"][batch["router_only_ids"] >= 0].unique()
    assert sorted(told.tolist()) == sorted(session.tokenizer.convert_tokens_to_ids(list(STRATEGIES)))
    assert not torch.isin(batch["input_ids"], told).any()

    def gradient(**path) -> torch.Tensor:
        model.zero_grad()
        model(**batch, labels=batch["input_ids"], **path).loss.backward()
        assert model.model.embed_tokens.weight.grad is not None
        return model.model.embed_tokens.weight.grad[told]

    assert gradient().abs().amin() > 0
    # With the router out of the way, nothing reads it.
    assert not gradient(path=[0, 1, 2, 0], path_weight=1.0).any()
    other = batch | {"router_only_ids": torch.where(batch["router_only_ids"] >= 0, told.flip(0)[0], -1)}
    logits = [model(**given, path=[0, 1, 2, 0], path_weight=1.0).logits for given in (batch, other)]
    assert torch.equal(*logits)
    assert not torch.equal(*(model(**given).logits for given in (batch, other)))


@pytest.mark.slow
def test_a_run_on_two_strategies(puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = puzzle_config(puzzles), tmp_path / "run"
    train(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 5, signal.SIGTERM)
        assert train(config, run).stopped_by == "SIGTERM"
    outcome = train(config, run, resume=True)
    assert_same_run(tmp_path / "straight", run, 8)

    model, tokenizer = load_model(run)
    rows = open_held_out(config, tokenizer, 5)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        loss = model(**batch, labels=batch["input_ids"]).loss.item()
    assert outcome.summary is not None
    assert outcome.summary["held_out_loss"] == pytest.approx(loss, abs=1e-5)

    # Records and reports route as training did.
    silent = [{name: tensor for name, tensor in row.items() if name != "router_only_ids"} for row in rows]
    table, without = record_paths(model, rows), record_paths(model, silent)
    routing = model(**batch, output_router_logits=True).routing
    assert table["weight"].sum() == pytest.approx(routing.weights[routing.experts >= 0].sum().item(), rel=1e-5)
    assert not table["weight"].equals(without["weight"])
    page = report_run(run).read_text()
    assert all(strategy in page for strategy in STRATEGIES)


def test_the_command_line_takes_the_column(lol: Lol, puzzles: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--data", puzzles, "--steps", "1", "--data.router-only-column"]
    code, _, err = lol("train", "--run", tmp_path / "run", *flags, "strategy")
    assert code == 2
    assert "data.router_only_column needs a model that hides its tokens: model.router_only_tokens=True" in err
    with pytest.raises(UserError, match=r"needs a router: this model has none"):
        puzzle_config(puzzles, model={"routing": "fixed", "fixed_path": [0, 1, 2, 0]})
    code, _, err = lol("train", "--run", tmp_path / "run", "--model.router-only-tokens", *flags, "plan")
    assert code == 2
    assert "no column 'plan'" in err
    assert lol("train", "--run", tmp_path / "run", "--model.router-only-tokens", *flags, "strategy")[::2] == (0, "")
