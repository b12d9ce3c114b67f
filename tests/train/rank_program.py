"""On every rank: training runs as `lol train` starts them, stopped and resumed. Each rank prints what it ended with:
what must be the same on all, and what is its own.

rank_program.py FOLDER CORPUS RUN…    the runs are those of `RUNS`, each in FOLDER/RUN
"""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.train import compiled, trainer
from lol.train.config import DataConfig, EvalConfig, GrowthConfig, TrainConfig
from lol.train.recipes import tiny
from small_run import MODEL, draw_at_every_step, small_config

QUIET = {"router_noise_max": 0.0}
STOP = 4
# Of the data set that ranks share out by documents.
FILES, ROWS = 4, 6
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
    stop_and_go_on(run, small_config(corpus, parallel=parallel, **changes))


def stop_and_go_on(run: Path, config: TrainConfig) -> None:
    """Rank 1 alone gets a SIGTERM; what is on the disk then is kept beside the run, and the run goes on."""
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


def write_documents(folder: Path) -> None:
    """A local hub data set of four files, the last of longer texts, and a file to evaluate on."""
    (folder / "hub").mkdir()
    for file in range(FILES):
        texts = [f"{file}-{row} " + "a path of tokens " * (1 + 5 * (file // 3)) for row in range(ROWS)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "hub" / f"train-{file:05}-of-{FILES:05}.jsonl").write_text(lines)
    (folder / "held.jsonl").write_text((json.dumps({"text": "a path of tokens by the router"}) + "\n") * 20)


def documents_config(folder: Path, parallel: str = "none", **changes: Any) -> TrainConfig:
    """A run in which every rank reads documents of its own, streamed as from the Hub."""
    data = {"source": f"hf:{folder / 'hub'}", "held_out_source": str(folder / "held.jsonl"), "shard_by": "documents"}
    data |= {"shuffle_buffer": 4} | changes.pop("data", {})
    return small_config(folder, data=data, model=QUIET, batch_size=4, parallel=parallel, **changes)


def by_documents(run: Path, parallel: str, workers: int) -> None:
    trainer.train(documents_config(run.parent, parallel, data={"num_workers": workers}), run)


def stopped_by_documents(run: Path, parallel: str, workers: int) -> None:
    stop_and_go_on(run, documents_config(run.parent, parallel, data={"num_workers": workers}))


def without_documents(run: Path) -> None:
    """For one rank there is none; both must say so."""
    with pytest.raises(UserError, match="no document for reader 1 of 2"):
        trainer.train(documents_config(run.parent, "ddp", data={"source": str(run.parent / "one.jsonl")}), run)


def spoil_loss(session: trainer.Session, batches: Sequence[dict[str, torch.Tensor]]) -> None:
    """The embedding of a token that one row alone has, rank 1's of the second micro-batch, is no number any more."""
    rows = torch.cat([batch["input_ids"] for batch in batches])
    alone = set(rows[3].tolist()) - set(rows[:3].flatten().tolist())
    with torch.no_grad():
        session.model.model.embed_tokens.weight[list(alone)] = float("nan")


def spoil_gradient(session: trainer.Session, _batches: Any) -> None:
    """On rank 1 the gradient of what the coda returns is no number any more."""
    if session.world.rank == 1:
        session.model.model.coda[0].register_forward_hook(
            lambda _module, _args, state: state.register_hook(lambda gradient: gradient * float("inf")) and None
        )


def spoiled(run: Path, corpus: Path, parallel: str, spoil: Callable[..., None]) -> str:
    """Something becomes no number before step 5; what each rank is told then."""
    config = small_config(corpus, parallel=parallel, model=QUIET)
    with pytest.MonkeyPatch.context() as patch:
        take_step = trainer.take_step

        def spoil_and_step(session: trainer.Session, batches: Any) -> Any:
            if session.step == STOP:
                spoil(session, batches)
            return take_step(session, batches)

        patch.setattr(trainer, "take_step", spoil_and_step)
        with pytest.raises(UserError) as caught:
            trainer.train(config, run)
    return str(caught.value)


def compiled_by_dynamo(run: Path, corpus: Path, parallel: str, **changes: Any) -> None:
    """As --compile does, but for the C++ compiler's minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "BACKEND", "aot_eager")
        straight(run, corpus, parallel, model=QUIET, compile=True, **changes)


Start = Callable[[Path, Path], Any]
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
    "documents-ddp": lambda run, _: by_documents(run, "ddp", 0),
    "documents-stopped-ddp": lambda run, _: stopped_by_documents(run, "ddp", 0),
    "documents-workers-fsdp2": lambda run, _: by_documents(run, "fsdp2", 2),
    "documents-stopped-workers-fsdp2": lambda run, _: stopped_by_documents(run, "fsdp2", 2),
    "documents-none": lambda run, _: without_documents(run),
    "muon-ddp": lambda run, corpus: straight(run, corpus, "ddp", model=QUIET, optim={"name": "muon"}),
    "muon-fsdp2": lambda run, corpus: straight(run, corpus, "fsdp2", model=QUIET, optim={"name": "muon"}),
    "muon-stopped": lambda run, corpus: stopped(run, corpus, "fsdp2", model=QUIET, optim={"name": "muon"}),
    "compiled-ddp": lambda run, corpus: compiled_by_dynamo(run, corpus, "ddp"),
    "compiled-fsdp2": lambda run, corpus: compiled_by_dynamo(run, corpus, "fsdp2", activation_checkpointing=True),
    "nan-loss-ddp": lambda run, corpus: spoiled(run, corpus, "ddp", spoil_loss),
    "nan-gradient-fsdp2": lambda run, corpus: spoiled(run, corpus, "fsdp2", spoil_gradient),
}


def digest(session: trainer.Session) -> dict[str, Any]:
    """What every rank must have the same of: the bias, and the weights where each has them whole."""
    bias = session.model.model.expert_bias
    weights = hashlib.sha256()
    for parameter in session.model.parameters():
        if session.config.parallel == "ddp":
            weights.update(parameter.detach().numpy().tobytes())
    return {"bias": bias.tolist(), "weights": weights.hexdigest()}


def keep_batches(patch: pytest.MonkeyPatch, folder: Path) -> list[list[dict[str, Any]]]:
    """What this rank trains on, a list for each step; of DDP's first step, rank 0 writes the gradient too."""
    kept: list[list[dict[str, Any]]] = []
    take_step = trainer.take_step

    def step_and_keep(session: trainer.Session, batches: Any) -> Any:
        kept.append([{name: tensor.tolist() for name, tensor in batch.items()} for batch in batches])
        record = take_step(session, batches)
        if session.step == 1 and session.world.is_main and session.config.parallel == "ddp":
            names = {parameter: name for name, parameter in session.model.named_parameters()}
            moments = {names[parameter]: state["exp_avg"] for parameter, state in session.optimizer.state.items()}
            save_file(moments, folder / f"{session.run.name}.safetensors")
        return record

    patch.setattr(trainer, "take_step", step_and_keep)
    return kept


def main(folder: Path, corpus: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    # One for all runs: a rank that is done first would find the group of before still open.
    dist.init_process_group("gloo")
    result, own = {}, {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_at_every_step(monkeypatch)
        sessions = []
        prepare = trainer.prepare
        monkeypatch.setattr(trainer, "prepare", lambda *args: sessions.append(prepare(*args)) or sessions[-1])
        # Which rank's is logged cannot be told from real ones.
        monkeypatch.setattr("lol.train.step.peak_memory", lambda _: (1000 + dist.get_rank(), 0))
        for name in names:
            with monkeypatch.context() as patch:
                kept = keep_batches(patch, folder) if "documents" in name else []
                told = RUNS[name](folder / name, corpus)
            result[name] = {"told": told} if isinstance(told, str) else digest(sessions[-1])
            own[name] = {"batches": kept, "epochs": sessions[-1].loader.epochs} if kept else {}
    dist.destroy_process_group()
    # Behind a mark: rank 0 prints its progress too.
    print("\nresult " + json.dumps({"same": result, "own": own}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
