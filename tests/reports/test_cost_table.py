"""`lol cost`: its table fits a terminal and says what its JSON says; recipes, flags and folders are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lol import LoLForCausalLM
from lol.model.cost import cache_bytes, count_flops, count_parameters
from lol.reports.cost import Cost, config_of
from lol.train.budget import plan_run
from lol.train.loading import load_model
from lol.train.progress import shorten
from lol.train.recipes import recipe
from small_run import MODEL, Lol


def numbers(lol: Lol, tmp_path: Path, *args: object) -> tuple[str, dict[str, Any]]:
    file = tmp_path / "cost.json"
    code, out, err = lol("cost", *args, "--json", file)
    assert (code, err) == (0, "")
    return out, json.loads(file.read_text())


def row(out: str, name: str) -> list[str]:
    """The cells of a line of the table."""
    (line,) = (line for line in out.splitlines() if line.startswith(f"{name} "))
    return [cell.strip() for cell in line.removeprefix(name).split("  ") if cell.strip()]


def test_a_recipe(lol: Lol, tmp_path: Path) -> None:
    out, result = numbers(lol, tmp_path, "demo", "--contexts", "100", "2000")
    config = recipe("demo")
    model, plan = config.model, plan_run(config, config.model)
    counts, flops = count_parameters(model), count_flops(model, 256)

    parts = result["parameters"]["parts"]
    with torch.device("meta"):
        stored = sum(parameter.numel() for parameter in LoLForCausalLM(model).parameters())
    assert sum(part["stored"] for part in parts.values()) == result["parameters"]["total"] == stored
    assert row(out, "total")[0] == shorten(stored)
    for name, size in counts.parts.items():
        assert row(out, name)[:2] == [shorten(size.stored), shorten(size.active)]
    assert row(out, "library")[2:] == [shorten(flops.core.products / 256), shorten(flops.core.attention / 256)]
    assert row(out, "non-embedding")[:2] == [shorten(counts.stored), shorten(counts.active)]

    row_flops = result["flops_of_a_row"]
    works = row_flops["forward_by_part"].values()
    assert sum(part["products"] + part["attention"] for part in works) == row_flops["forward"] == flops.forward
    assert row_flops["training_by_depth"][-1] == flops.training
    assert row(out, "training, a token") == [f"{shorten(flops.training / 256, 'FLOP')} forward and backward at depth 6"]
    shares = result["training_shares"]
    attention = shares.pop("attention")
    assert sum(shares.values()) == pytest.approx(1)
    assert attention == pytest.approx(3.5 * flops.total.attention / flops.training)
    assert shares["core"] == pytest.approx(flops.core.training / flops.training)

    assert (
        result["run"]["flops"] == plan.total_flops == sum(8 * row_flops["training_by_depth"][d] for d in depths(plan))
    )
    assert row(out, "the run") == [f"450 steps, 922 k tokens, {shorten(plan.total_flops, 'FLOP')}"]
    assert result["cache_bytes_of_a_row_in_float32"]["2000"] == cache_bytes(model, 2000, 1, torch.float32)
    assert f"{shorten(cache_bytes(model, 100, 1, torch.float32), 'B')} at 100, " in row(out, "cache (float32)")[0]
    assert row(out, "checkpoint") == [f"{shorten(result['checkpoint_bytes'], 'B')} with AdamW's moments"]
    on_8 = result["training_memory"]["gpus"]["8"]
    assert row(out, "together")[2:] == [shorten(on_8[precision]["total"], "B") for precision in ("float32", "bf16")]


def depths(plan) -> list[int]:
    return [plan.depth(step) for step in range(plan.steps)]


def test_flags_replace_what_the_recipe_says(lol: Lol, tmp_path: Path) -> None:
    flags = ["--model.num-experts", "7", "--model.core-attention", "sliding", "--growth.initial-depth", "None"]
    out, result = numbers(lol, tmp_path, "tiny", *flags, "--budget.tokens", "10000")
    model = recipe("tiny").model
    assert result["parameters"]["parts"]["library"]["stored"] == 7 * count_parameters(model).block
    assert (result["run"]["steps"], result["run"]["ended_by"]) == (9, "tokens")
    assert row(out, "the run")[0].endswith("; ended by budget.tokens before step 200")
    # A sliding window runs as a mask over the whole text here, which the table says.
    row_flops = result["flops_of_a_row"]
    assert row_flops["forward_as_the_kernel_runs"] > row_flops["forward"]
    assert "under a mask" in row(out, "as it runs here")[0]
    assert numbers(lol, tmp_path, "--recipe", "tiny")[1]["run"]["steps"] == 200


def test_a_run_and_its_checkpoint(lol: Lol, trained: Path, tmp_path: Path) -> None:
    """Of the run the training too; of a checkpoint alone, which any tool may have written, the model only."""
    out, result = numbers(lol, tmp_path, "--model", trained)
    model, _ = load_model(trained)
    assert result["parameters"]["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert config_of(trained).model.max_position_embeddings == model.config.max_position_embeddings == 32
    assert result["run"]["steps"] == 2
    assert result["context_length"] == 32
    assert out.splitlines()[0] == str(trained)

    alone, result = numbers(lol, tmp_path, "--model", trained / "checkpoints" / "step-00000002")
    assert "run" not in result
    assert "training_memory" not in result
    assert "of a GPU" not in alone
    assert "the run" not in alone
    assert result["context_length"] == 32
    assert config_of(trained).model.num_experts == MODEL["num_experts"]


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_the_table_fits_eighty_columns_and_is_plain_in_a_pipe(
    lol: Lol, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = lol("cost", name)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    # No cell was broken to fit.
    assert [line for line in out.splitlines() if line.startswith("    ")] == out.splitlines()[1:3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["huge"], "there is no recipe 'huge': `lol recipe list` shows them all"),
        (["--model", "no-such-folder"], "there is no such folder"),
        (["demo", "--budget.flops", "10"], "budget.flops=10 is less than one step, which takes 2.05e+10: raise it"),
        (["demo", "--contexts", "0"], "contexts must be one or more numbers of tokens, each at least 1"),
        (["demo", "--contexts"], "contexts must be one or more numbers of tokens"),
        (["demo", "--json", "no/such/folder.json"], "there is no folder no/such for --json"),
    ],
)
def test_mistakes_name_the_fix(lol: Lol, args: list[str], message: str) -> None:
    code, _, err = lol("cost", *args)
    assert code == 2
    assert message in err


def test_the_example_of_the_help_is_read(lol: Lol) -> None:
    (example,) = (line.strip() for line in (Cost.__doc__ or "").splitlines() if "Example: " in line)
    code, out, err = lol(*example.removeprefix("Example: lol ").split())
    assert (code, err) == (0, "")
    assert "ended by budget.flops" in out
