"""What `lol bench gpu` does, on a CPU in the GPU's place; and that without a GPU it says so in one line."""

from pathlib import Path

import pytest
import torch

from lol.bench import gpu
from lol.bench.gpu import NO_GPU, equality, take_recipe_step
from lol.cli import main
from lol.model import library
from lol.train.published import PUBLISHED

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")
def test_without_a_gpu_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "gpu.json"
    assert main(["bench", "gpu", "--json", str(file)]) == 0
    assert capsys.readouterr() == (f"{NO_GPU}\n", "")
    assert not file.exists()


@pytest.mark.slow
def test_the_checks_pass_where_both_are_a_cpu_and_see_a_wrong_product(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    checks = list(equality(CPU))
    assert len(checks) == 10
    assert {check.outcome for check in checks} == {"ok"}

    plain = library.shelf_linear
    # By a tenth of a percent, which bfloat16 does not see.
    monkeypatch.setattr(library, "shelf_linear", lambda *args: plain(*args) * 1.001)
    passes = iter([True])
    truth = gpu._pass

    def true_at_first(*args):
        """The first pass is the CPU's, against which the others are held."""
        if next(passes, False):
            with monkeypatch.context() as right:
                right.setattr(library, "shelf_linear", plain)
                return truth(*args)
        return truth(*args)

    monkeypatch.setattr(gpu, "_pass", true_at_first)
    failed = [check.name for check in equality(CPU) if check.outcome == "FAILED"]
    assert "logits, float32" in failed
    assert "decoding with a cache, float32" in failed
    assert not [name for name in failed if "bf16" in name]


def test_a_recipe_takes_a_step_if_it_fits():
    assert set(gpu.BenchGpu().recipes) == set(PUBLISHED)
    check = take_recipe_step("math-1b-tiny", CPU, room=10**9)
    assert check.outcome == "ok"
    assert check.detail.startswith("loss 6.")
    too_large = take_recipe_step("math-1b", CPU, room=10**9)
    assert too_large.outcome == "skipped"
    assert too_large.detail == "needs 20.8 GB, 1.0 are free"
