"""Training on several sources: what is logged of each, what the command line takes, and resuming in the middle."""

import json
import signal
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch

from lol.data.mixture import MixedRows, held_out_rows_by_source, open_sources, split_sources
from lol.data.tokenizer import load_tokenizer
from lol.errors import UserError
from lol.train.config import as_json, from_json
from lol.train.corpus import open_held_out
from lol.train.evaluate import evaluate, evaluate_sources
from lol.train.loading import load_model
from lol.train.metrics import read_metrics
from lol.train.session import prepare
from lol.train.trainer import train
from small_run import FLAGS, Lol, assert_same_run, small_config, stop_after


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Long lines in one, short ones in the other, which is small."""
    folder = tmp_path_factory.mktemp("sources")
    texts = {"long": ["the shelf of layers " * 12] * 60, "short": ["a path of tokens goes by the router again"] * 12}
    for name, lines in texts.items():
        (folder / f"{name}.txt").write_text("\n\n".join(f"{line} {k}" for k, line in enumerate(lines)))
    return [str(folder / f"{name}.txt") for name in texts]


@pytest.fixture(scope="module")
def run(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("mixed") / "run"
    train(mixed_config(files), run)
    return run


def mixed_config(files: list[str], **changes):
    data = {"source": (f"{files[0]}=1", f"{files[1]}=3"), "held_out_fraction": 0.3} | changes.pop("data", {})
    return small_config(Path(files[0]), data=data, **changes)


def test_the_losses_of_the_sources_and_their_epochs_are_logged(run: Path, files: list[str]) -> None:
    records = [record for record in read_metrics(run) if record["event"] in ("eval", "summary")]
    assert [record["event"] for record in records] == ["eval", "eval", "summary"]
    for record in records:
        assert list(record["losses"]) == list(record["epochs"]) == files
    assert records[-1]["losses"][files[0]] != records[-1]["losses"][files[1]]
    assert records[-1]["epochs"][files[0]] == 0 < records[-1]["epochs"][files[1]]


def test_the_loss_over_all_sources_is_the_mean_over_their_targets(run: Path, files: list[str]) -> None:
    summary = read_metrics(run)[-1]
    model, tokenizer = load_model(run)
    held_out = split_sources(open_sources((f"{files[0]}=1", f"{files[1]}=3"), document_chars=40), 0.3)[1]
    rows = held_out_rows_by_source(held_out, tokenizer, 32, 5)
    assert [len(some) for some in rows.values()] == [1, 4]
    result, losses = evaluate_sources(model, rows, 2, 4)
    assert summary["losses"] == pytest.approx(losses, abs=1e-6)
    together = evaluate(model, [row for some in rows.values() for row in some], 64, 4)
    assert summary["held_out_loss"] == pytest.approx(together.loss, abs=1e-6)
    assert (result.targets, result.load.tolist()) == (together.targets, together.load.tolist())


def test_one_source_has_epochs_and_no_list_of_losses(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus, steps=2), tmp_path / "run")
    summary = read_metrics(tmp_path / "run")[-1]
    assert list(summary["epochs"]) == [str(corpus)]
    assert "losses" not in summary


def test_the_held_out_rows_of_a_report_come_from_all_sources(run: Path, files: list[str]) -> None:
    config = mixed_config(files)
    tokenizer = load_tokenizer(run / "checkpoints" / "step-00000008")
    text = [tokenizer.decode(row["input_ids"]) for row in open_held_out(config, tokenizer, 2)]
    assert len(text) == 2
    assert sum("shelf" in one for one in text) == sum("router" in one for one in text) == 1


def test_every_source_has_a_held_out_source_of_its_own(files: list[str], tmp_path: Path) -> None:
    config = mixed_config(files, data={"source": files[0], "held_out_source": tuple(files)})
    session = prepare(config, tmp_path, None)
    assert list(session.held_out_by_source) == files
    assert [source.name for source in session.sources] == files[:1]
    assert [len(rows) for rows in session.held_out_by_source.values()] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_goes_on_with_the_same_mixture(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    config = mixed_config(files, data={"num_workers": workers})
    train(config, tmp_path / "straight")
    with monkeypatch.context() as patched:
        stop_after(patched, 5, signal.SIGTERM)
        assert train(config, tmp_path / "run").stopped_by == "SIGTERM"
    assert train(config, tmp_path / "run", resume=True).step == 8
    assert_same_run(tmp_path / "straight", tmp_path / "run", 8)


@torch.no_grad()
def test_no_document_of_a_row_sees_another(run: Path, files: list[str]) -> None:
    """In rows as they are trained on, every document's logits are those it has alone."""
    model, tokenizer = load_model(run)
    rows = MixedRows(open_sources(files, document_chars=40), tokenizer, 200)
    model.eval()
    for row in islice(rows, 4):
        together = model(**{name: tensor[None] for name, tensor in row.items()}).logits[0]
        starts = [place for place, position in enumerate(row["position_ids"].tolist()) if position == 0]
        assert len(starts) > 1
        for start, end in pairwise([*starts, 200]):
            alone = model(row["input_ids"][None, start:end]).logits[0]
            torch.testing.assert_close(together[start:end], alone, atol=1e-5, rtol=1e-5)


def test_a_mixture_comes_back_from_json(files: list[str]) -> None:
    config = mixed_config(files)
    again = from_json(json.loads(json.dumps(as_json(config))))
    assert again.data == config.data
    assert isinstance(again.data.source, tuple)
    assert again.optim.betas == config.optim.betas


def test_the_command_line_mixes_and_resumes(lol: Lol, files: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--data", f"{files[0]}=1", f"{files[1]}=3", *FLAGS, "--data.held-out-fraction", "0.3"]
    code, out, err = lol("train", "--run", run, *flags, "--steps", "2", "--checkpoint-every", "1")
    assert (code, err) == (0, "")
    assert f"{files[0]} (0.25), {files[1]} (0.75)" in out
    summary = read_metrics(run)[-1]
    lines = [line.split() for line in out.splitlines()]
    for file in files:
        assert [file, f"{summary['losses'][file]:.3f}"] in lines
    assert lol("train", "--run", run, "--resume")[0] == 0
    code, _, err = lol("train", "--run", run, "--resume", "--data", *files)
    assert code == 2
    assert "data.source" in err


def test_a_tokenizer_of_several_sources(lol: Lol, files: list[str], tmp_path: Path) -> None:
    code, _, err = lol("tokenizer", "--data", *files, "--vocab-size", "400", "--out", tmp_path / "both")
    assert (code, err) == (0, "")
    tokenizer = load_tokenizer(tmp_path / "both")
    assert {"Ġshelf", "Ġrouter"} <= tokenizer.get_vocab().keys()


def test_a_mistake_in_a_weight_starts_no_run(files: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="weight is a number above 0"):
        train(mixed_config(files, data={"source": (f"{files[0]}=0", f"{files[1]}=1")}), tmp_path / "run")
    train(mixed_config(files, steps=1), tmp_path / "run")
