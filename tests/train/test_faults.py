"""Whatever happens to a run, it goes on from a whole checkpoint and ends as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fault_program
import pytest
import torch
from fault_program import DISK_STEP, KILLS, RESHARD_STEP, STEPS
from safetensors.torch import load_file

from lol.train.loading import load_model
from small_run import assert_same_run, environment, saved_tensors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def found(folder: Path, corpus: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, fault_program.__file__, folder, corpus],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.rpartition("result ")[2])


@pytest.mark.parametrize("ranks", KILLS)
def test_a_run_that_is_killed_again_and_again_ends_as_the_one_that_is_not(
    folder: Path, found: dict[str, Any], ranks: str
) -> None:
    assert sum(KILLS.values()) == 20
    killed = found[ranks]
    assert set(found[f"straight-{ranks}"]) == set(killed["end"]) == {0}
    steps = killed["steps"]
    assert len(steps) == KILLS[ranks] + 1
    assert steps == sorted(steps)
    assert 0 < steps[-1] < STEPS[ranks]
    # Every restart found the newest checkpoint whole; some kills were in the middle of writing one.
    assert killed["warnings"] == []
    assert killed["writing"] > 0
    # Where one rank is killed, the others do not wait for it.
    assert killed["hung"] == 0
    assert_same_run(folder / ranks, folder / f"straight-{ranks}", STEPS[ranks])


def test_a_full_disk_stops_all_ranks_with_a_clear_line(found: dict[str, Any]) -> None:
    disk = found["disk"]
    assert disk["codes"] == [2, 2]
    for line in disk["said"]:
        assert f"step-{DISK_STEP:08d} could not be written (rank 1: " in line
        assert "Make room there" in line
    assert disk["left"] == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("run", ["four", "machines"])
def test_slices_of_two_ranks_are_those_of_others_and_of_none(folder: Path, found: dict[str, Any], run: str) -> None:
    assert set(found["reshard"]) == {0}
    written, again = saved_tensors(folder / "two-ranks", RESHARD_STEP), saved_tensors(folder / run, RESHARD_STEP)
    assert written.keys() == again.keys()
    assert [name for name in written if not torch.equal(written[name], again[name])] == []
    model, _ = load_model(folder / run)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, written[f"model.safetensors/{name}"]), name
    # Every rank wrote a part, and nothing is there twice.
    files = list((folder / run).glob("checkpoints/*/shards/*"))
    assert len(files) == 4
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    whole = [tensor for name, tensor in written.items() if not name.startswith("training.")]
    assert sum(tensor.numel() for tensor in tensors) == sum(tensor.numel() for tensor in whole)
