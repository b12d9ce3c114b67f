"""Training on two ranks is training in one process: losses, balance, stopping, resuming, and the files."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_program import IDLE, QUIET, RUNS, STOP, golden_config

from lol.errors import UserError
from lol.train import trainer
from lol.train.loading import load_model
from lol.train.metrics import read_metrics
from lol.train.parallel import World
from lol.train.step import noise_generator
from lol.train.trainer import train
from ranks import alone, launch
from small_run import (
    FLAGS,
    assert_same_run,
    draw_at_every_step,
    environment,
    saved_tensors,
    small_config,
    stop_after,
    timeless,
)

PROGRAM = Path(__file__).with_name("rank_program.py")
GOLDEN = Path(__file__).with_name("golden") / "tiny.json"

RUN_FLAGS = ["--parallel", "fsdp2", "--steps", "2"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    train(golden_config(corpus), folder / "golden-one")
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_at_every_step(monkeypatch)
        train(small_config(corpus, model=QUIET), folder / "quiet-one")
        train(small_config(corpus, model=QUIET, precision="bf16"), folder / "bf16-one")
        stop_after(monkeypatch, STOP, signal.SIGTERM)
        train(small_config(corpus, model=QUIET), folder / "onward-fsdp2")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path, corpus: Path) -> list[dict[str, Any]]:
    """Two ranks have made all their runs in the folder; what each of them ended with."""
    printed = launch(PROGRAM, folder, corpus, *RUNS)
    return [json.loads(out.rpartition("result ")[2]) for out in printed]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run) if record["event"] in ("train", "eval")]


def loads(run: Path) -> list[Any]:
    return [record["load"] for record in read_metrics(run) if "load" in record]


@pytest.mark.parametrize("run", ["golden-one", "golden-ddp", "golden-fsdp2"])
@pytest.mark.usefixtures("ranks")
def test_losses_are_the_committed_ones(folder: Path, run: str):
    golden = json.loads(GOLDEN.read_text())
    found = losses(folder / run)
    assert len(found) == len(golden) == 102
    assert found == pytest.approx(golden, abs=1e-4)
    assert golden[-1] < 0.5 * golden[0]


@pytest.mark.parametrize("run", ["quiet-ddp", "quiet-fsdp2", "checkpointing-fsdp2"])
def test_one_update_of_the_bias_a_step_from_the_load_of_all(folder: Path, ranks: list[dict[str, Any]], run: str):
    """Two micro-batches a step; DDP under activation checkpointing too, for a recomputation must not count."""
    assert loads(folder / run) == loads(folder / "quiet-one")
    assert losses(folder / run) == pytest.approx(losses(folder / "quiet-one"), abs=1e-5)
    own, expected = (saved_tensors(folder / name, 8) for name in (run, "quiet-one"))
    name = "model.safetensors/model.expert_bias"
    assert torch.equal(own[name], expected[name])
    assert own[name].abs().max() > 0
    assert ranks[0][run] == ranks[1][run]
    assert ranks[0][run]["bias"] == own[name].tolist()


@pytest.mark.parametrize("run", ["quiet-ddp", "quiet-fsdp2"])
@pytest.mark.usefixtures("ranks")
def test_a_checkpoint_is_the_folder_that_one_process_writes(folder: Path, run: str):
    """But that ranks that hold slices write them where one process writes whole tensors."""
    own, expected = (folder / name / "checkpoints" / "step-00000008" for name in (run, "quiet-one"))
    names = {file.name for file in expected.iterdir()}
    if run == "quiet-fsdp2":
        names = names - {"model.safetensors", "optimizer.safetensors"} | {"shards"}
        shards = [file.stat().st_size for file in (own / "shards").iterdir()]
        assert len(shards) == 2
        assert max(shards) < 1.5 * min(shards)  # three blocks on two ranks
    assert {file.suffix for file in own.rglob("*") if file.is_file()} == {".json", ".safetensors", ".py"}
    assert {file.name for file in own.iterdir()} == names
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (own / name).read_bytes() == (expected / name).read_bytes()
    tensors, others = saved_tensors(folder / run, 8), saved_tensors(folder / "quiet-one", 8)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in others.items()
    }


@pytest.mark.usefixtures("ranks")
def test_slices_are_a_model_to_use(folder: Path):
    """For `lol generate` and all else that opens a run; the tied one has its weight once."""
    for run, step in (("quiet-fsdp2", 8), ("golden-fsdp2", 100)):
        model, tokenizer = load_model(folder / run)
        assert len(tokenizer) == model.config.vocab_size
        saved = saved_tensors(folder / run, step)
        weights = {name: tensor for name, tensor in saved.items() if name.startswith("model.safetensors/")}
        own = model.state_dict()
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        assert {name.partition("/")[2] for name in weights} == own.keys() - tied
        assert all(torch.equal(tensor, own[name.partition("/")[2]]) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("run", "without"),
    [("stopped-ddp", "straight-ddp"), ("stopped-fsdp2", "quiet-fsdp2"), ("stopped-idle", "straight-idle")],
)
def test_a_signal_to_one_rank_stops_all_and_the_resumed_run_is_the_same(
    folder: Path, ranks: list[dict[str, Any]], run: str, without: str
):
    assert (folder / f"{run}-kept" / "checkpoints" / f"step-{STOP:08d}").is_dir()
    assert len(timeless(folder / f"{run}-kept")) < len(timeless(folder / without))
    assert_same_run(folder / run, folder / without, 8)
    assert ranks[0][run] == ranks[1][run]


@pytest.mark.usefixtures("ranks")
def test_the_idle_block_was_idle_and_decayed(folder: Path):
    assert all(depth[IDLE] == 0 for load in loads(folder / "stopped-idle") for depth in load)
    kept, last = saved_tensors(folder / "stopped-idle-kept", STOP), saved_tensors(folder / "stopped-idle", 8)
    name = "model.library.up_proj.weight"
    assert last[f"optimizer.safetensors/{name}.exp_avg"][IDLE].abs().max() == 0
    before, after = (tensors[f"model.safetensors/{name}"][IDLE] for tensors in (kept, last))
    assert after.norm() < before.norm()


@pytest.mark.usefixtures("ranks")
def test_a_damaged_slice_of_one_rank_is_named_and_the_checkpoint_before_it_is_used(
    folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(folder / "quiet-fsdp2", tmp_path / "run")
    [slices] = (tmp_path / "run" / "checkpoints" / "step-00000008" / "shards").glob("shard-00002-*")
    whole = slices.read_bytes()
    slices.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    train(small_config(corpus, model=QUIET), tmp_path / "run", resume=True)
    assert f"passed over: shards/{slices.name} was altered" in capsys.readouterr().out
    assert losses(tmp_path / "run") == pytest.approx(losses(folder / "quiet-one"), abs=1e-5)


def test_ranks_draw_noise_of_their_own():
    """And one process draws what it drew before there were ranks."""
    draws = [torch.rand(4, generator=noise_generator(7, 3, 0, rank)).tolist() for rank in range(3)]
    assert len(set(map(tuple, draws))) == 3


@pytest.mark.usefixtures("ranks")
def test_one_process_goes_on_with_what_ranks_began(folder: Path, corpus: Path, tmp_path: Path):
    shutil.copytree(folder / "stopped-fsdp2-kept", tmp_path / "run")
    train(small_config(corpus, model=QUIET), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(folder / "quiet-one"), abs=1e-5)
    assert loads(tmp_path / "run") == loads(folder / "quiet-one")


@pytest.mark.usefixtures("ranks")
def test_ranks_go_on_with_what_one_process_began(folder: Path):
    assert losses(folder / "onward-fsdp2") == pytest.approx(losses(folder / "quiet-one"), abs=1e-5)
    assert loads(folder / "onward-fsdp2") == loads(folder / "quiet-one")


@pytest.mark.usefixtures("ranks")
def test_bf16_keeps_weights_in_float32(folder: Path):
    exact, one, sharded = (losses(folder / name) for name in ("quiet-one", "bf16-one", "bf16-fsdp2"))
    for found in (one, sharded):
        assert found != exact
        assert found[:4] == pytest.approx(exact[:4], abs=0.01)
        # Later, some window has gone to another block.
        assert found == pytest.approx(exact, abs=0.1)
    tensors, others = saved_tensors(folder / "bf16-fsdp2", 8), saved_tensors(folder / "quiet-one", 8)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        name: tensor.dtype for name, tensor in others.items()
    }


def test_rows_that_cannot_be_shared_are_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def three(_mode: str) -> Iterator[World]:
        yield World(size=3)

    monkeypatch.setattr(trainer, "join_world", three)
    with pytest.raises(UserError, match="batch_size=2 rows cannot be shared by 3 processes"):
        train(small_config(corpus, parallel="ddp"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_torchrun(corpus: Path, tmp_path: Path):
    """The command of docs/training.md, on two processes: one of them prints and writes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = tmp_path / "run"
    with alone():
        done = subprocess.run(
            [*torchrun, "-m", "--", "lol", "train", "--run", run, "--data", corpus, *RUN_FLAGS, *FLAGS],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2/2") == 1
    assert done.stdout.count("held-out loss, nats per token") == 1
    assert [record["event"] for record in read_metrics(run)].count("train") == 2
