"""Real training runs of a second: a corpus, a configuration, and what of a run's files must be equal bit for bit.

As a program it is a run in another process, which may end itself by a signal after a step:

small_run.py RUN '{"corpus": …, "resume": …, "stop": [step, signal] or null, "changes": {…}}'
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lol.model.config import LoLConfig
from lol.train import trainer
from lol.train.config import DataConfig, EvalConfig, GrowthConfig, OptimConfig, TrainConfig
from lol.train.metrics import read_metrics

MODEL = {
    "vocab_size": 280,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "num_experts": 3,
    "num_routed_depths": 4,
    "window_size": 8,
    "window_stride": 4,
}
# The same model on the command line, and documents small enough for it.
FLAGS = [word for name, value in MODEL.items() for word in (f"--model.{name.replace('_', '-')}", str(value))]
FLAGS += ["--batch-size", "2", "--data.context-length", "32", "--eval.rows", "4", "--seed", "3"]
FLAGS += ["--data.document-chars", "40", "--data.held-out-fraction", "0.2", "--eval.no-ngrams"]

# A command run in this process: exit code, standard output, standard error. The fixture `lol` is one.
Lol = Callable[..., tuple[int, str, str]]

# What the machine decides, not the run.
OF_THE_MACHINE = {"seconds", "tokens_per_second", "peak_memory_bytes"}


def write_corpus(file: Path, documents: int = 80) -> Path:
    """Lines of a few words, each its own document where a document is at least 40 characters."""
    draw = random.Random(0)
    words = ["library", "of", "layers", "window", "router", "depth", "block", "path", "shelf", "token"]
    file.write_text("\n\n".join(" ".join(draw.choices(words, k=12)) for _ in range(documents)))
    return file


def small_config(corpus: Path, **changes: Any) -> TrainConfig:
    """Growth, noise, balancing and accumulation are on. A change may be that of a section: model={"num_experts": 2}."""
    config = TrainConfig(
        model=LoLConfig(**(MODEL | changes.pop("model", {}))),
        data=DataConfig(source=str(corpus), document_chars=40, context_length=32, held_out_fraction=0.2),
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=2),
        growth=GrowthConfig(initial_depth=1),
        eval=EvalConfig(every=4, rows=5),
        steps=8,
        batch_size=2,
        accumulation=2,
        seed=7,
        checkpoint_every=3,
    )
    for name, value in changes.items():
        changes[name] = dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
    return dataclasses.replace(config, **changes)


def draw_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what a user adds may do; the package draws from generators of its own, which would hide a lost state."""
    take_step = trainer.take_step

    def step_and_draw(session: trainer.Session, *rest: Any) -> Any:
        torch.rand(3)
        np.random.rand(3)
        return take_step(session, *rest)

    monkeypatch.setattr(trainer, "take_step", step_and_draw)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Send this process a signal at the end of a step, before the step is logged."""
    take_step = trainer.take_step

    def step_and_stop(session: trainer.Session, *rest: Any) -> Any:
        record = take_step(session, *rest)
        if session.step == step:
            os.kill(os.getpid(), number)
        return record

    monkeypatch.setattr(trainer, "take_step", step_and_stop)


def train_elsewhere(
    run: Path, corpus: Path, *, resume: bool, stop: tuple[int, int] | None = None, **changes: Any
) -> int:
    """Train in another process; its exit code."""
    order = {"corpus": str(corpus), "resume": resume, "stop": stop}
    done = subprocess.run(
        [sys.executable, __file__, str(run), json.dumps(order | {"changes": changes})],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def environment() -> dict[str, str]:
    """For child processes: the package that is tested, offline."""
    paths = os.pathsep.join(sys.path)
    return os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


def saved_tensors(run: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint: weights, moments, bias, generators. Slices are put together, under the names that
    whole tensors have."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    tensors = {
        f"{file.name}/{name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in folder.glob("shards/*.safetensors"):
        with safe_open(file, framework="pt") as saved:
            places = json.loads(saved.metadata()["DCP_SHARDING_INFO"])
            for name, place in places.items():
                parts.setdefault(name, []).append((place["saved_offsets"], saved.get_tensor(name)))
    for name, slices in parts.items():
        kind, _, own = name.partition(".")
        rows = [tensor for _, tensor in sorted(slices, key=lambda part: part[0])]
        file = {"weights": "model", "optimizer": "optimizer"}[kind]
        tensors[f"{file}.safetensors/{own}"] = torch.cat(rows) if rows[0].ndim else rows[0]
    return tensors


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Checkpoints of the same bits, training states and records that differ in times and memory only."""
    tensors, others = saved_tensors(one, step), saved_tensors(other, step)
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    states = [json.loads((run / f"checkpoints/step-{step:08d}/training.json").read_text()) for run in (one, other)]
    for state in states:
        assert state["state"].pop("seconds") > 0
        # beartype draws from Python's generator wherever the tests check a list. The others' states are long: name the
        # part that differs, not its numbers.
        del state["state"]["rng"]["python"]
        state |= {f"rng {name}": hash(str(value)) for name, value in state["state"].pop("rng").items()}
    assert states[0] == states[1]
    assert timeless(one) == timeless(other)


def timeless(run: Path) -> list[dict[str, Any]]:
    """The records of a run without what the machine decides."""
    return [{key: value for key, value in record.items() if key not in OF_THE_MACHINE} for record in read_metrics(run)]


def main(run: Path, order: dict[str, Any]) -> None:
    # As conftest.py does: sums in another number of threads are other sums.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_at_every_step(monkeypatch)
        if order["stop"]:
            stop_after(monkeypatch, *order["stop"])
        trainer.train(small_config(Path(order["corpus"]), **order["changes"]), run, resume=order["resume"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
