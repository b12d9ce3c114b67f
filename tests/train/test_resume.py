"""A resumed run is the run that was never stopped, bit for bit, whatever stopped it."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lol.errors import UserError
from lol.train import trainer
from lol.train.metrics import read_metrics
from lol.train.trainer import train
from small_run import (
    assert_same_run,
    draw_at_every_step,
    environment,
    saved_tensors,
    small_config,
    stop_after,
    timeless,
    train_elsewhere,
)


@pytest.fixture(scope="module", autouse=True)
def _user() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_at_every_step(monkeypatch)
        yield


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing stops."""
    run = tmp_path_factory.mktemp("straight") / "run"
    outcome = train(small_config(corpus), run)
    assert (outcome.step, outcome.stopped_by) == (8, None)
    return run


def test_the_run_moves_all_that_resuming_must_bring_back(straight: Path) -> None:
    """The other tests compare nothing if nothing moves."""
    first, last = saved_tensors(straight, 6), saved_tensors(straight, 8)
    for name in ("model.embed_tokens.weight", "model.library.q_proj.weight", "model.router.weight", "lm_head.weight"):
        assert not torch.equal(first[f"model.safetensors/{name}"], last[f"model.safetensors/{name}"])
        assert last[f"optimizer.safetensors/{name}.exp_avg"].abs().max() > 0
    assert last["model.safetensors/model.router.noise_bias"].abs().max() > 0
    assert last["model.safetensors/model.expert_bias"].abs().max() > 0
    config = json.loads((straight / "config.json").read_text())
    assert (config["accumulation"], config["model"]["router_noise_max"]) == (2, 10.0)
    depths = [record["depth"] for record in read_metrics(straight) if record["event"] == "train"]
    assert depths == [1, 2, 2, 2, 3, 3, 4, 4]


@pytest.mark.slow
def test_a_run_stopped_by_a_signal_is_resumed_in_another_process(
    corpus: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGTERM)
        outcome = train(small_config(corpus), run)
    assert (outcome.step, outcome.summary, outcome.stopped_by) == (4, None, "SIGTERM")
    assert (run / "checkpoints" / "step-00000004").is_dir()
    assert timeless(run) == timeless(straight)[:5]
    assert train_elsewhere(run, corpus, resume=True) == 0
    assert_same_run(run, straight, 8)


@pytest.mark.slow
def test_a_killed_run_goes_back_to_its_last_checkpoint(corpus: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_elsewhere(run, corpus, resume=False, stop=(5, signal.SIGKILL)) == -signal.SIGKILL
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    assert timeless(run) == timeless(straight)[:5]
    train(small_config(corpus), run, resume=True)
    assert_same_run(run, straight, 8)


@pytest.mark.slow
def test_with_workers(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(corpus, data={"num_workers": 2})
    train(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 4, signal.SIGINT)
        assert train(config, tmp_path / "run").stopped_by == "SIGINT"
    assert train_elsewhere(tmp_path / "run", corpus, resume=True, data={"num_workers": 2}) == 0
    assert_same_run(tmp_path / "run", tmp_path / "straight", 8)


@pytest.mark.slow
def test_ctrl_c_does_not_end_the_workers(corpus: Path, tmp_path: Path) -> None:
    """A terminal sends it to all processes; the trainer needs them until it has finished its step."""
    rows = iter(trainer.prepare(small_config(corpus, data={"num_workers": 1}), tmp_path / "run", None).loader)
    next(rows)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGINT)
    for _ in range(8):  # more than are read ahead
        next(rows)
    assert worker.is_alive()


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again(corpus: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small_config(corpus), run)
    shutil.rmtree(run / "checkpoints")
    train(small_config(corpus), run, resume=True)
    assert_same_run(run, straight, 8)


def test_a_finished_run_is_summed_up_again_in_place_of_its_summary(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small_config(corpus, steps=2), run)
    before = timeless(run)
    assert "bigram_loss" not in before[-1]
    train(small_config(corpus, steps=2, eval={"ngrams": True}), run, resume=True)
    after = timeless(run)
    assert after[:-1] == before[:-1]
    assert after[-1].pop("bigram_loss") < after[-1].pop("unigram_loss")
    assert after[-1] == before[-1]


def test_damaged_checkpoints_are_passed_over_and_a_run_without_a_whole_one_is_not_restarted(
    corpus: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(small_config(corpus), run)
    newest = run / "checkpoints" / "step-00000008"
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:1000])
    train(small_config(corpus), run, resume=True)
    assert "step-00000008 is damaged and is passed over: model.safetensors has 1,000 bytes" in capsys.readouterr().out
    assert_same_run(run, straight, 8)

    for folder in (run / "checkpoints").iterdir():
        (folder / "optimizer.safetensors").unlink()
    records = timeless(run)
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole: bring its files back"):
        train(small_config(corpus), run, resume=True)
    assert timeless(run) == records


def test_a_differing_field_is_named_and_nothing_is_touched(corpus: Path, straight: Path) -> None:
    before = {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        train(small_config(corpus, batch_size=4, model={"num_experts": 5}), straight, resume=True)
    assert str(caught.value).splitlines()[1:] == [
        "  model.num_experts: 3 in the run, 5 now",
        "  batch_size: 2 in the run, 4 now",
    ]
    with pytest.raises(UserError, match="already holds a run"):
        train(small_config(corpus), straight)
    assert {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()} == before


def test_a_start_that_failed_leaves_the_folder_to_the_corrected_command(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(UserError, match="no such file or folder"):
        train(small_config(tmp_path / "typo.txt"), run)
    assert train(small_config(corpus, steps=1), run).step == 1


def test_a_second_process_may_not_train_in_the_folder(corpus: Path, straight: Path) -> None:
    with (
        trainer.open_run(straight, trainer.as_json(small_config(corpus)), resume=True),
        pytest.raises(UserError, match="is training in"),
    ):
        train(small_config(corpus), straight, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "workers"), [(signal.SIGTERM, 143, 0), (signal.SIGINT, 130, 2)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_from_outside_ends_the_command_with_a_checkpoint(
    corpus: Path, tmp_path: Path, number: signal.Signals, code: int, workers: int
) -> None:
    """SIGINT goes to the whole group of processes, as a terminal's Ctrl-C does."""
    run = tmp_path / "run"
    flags = ["--data", str(corpus), "--data.document-chars", "40", "--data.context-length", "32", "--steps", "100000"]
    flags += ["--model.vocab-size", "280", "--model.hidden-size", "12", "--model.window-size", "8"]
    flags += ["--model.window-stride", "4", "--batch-size", "2", "--eval.rows", "2", "--checkpoint-every", "0"]
    flags += ["--model.num-attention-heads", "2", "--data.num-workers", str(workers)]
    child = subprocess.Popen(
        [sys.executable, "-m", "lol", "train", "--run", str(run), *flags],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _wait_for_steps(run, 3, child)
        os.killpg(child.pid, number) if number == signal.SIGINT else child.send_signal(number)
        output, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == code
    assert errors == ""
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert output.splitlines()[-1] == (
        f"stopped by {number.name} after step {step}; a checkpoint is written. Go on with --resume."
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{step:08d}"]


def _wait_for_steps(run: Path, steps: int, child: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < steps:
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
