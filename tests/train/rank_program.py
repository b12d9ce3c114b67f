"""On every rank: training runs as `lol train` starts them, stopped and resumed. Each rank prints what it ended with.

rank_program.py FOLDER CORPUS RUN…    the runs are those of `RUNS`, each in FOLDER/RUN
"""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.train import trainer
from lol.train.config import DataConfig, EvalConfig, GrowthConfig, TrainConfig
from lol.train.recipes import tiny
from small_run import MODEL, draw_at_every_step, small_config

QUIET = {"router_noise_max": 0.0}
STOP = 4
IDLE = 2


def golden_config(corpus: Path, parallel: str = "none") -> TrainConfig:
    """The tiny recipe on a short context, without noise: 100 steps of 4 rows. At a rate at which, on this text, no two
    blocks come so close that the order of a sum could decide between them."""
    recipe = tiny()
    model = {name: getattr(recipe.model, name) for name in MODEL} | QUIET
    return TrainConfig(
        model=LoLConfig(**(model | {"vocab_size": 300, "num_routed_depths": 4, "tie_word_embeddings": True})),
        data=DataConfig(source=str(corpus), document_chars=40, context_length=48, held_out_fraction=0.2),
        optim=dataclasses.replace(recipe.optim, learning_rate=2e-3),
        balance=recipe.balance,
        growth=GrowthConfig(initial_depth=1),
        eval=EvalConfig(every=50, rows=8),
        steps=100,
        batch_size=4,
        seed=5,
        parallel=parallel,
    )


def straight(run: Path, corpus: Path, parallel: str, **changes: Any) -> None:
    trainer.train(small_config(corpus, parallel=parallel, **changes), run)


def stopped(run: Path, corpus: Path, parallel: str, **changes: Any) -> None:
    """Rank 1 alone gets a SIGTERM; what is on the disk then is kept beside the run, and the run goes on."""
    config = small_config(corpus, parallel=parallel, **changes)
    with pytest.MonkeyPatch.context() as patch:
        take_step = trainer.take_step

        def step_and_stop(session: trainer.Session, *rest: Any) -> Any:
            record = take_step(session, *rest)
            if session.step == STOP and session.world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return record

        patch.setattr(trainer, "take_step", step_and_stop)
        outcome = trainer.train(config, run)
    assert (outcome.step, outcome.stopped_by, outcome.summary) == (STOP, "SIGTERM", None)
    if outcome.is_main:
        shutil.copytree(run, run.with_name(f"{run.name}-kept"))
    trainer.train(config, run, resume=True)


def idle(start: Callable[..., None], run: Path, corpus: Path) -> None:
    """With a block that no window chooses, workers, and the router's noise."""

    def make(config: LoLConfig) -> LoLForCausalLM:
        model = LoLForCausalLM(config)
        with torch.no_grad():
            model.model.router.bias[IDLE] = -1e4  # far below what the noise can add
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lol.train.session.LoLForCausalLM", make)
        start(run, corpus, "fsdp2", data={"num_workers": 2})


def onward(run: Path, corpus: Path, parallel: str) -> None:
    """A run that one process began goes on here; the folder is there already."""
    trainer.train(small_config(corpus, parallel=parallel, model=QUIET), run, resume=True)


Start = Callable[[Path, Path], None]
RUNS: dict[str, Start] = {
    "golden-ddp": lambda run, corpus: trainer.train(golden_config(corpus, "ddp"), run),
    "golden-fsdp2": lambda run, corpus: trainer.train(golden_config(corpus, "fsdp2"), run),
    "straight-ddp": lambda run, corpus: straight(run, corpus, "ddp"),
    "stopped-ddp": lambda run, corpus: stopped(run, corpus, "ddp"),
    "quiet-ddp": lambda run, corpus: straight(run, corpus, "ddp", model=QUIET, activation_checkpointing=True),
    "quiet-fsdp2": lambda run, corpus: straight(run, corpus, "fsdp2", model=QUIET),
    "checkpointing-fsdp2": lambda run, corpus: straight(
        run, corpus, "fsdp2", model=QUIET, activation_checkpointing=True
    ),
    "stopped-fsdp2": lambda run, corpus: stopped(run, corpus, "fsdp2", model=QUIET),
    "straight-idle": lambda run, corpus: idle(straight, run, corpus),
    "stopped-idle": lambda run, corpus: idle(stopped, run, corpus),
    "onward-fsdp2": lambda run, corpus: onward(run, corpus, "fsdp2"),
    "bf16-fsdp2": lambda run, corpus: straight(run, corpus, "fsdp2", model=QUIET, precision="bf16"),
}


def digest(session: trainer.Session) -> dict[str, Any]:
    """What every rank must have the same of: the bias, and the weights where each has them whole."""
    bias = session.model.model.expert_bias
    weights = hashlib.sha256()
    for parameter in session.model.parameters():
        if session.config.parallel == "ddp":
            weights.update(parameter.detach().numpy().tobytes())
    return {"bias": bias.tolist(), "weights": weights.hexdigest()}


def main(folder: Path, corpus: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    # One for all runs: a rank that is done first would find the group of before still open.
    dist.init_process_group("gloo")
    result = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_at_every_step(monkeypatch)
        sessions = []
        prepare = trainer.prepare
        monkeypatch.setattr(trainer, "prepare", lambda *args: sessions.append(prepare(*args)) or sessions[-1])
        for name in names:
            RUNS[name](folder / name, corpus)
            result[name] = digest(sessions[-1])
    dist.destroy_process_group()
    # Behind a mark: rank 0 prints its progress too.
    print("\nresult " + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
