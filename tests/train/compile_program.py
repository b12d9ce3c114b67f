"""Runs with and without --compile, in a process whose functions nothing wraps: compiling what checks types would break.

compile_program.py FOLDER CORPUS    prints, by case, what test_compiled.py asserts on
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lol.train import compiled, trainer
from lol.train.metrics import read_metrics
from small_run import small_config

EXPERTS = {"model": {"moe_num_experts": 2, "moe_intermediate_size": 8}}
TRUNCATED = {"growth": {"initial_depth": 2, "backprop_depth": 1, "first_window_full_backprop": True}}
# The backend, and the changes of a run. Inductor is what users get; it takes long.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "inductor": ("inductor", {"steps": 2, "eval": {"every": 0, "rows": 4}}),
    "experts, truncated": ("aot_eager", EXPERTS | TRUNCATED | {"steps": 10}),
}


def graphs_by_step(run: Path, changes: dict[str, Any], corpus: Path) -> list[int]:
    """Train, compiled; how many graphs there were after each step."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        take_step = trainer.take_step

        def step_and_count(*args: Any) -> Any:
            record = take_step(*args)
            counts.append(counters["stats"]["unique_graphs"])
            return record

        patch.setattr(trainer, "take_step", step_and_count)
        trainer.train(small_config(corpus, compile=True, **changes), run)
    return counts


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run) if record["event"] in ("train", "eval")]


def main(folder: Path, corpus: Path) -> None:
    torch.set_num_threads(1)
    result = {}
    for name, (compiled.BACKEND, changes) in CASES.items():
        runs = folder / f"{name}-plain", folder / name
        torch._dynamo.reset()
        counters.clear()
        trainer.train(small_config(corpus, **changes), runs[0])
        graphs = graphs_by_step(runs[1], changes, corpus)
        result[name] = {
            "losses": [losses(run) for run in runs],
            "depths": [record["depth"] for record in read_metrics(runs[1]) if record["event"] == "train"],
            "graphs": graphs,
            "breaks": list(counters["graph_break"]),
        }
    print("\nresult " + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
