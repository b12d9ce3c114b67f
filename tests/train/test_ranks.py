"""Training on two ranks is training in one process: losses, balance, stopping, resuming, and the files."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_program import FILES, IDLE, QUIET, ROWS, RUNS, STOP, documents_config, golden_config, write_documents
from safetensors.torch import load_file

from lol.data.tokenizer import load_tokenizer
from lol.errors import UserError
from lol.train import trainer
from lol.train.loading import load_model
from lol.train.metrics import read_metrics
from lol.train.parallel import World
from lol.train.session import prepare
from lol.train.step import noise_generator, take_step
from lol.train.trainer import train
from ranks import launch
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
        train(small_config(corpus, model=QUIET, optim={"name": "muon"}), folder / "muon-one")
        stop_after(monkeypatch, STOP, signal.SIGTERM)
        train(small_config(corpus, model=QUIET), folder / "onward-fsdp2")
    write_documents(folder)
    (folder / "one.jsonl").write_text('{"text": "only one"}\n')
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path, corpus: Path) -> list[dict[str, Any]]:
    """Two ranks have made all their runs in the folder; what each of them says of them."""
    return [json.loads(out.rpartition("result ")[2]) for out in launch(PROGRAM, folder, corpus, *RUNS)]


@pytest.fixture(scope="module")
def ranks(printed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank ended with that must be the same on all."""
    return [of_rank["same"] for of_rank in printed]


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
    # The rank with most is logged.
    if run != "golden-one":
        assert {record.get("peak_memory_bytes", 1001) for record in read_metrics(folder / run)} == {1001}


@pytest.mark.parametrize("run", ["quiet-ddp", "quiet-fsdp2", "checkpointing-fsdp2", "compiled-ddp", "compiled-fsdp2"])
def test_one_update_of_the_bias_a_step_from_the_load_of_all(folder: Path, ranks: list[dict[str, Any]], run: str):
    """Two micro-batches a step; DDP under activation checkpointing too, for a recomputation must not count. Compiled,
    FSDP2 is under activation checkpointing."""
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
    [
        ("stopped-ddp", "straight-ddp"),
        ("stopped-fsdp2", "quiet-fsdp2"),
        ("stopped-idle", "straight-idle"),
        ("documents-stopped-ddp", "documents-ddp"),
        ("documents-stopped-workers-fsdp2", "documents-workers-fsdp2"),
        ("muon-stopped", "muon-fsdp2"),
    ],
)
def test_a_signal_to_one_rank_stops_all_and_the_resumed_run_is_the_same(
    folder: Path, ranks: list[dict[str, Any]], run: str, without: str
):
    assert (folder / f"{run}-kept" / "checkpoints" / f"step-{STOP:08d}").is_dir()
    assert len(timeless(folder / f"{run}-kept")) < len(timeless(folder / without))
    assert_same_run(folder / run, folder / without, 8)
    assert ranks[0][run] == ranks[1][run]


@pytest.mark.parametrize("run", ["muon-ddp", "muon-fsdp2"])
@pytest.mark.usefixtures("ranks")
def test_muon_on_ranks_is_muon_in_one_process(folder: Path, run: str):
    """Three blocks on two ranks. Gradients of another order of sums may round to another bfloat16 in its products."""
    assert losses(folder / run) == pytest.approx(losses(folder / "muon-one"), abs=1e-5)
    assert losses(folder / run) != pytest.approx(losses(folder / "quiet-one"), abs=1e-2)
    momenta = [
        {name: tensor.shape for name, tensor in saved_tensors(folder / name, 8).items() if "momentum_buffer" in name}
        for name in (run, "muon-one")
    ]
    assert momenta[0] == momenta[1]
    assert len(momenta[0]) == 21


@pytest.mark.parametrize(
    ("run", "what", "loss"), [("nan-loss-ddp", "the loss", "nan"), ("nan-gradient-fsdp2", "the gradient", r"\d.\d+")]
)
def test_all_ranks_stop_at_a_number_that_is_none_and_say_where(
    folder: Path, ranks: list[dict[str, Any]], run: str, what: str, loss: str
):
    told = ranks[0][run]["told"]
    assert told == ranks[1][run]["told"]
    place = 2 if what == "the loss" else 1
    assert re.match(
        rf"step 5: the loss is {loss} and the gradient's norm nan; .* checkpoint before is \S+step-00000003. Where it "
        rf'begins: rank 1, micro-batch {place} of 2: {what}, row 1 of its 1, the first of which begins "\w',
        told,
    ), told
    assert "rank 0" not in told
    assert [record["step"] for record in read_metrics(folder / run)] == [1, 2, 3, 4, 4]
    assert [path.name for path in (folder / run / "checkpoints").iterdir()] == ["step-00000003"]


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


# --- ranks that read documents of their own


@pytest.mark.parametrize(("run", "workers"), [("documents-ddp", 1), ("documents-workers-fsdp2", 2)])
def test_ranks_and_workers_train_on_every_document_once_an_epoch(
    folder: Path, printed: list[dict[str, Any]], run: str, workers: int
):
    """Four files for two or four readers: each has as many whole files, so its first documents are its first epoch."""
    first_epoch: list[str] = []
    tokenizer = load_tokenizer(folder / run / "checkpoints" / "step-00000008")
    for of_rank in printed:
        batches = [batch for step in of_rank["own"][run]["batches"] for batch in step]
        assert torch.tensor([batch["input_ids"] for batch in batches]).shape == (16, 2, 32)
        for worker in range(workers):
            ids = [token for batch in batches[worker::workers] for row in batch["input_ids"] for token in row]
            documents = tokenizer.decode(ids).split(str(tokenizer.bos_token))[1:]
            first_epoch += documents[: FILES * ROWS // (2 * workers)]
    expected = [
        json.loads(line)["text"] for file in (folder / "hub").iterdir() for line in file.read_text().splitlines()
    ]
    assert Counter(first_epoch) == Counter(text + str(tokenizer.eos_token) for text in expected)


def test_the_step_of_ranks_is_that_of_one_process_on_all_their_rows(
    folder: Path, printed: list[dict[str, Any]], tmp_path: Path
):
    """Ranks differ in targets and documents; the loss is the mean over all of them."""
    session = prepare(documents_config(folder), tmp_path, None)
    session.model.train()
    steps = [of_rank["own"]["documents-ddp"]["batches"] for of_rank in printed]
    counts = [
        sum(position == 0 for batch in own[0] for row in batch["position_ids"] for position in row) for own in steps
    ]
    assert counts[0] != counts[1]
    record: dict[str, Any] = {}
    for step in range(2):
        batches = [
            {name: torch.tensor(one[name] + other[name]) for name in one}
            for one, other in zip(steps[0][step], steps[1][step], strict=True)
        ]
        record = take_step(session, batches)
        found = [record for record in read_metrics(folder / "documents-ddp") if record["event"] == "train"][step]
        assert (found["loss"], found["grad_norm"]) == pytest.approx((record["loss"], record["grad_norm"]), rel=1e-5)
        assert (found["load"], found["tokens"]) == (record["load"], record["tokens"])
        if step == 0:
            gradients = load_file(folder / "documents-ddp.safetensors")
            for name, parameter in session.model.named_parameters():
                if parameter in session.optimizer.state:
                    expected = session.optimizer.state[parameter]["exp_avg"]
                    assert (gradients.pop(name) - expected).abs().max() <= 1e-6 * expected.abs().max(), name
            assert gradients == {}


def test_an_epoch_is_complete_when_every_rank_has_it(folder: Path, printed: list[dict[str, Any]]):
    own = [of_rank["own"]["documents-ddp"]["epochs"] for of_rank in printed]
    assert own[0] != own[1]
    (source,) = own[0]
    assert read_metrics(folder / "documents-ddp")[-1]["epochs"] == {source: min(epochs[source] for epochs in own)}


@pytest.mark.usefixtures("ranks")
def test_another_number_of_processes_has_no_place_in_the_documents(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "documents-stopped-ddp-kept", tmp_path / "run")
    with pytest.raises(UserError, match=r"2 processes have a place of their own.*resume with 2 processes, not 1"):
        train(documents_config(folder), tmp_path / "run", resume=True)


def test_one_process_trains_the_same_however_the_data_is_shared_out(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train(small_config(corpus, steps=5), tmp_path / "rows")
    config = small_config(corpus, steps=5, data={"shard_by": "documents"})
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGTERM)
        assert train(config, tmp_path / "documents").stopped_by == "SIGTERM"
    train(config, tmp_path / "documents", resume=True)
    assert timeless(tmp_path / "rows") == timeless(tmp_path / "documents")
    tensors, others = (saved_tensors(tmp_path / name, 5) for name in ("rows", "documents"))
    assert [name for name in tensors if "model." in name and not torch.equal(tensors[name], others[name])] == []


def test_torchrun(corpus: Path, tmp_path: Path):
    """The command of docs/training.md, on two processes: one of them prints and writes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = tmp_path / "run"
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
