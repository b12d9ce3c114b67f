"""TensorBoard and W&B, read back with their own readers: each step once, as in metrics.jsonl, after a kill too.

As a program it logs steps to W&B for the run folder, first to last, and kills W&B's service before the last.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lol.train import trainer
from lol.train.config import TrainConfig
from lol.train.metrics import MetricsLog, read_metrics, trim_metrics
from lol.train.peak_memory import peak_memory
from lol.train.tracking import open_tracking
from lol.train.tracking_values import draw_load, scalars
from lol.train.tracking_wandb import last_step
from small_run import Lol, environment, small_config, train_elsewhere

BOTH = ("tensorboard", "wandb")


def tensorboard_of(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "images": 0}).Reload()


def points(events: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(name)]


def wandb_files(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("*run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)


def wandb_records(file: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in a .wandb file, by W&B's own inspector (`wandb leet inspect`)."""
    from wandb.util import get_core_path

    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    out = subprocess.run([*command, "--run-file", file, file.parent], capture_output=True, text=True).stdout
    return [record[kind] for record in map(json.loads, out.splitlines()) if record["type"] == kind]


def services() -> list[str]:
    """W&B's processes that this one has started and not ended."""
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in children if "wandb" in Path(f"/proc/{pid}/comm").read_text()]


def of(records: list[dict[str, Any]], event: str, field: str) -> list[tuple[int, Any]]:
    return [(record["step"], record[field]) for record in records if record["event"] == event]


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_in_both_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_MODE", "WANDB_ERROR_REPORTING", "WANDB_DISABLE_WEAVE"):
        monkeypatch.delenv(name, raising=False)
    # W&B looks for libraries that call models over the network.
    monkeypatch.setitem(sys.modules, "openai", ModuleType("openai"))
    run = tmp_path / "run"
    code = train_elsewhere(run, corpus, resume=False, stop=(6, signal.SIGKILL), tracking=list(BOTH))
    assert code == -signal.SIGKILL
    # Steps 4 and 5 are logged, after the last checkpoint; they are trained again, with a last ulp less in one place.
    assert [record["step"] for record in read_metrics(run)][-1] == 5
    trainer.train(small_config(corpus, tracking=BOTH), run, resume=True)
    assert capsys.readouterr().err == ""
    records = read_metrics(run)

    events = tensorboard_of(run)
    for event, field in [
        ("train", "loss"),
        ("train", "router_entropy"),
        ("eval", "loss"),
        ("summary", "held_out_loss"),
    ]:
        expected = of(records, event, field)
        assert points(events, f"{event}/{field}") == [(step, pytest.approx(value)) for step, value in expected]
    assert [step for step, _ in points(events, "train/loss")] == list(range(1, 9))
    shares = [[value for _, value in points(events, f"load/block_{block}")] for block in range(3)]
    loads = [np.array(load).sum(0) for _, load in of(records, "train", "load")]
    assert np.allclose(np.array(shares).T, [load / load.sum() for load in loads])
    assert [image.step for image in events.Images("load")] == [4, 8]
    assert events.Tags()["tensors"] == ["config/text_summary"]

    files = wandb_files(run)
    assert len({file.name for file in files}) == 1 < len(files)
    history = [row for file in files for row in wandb_records(file, "history")]
    assert [row["step"]["num"] for row in history] == list(range(1, 9))
    assert [row["item"]["train/loss"] for row in history] == pytest.approx([v for _, v in of(records, "train", "loss")])
    held_out = [(row["step"]["num"], row["item"]["eval/loss"]) for row in history if "eval/loss" in row["item"]]
    assert held_out == of(records, "eval", "loss")
    assert last_step(files[-1]) == 8
    summary = wandb_records(files[-1], "summary")
    assert any(part["update"].get("summary/held_out_loss") == records[-1]["held_out_loss"] for part in summary)
    (config,) = [record["config"]["update"] for record in wandb_records(files[-1], "run")]
    assert config["model"]["num_experts"] == 3
    assert services() == []
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


@pytest.mark.slow
def test_wandb_is_given_what_it_lacks_and_its_end_is_not_the_trainings(
    tmp_path: Path,
) -> None:
    log_to_wandb(tmp_path, range(1, 400))
    # Steps 301 to 399 are trained again, and the service ends without having written all that it was given after them.
    command = [sys.executable, __file__, str(tmp_path), "301", "800"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert "the training is done" in done.stdout, done.stderr
    assert "wandb is no longer written (ConnectionResetError" in done.stderr
    arrived = last_step(wandb_files(tmp_path)[1])
    assert 399 < arrived < 799
    log_to_wandb(tmp_path, range(801, 813))
    files = wandb_files(tmp_path)
    steps = [[row["step"]["num"] for row in wandb_records(file, "history")] for file in files]
    assert [step for part in steps for step in part] == list(range(1, 813))
    assert [last_step(file) for file in files] == [max(part, default=0) for part in steps]
    assert services() == []


def test_a_tracker_that_is_new_to_a_run_is_given_its_past(
    lol: Lol, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    code, out, err = lol("train", "--run", run, "--resume", "--tracking", "tensorboard")
    assert (code, err) == (0, "")
    assert f"tensorboard --logdir {run}" in out
    records = read_metrics(run)
    events = tensorboard_of(run)
    assert [step for step, _ in points(events, "train/loss")] == [1, 2]
    assert [step for step, _ in points(events, "summary/held_out_loss")] == [2]
    code, _, _ = lol("train", "--run", run, "--resume", "--tracking", "tensorboard")
    events = tensorboard_of(run)
    for name in ("train/loss", "eval/loss", "summary/held_out_loss"):
        assert [step for step, _ in points(events, name)] == ([1, 2] if name == "train/loss" else [2])
    # A memory of this process that another one does not have.
    assert points(events, "train/peak_memory_bytes")[0][1] == pytest.approx(records[0]["peak_memory_bytes"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = (run / "metrics.jsonl").read_bytes()
    for words in (["--run", run, "--resume"], ["--run", tmp_path / "new"]):
        code, _, err = lol("train", *words, "--tracking", "tensorboard", "wandb")
        assert code == 2
        assert "pip install library-of-layers[wandb]" in err
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "new").exists()


def test_records_as_scalars_and_the_load_as_a_picture() -> None:
    record = {
        "event": "eval", "step": 7, "loss": 2.5, "epochs": {"a": 0.5}, "losses": {"a": 2.0, "hf:b/c": 3.0}, "depth": 4,
        "note": "text", "flag": True,
    }  # fmt: skip
    assert scalars(record) == {
        "eval/loss": 2.5, "eval/epochs/a": 0.5, "eval/losses/a": 2.0, "eval/losses/hf:b/c": 3.0, "eval/depth": 4,
    }  # fmt: skip
    assert scalars({"event": "train", "step": 1, "load": [[3, 1], [0, 4]], "moe_load": [[1] * 12]}) == {
        "load/block_0": 3 / 8, "load/block_1": 5 / 8,
    } | {f"moe_load/expert_{number:02}": 1 / 12 for number in range(12)}  # fmt: skip
    assert scalars({"event": "train", "step": 1, "load": []}) == {}
    picture = draw_load([[4, 0, 0], [0, 2, 2]])
    assert picture is not None
    assert picture.shape == (32, 48, 3)
    assert picture[0, 0].tolist() == [66, 81, 194]
    assert picture[0, 16].tolist() == [255, 255, 255]
    assert picture[31, 47].tolist() == [255 - round(np.log(2.5) / np.log(4) * (255 - ink)) for ink in (66, 81, 194)]
    assert draw_load([]) is None


def test_peak_memory_is_what_the_process_has_held() -> None:
    held = np.ones(96 * 2**20, dtype=np.uint8)
    now, gpu = peak_memory(torch.device("cpu"))
    assert gpu == 0
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Linux counts pages in batches, by processor.
    assert now >= resident - 2**24
    assert now >= held.nbytes
    del held
    assert peak_memory(torch.device("cpu"))[0] >= now - 2**24


def log_to_wandb(run: Path, steps: range, kill: bool = False) -> None:
    since = steps[0] - 1
    trim_metrics(run, since)
    config = TrainConfig(tracking=("wandb",))
    with open_tracking(config, run, since) as tracking, MetricsLog(run, also=tracking) as metrics:
        for step in steps:
            if kill and step == steps[-1]:
                [os.kill(int(pid), signal.SIGKILL) for pid in services()]
            metrics.write({"event": "train", "step": step, "loss": 1 / step, "load": [[1, 2, 0]] * 40})


if __name__ == "__main__":
    log_to_wandb(Path(sys.argv[1]), range(int(sys.argv[2]), int(sys.argv[3]) + 1), kill=True)
    print("the training is done")
