"""The parts of a training run: how they are made, and how they go to a checkpoint and come back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, set_seed

from lol.data.loader import PackedLoader, make_loader
from lol.data.mixture import MixedRows, Source, held_out_rows_by_source
from lol.data.packing import Row
from lol.errors import UserError
from lol.model.lm import LoLForCausalLM
from lol.train.budget import Plan, plan_run
from lol.train.checkpoint import load_checkpoint, save_checkpoint
from lol.train.compiled import compile_blocks
from lol.train.config import TrainConfig, as_json
from lol.train.corpus import find_tokenizer, model_config, open_sides
from lol.train.loading import find_model, start_from
from lol.train.optim import make_optimizer
from lol.train.parallel import World, parallelize
from lol.train.state import rng_state, set_rng_state


@dataclass
class Session:
    """The parts of a run, and how far it is."""

    config: TrainConfig
    run: Path
    tokenizer: PreTrainedTokenizerFast
    world: World
    model: LoLForCausalLM
    module: nn.Module
    """What a training pass calls: the model, or what sums its gradients over processes."""
    optimizer: torch.optim.Optimizer
    loader: PackedLoader
    sources: tuple[Source, ...]
    held_out_by_source: dict[str, list[Row]]
    plan: Plan
    step: int = 0
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0

    @property
    def held_out(self) -> list[Row]:
        """All held-out rows, source after source."""
        return [row for rows in self.held_out_by_source.values() for row in rows]

    @property
    def epochs(self) -> dict[str, int]:
        """Passes over the documents of each source that are complete; of ranks that read their own, every rank's."""
        if self.config.data.shard_by == "rows":
            return self.loader.epochs
        of_ranks = self.world.gather(self.loader.epochs)
        return {name: min(epochs[name] for epochs in of_ranks) for name in of_ranks[0]}


def prepare(config: TrainConfig, run: Path, checkpoint: Path | None, world: World | None = None) -> Session:
    """Data, tokenizer, model and optimizer; from the checkpoint's state if there is one."""
    world = world or World()
    data = config.data
    sources, held_out = open_sides(config)
    init = None
    if config.init is not None and checkpoint is None:
        init = world.from_main(lambda: find_model(Path(config.init or "")))
    tokenizer = world.from_main(lambda: find_tokenizer(config, sources, checkpoint, init))
    # Python's and numpy's generators too: what a user adds may draw from them, and a checkpoint keeps them.
    set_seed(config.seed)
    model = LoLForCausalLM(model_config(config, tokenizer))
    if init is not None:
        start_from(init, model)
    model.to(world.device)  # pyright: ignore[reportArgumentType]
    if config.activation_checkpointing:
        model.activation_checkpointing_enable()
    module = parallelize(model, config.parallel, world, config.precision)
    if config.compile:
        compile_blocks(model)
    session = Session(
        config=config,
        run=run,
        tokenizer=tokenizer,
        world=world,
        model=model,
        module=module,
        optimizer=make_optimizer(model, config.optim),
        loader=_open_loader(config, sources, tokenizer, world),
        sources=sources,
        held_out_by_source=held_out_rows_by_source(
            held_out, tokenizer, data.context_length, config.eval.rows, data.scored_after
        ),
        plan=plan_run(config, model.config),
    )
    if checkpoint is not None:
        _restore(session, checkpoint)
    return session


def _open_loader(
    config: TrainConfig, sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast, world: World
) -> PackedLoader:
    """Every rank's loader gives all rows of all ranks, or the rows of its own documents: then its share of a batch."""
    data, readers = config.data, world.size if config.data.shard_by == "documents" else 1
    rows = MixedRows(
        sources,
        tokenizer,
        data.context_length,
        seed=config.seed,
        shuffle_buffer=data.shuffle_buffer,
        scored_after=data.scored_after,
        rank=world.rank if readers > 1 else 0,
        world_size=readers,
    )
    return make_loader(rows, config.batch_size // readers, data.num_workers)


def save(session: Session) -> None:
    """Write the checkpoint of this step; every rank calls this, and returns when it is on the disk."""
    place = session.loader.state_dict()
    state = {
        "config": as_json(session.config),
        "step": session.step,
        "tokens": session.tokens,
        "flops": session.flops,
        "seconds": session.seconds,
        "loader": place if session.config.data.shard_by == "rows" else session.world.gather(place),
        "rng": rng_state(),
    }

    save_checkpoint(
        session.run, session.step, session.model, session.optimizer, state, session.tokenizer,
        keep=session.config.keep_checkpoints, world=session.world,
    )  # fmt: skip


def _restore(session: Session, checkpoint: Path) -> None:
    state = load_checkpoint(checkpoint, session.model, session.optimizer, session.world)
    session.loader.load_state_dict(_own_place(session, state["loader"]))
    set_rng_state(state["rng"])
    for name in ("step", "tokens", "flops", "seconds"):
        setattr(session, name, state[name])


def _own_place(session: Session, saved: Any) -> dict[str, Any]:
    """This rank's place in the data: the one of all ranks, or of a list the one that is its own."""
    if session.config.data.shard_by == "rows":
        return saved
    if len(saved) != session.world.size:
        raise UserError(
            f"this run has data.shard_by=documents, and {len(saved)} processes have a place of their own in the data:"
            f" resume with {len(saved)} processes, not {session.world.size}, or start a new run (with"
            " data.shard_by=rows, any number that divides the batch can go on)"
        )
    return saved[session.world.rank]
