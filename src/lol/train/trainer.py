"""The training loop, to be read from top to bottom: open, prepare, restore, step, measure, save, sum up."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, set_seed

from lol.data.loader import PackedLoader, make_loader
from lol.data.mixture import MixedRows, Source, held_out_rows_by_source
from lol.data.ngram import NGramBaselines
from lol.data.order import generator_named
from lol.data.packing import Row, token_documents
from lol.errors import UserError
from lol.model.cost import count_parameters
from lol.model.lm import LoLForCausalLM, count_targets
from lol.train.balance import auxiliary_coefficient, batch_loss, document_losses, update_biases
from lol.train.budget import Plan, plan_run
from lol.train.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from lol.train.config import TrainConfig, as_json
from lol.train.corpus import find_tokenizer, model_config, name_sources, open_sides
from lol.train.evaluate import Evaluation, evaluate_sources
from lol.train.interrupt import SIGNALS, Interrupt
from lol.train.metrics import FILE as METRICS
from lol.train.metrics import MetricsLog, trim_metrics
from lol.train.optim import learning_rate_at, make_optimizer
from lol.train.parallel import World, autocast, clip_gradients, join_world, parallelize, passes_on, release
from lol.train.progress import Progress, shorten
from lol.train.run_folder import CHECKPOINTS, open_run
from lol.train.state import rng_state, set_rng_state

# What a resumed run may change: it decides what is kept and shown, and where and when it is computed, not what.
MAY_DIFFER = ("checkpoint_every", "keep_checkpoints", "eval.ngrams", "parallel", "activation_checkpointing")


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


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its summary if it came to its last step, else the signal that stopped it."""

    run: Path
    step: int
    summary: dict[str, Any] | None
    stopped_by: str | None
    is_main: bool = True
    """Whether this process is the one of its world that prints."""


def train(config: TrainConfig, run: Path, *, resume: bool = False, bar: bool | None = None) -> Outcome:
    """Train in the folder `run`, or go on with the run that is there.

    Args:
        config: The run. A resumed run must have the same, except for `MAY_DIFFER`.
        run: The run folder; see docs/training.md for what is in it.
        resume: Continue from the newest whole checkpoint, bit for bit as if never stopped.
        bar: Draw a progress bar; `None` decides by whether the output is a terminal.

    Raises:
        UserError: something in the configuration, the data or the folder; nothing was overwritten.
    """
    with ExitStack() as stack:
        world = stack.enter_context(join_world(config.parallel))
        if config.batch_size % world.size:
            raise UserError(
                f"batch_size={config.batch_size} rows cannot be shared by {world.size} processes: give a multiple of it"
            )

        def open_folder() -> Path | None:
            stack.enter_context(_run_folder(config, run, resume))
            return _newest(run) if resume else None

        session = prepare(config, run, world.from_main(open_folder), world)
        if world.is_main:
            trim_metrics(run, session.step)
        log = stack.enter_context(MetricsLog(run, writes=world.is_main))
        console = None if world.is_main else Console(quiet=True)
        progress = stack.enter_context(
            Progress(session.plan.steps, session.step, enabled=bar, work=session.plan.flops, console=console)
        )
        progress.note(_describe(session))
        stopped_by = run_steps(session, log, progress)
        if stopped_by is not None:
            return Outcome(run, session.step, None, stopped_by, world.is_main)
        summary = summarize(session)
        log.write(summary)
    return Outcome(run, session.step, summary, None, world.is_main)


@contextmanager
def _run_folder(config: TrainConfig, run: Path, resume: bool) -> Iterator[None]:
    """The run folder, locked; a start that fails before the first step leaves none behind."""
    with open_run(run, as_json(config), resume=resume, may_differ=MAY_DIFFER) as folder:
        try:
            yield
        except BaseException:
            if not resume and not (run / METRICS).exists():
                folder.discard()
            raise


def prepare(config: TrainConfig, run: Path, checkpoint: Path | None, world: World | None = None) -> Session:
    """Data, tokenizer, model and optimizer; from the checkpoint's state if there is one."""
    world = world or World()
    data = config.data
    sources, held_out = open_sides(config)
    tokenizer = world.from_main(lambda: find_tokenizer(config, sources, checkpoint))
    rows = MixedRows(sources, tokenizer, data.context_length, seed=config.seed, shuffle_buffer=data.shuffle_buffer)
    # Python's and numpy's generators too: what a user adds may draw from them, and a checkpoint keeps them.
    set_seed(config.seed)
    model = LoLForCausalLM(model_config(config, tokenizer))
    model.to(world.device)  # pyright: ignore[reportArgumentType]
    if config.activation_checkpointing:
        model.activation_checkpointing_enable()
    module = parallelize(model, config.parallel, world, config.precision)
    session = Session(
        config=config,
        run=run,
        tokenizer=tokenizer,
        world=world,
        model=model,
        module=module,
        optimizer=make_optimizer(model, config.optim),
        loader=make_loader(rows, config.batch_size, data.num_workers),
        sources=sources,
        held_out_by_source=held_out_rows_by_source(held_out, tokenizer, data.context_length, config.eval.rows),
        plan=plan_run(config, model.config),
    )
    if checkpoint is not None:
        _restore(session, checkpoint)
    return session


def run_steps(session: Session, log: MetricsLog, progress: Progress) -> str | None:
    """Take the steps that are left; the name of the signal that stopped them, if one did."""
    config = session.config
    session.model.train()
    rows = iter(session.loader)
    with Interrupt() as interrupt:
        while session.step < session.plan.steps:
            began = time.monotonic()
            batches = [next(rows) for _ in range(config.accumulation)]
            record = take_step(session, batches)
            session.seconds += time.monotonic() - began
            record["tokens_per_second"] = round(config.tokens_per_step / (time.monotonic() - began), 1)
            log.write(record)
            held_out = None
            last = session.step == session.plan.steps
            if config.eval.every and (session.step % config.eval.every == 0 or last):
                depth = session.plan.due_depth(session.step - 1)
                held_out, by_source = _measure(session, depth)
                log.write({"event": "eval", "step": session.step, "loss": held_out.loss, "depth": depth} | by_source)
            progress.update(
                session.step,
                loss=record["loss"],
                tokens=config.tokens_per_step,
                spent=f"{shorten(session.tokens)} tokens, {shorten(session.flops, 'FLOP')}",
                depth=record["depth"],
                depths=config.model.num_routed_depths,
                heldout=held_out.loss if held_out else None,
            )
            due = config.checkpoint_every and session.step % config.checkpoint_every == 0
            stopped_by = session.world.agree(interrupt.signal, SIGNALS)
            if due or last or stopped_by:
                log.sync()
                _save(session)
            if stopped_by and not last:
                return stopped_by
    return None


def take_step(session: Session, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """One optimizer step over the micro-batches, as if they were one batch. Returns its record for the log.

    Every rank is given all rows and computes its own; what is counted and summed is that of all ranks.
    """
    config, model, plan, step = session.config, session.model, session.plan, session.step
    world, passes = session.world, len(batches) * session.world.size
    depth = plan.depth(step)
    learning_rate = learning_rate_at(step, plan.steps, config.optim)
    for group in session.optimizer.param_groups:
        group["lr"] = learning_rate
    targets = sum(map(count_targets, batches))
    documents = sum(int((batch["position_ids"] == 0).sum()) for batch in batches)
    loss, entropy = torch.zeros((), device=model.device), torch.zeros((), device=model.device)
    load = torch.zeros(depth, config.model.num_experts, dtype=torch.long, device=model.device)
    moe_load = None
    for index, batch in enumerate(batches):
        own = {name: tensor.to(model.device) for name, tensor in world.rows(batch).items()}
        with passes_on(session.module, last=index == len(batches) - 1):
            with autocast(config.precision, world.device):
                output = session.module(
                    **own,
                    labels=own["input_ids"],
                    num_depths=depth,
                    backprop_depth=config.growth.backprop_depth,
                    first_window_full_backprop=config.growth.first_window_full_backprop,
                    generator=_noise_generator(config.seed, step, index, world.rank),
                    output_router_logits=True,
                    num_items_in_batch=targets,
                )
                total = output.loss + _balance_loss(output, config, documents, passes)
            total.backward()
        loss += output.loss.detach()
        load += output.routing.load
        if output.moe_routing is not None:
            moe_load = output.moe_routing.load if moe_load is None else moe_load + output.moe_routing.load
        entropy += _router_entropy(output) / passes
    loss, load, entropy, *moe_loads = world.add_up(loss, load, entropy, *([] if moe_load is None else [moe_load]))
    moe_load = moe_loads[0] if moe_loads else None
    norm = clip_gradients(model.parameters(), config.optim.clip_norm or float("inf"))
    if not torch.isfinite(loss) or not torch.isfinite(norm):
        raise UserError(
            f"step {step + 1}: the loss is {loss.item():.4g} and the gradient's norm {norm.item():.4g}; training stops "
            "before the weights are touched. Resume from the last checkpoint, with a lower --optim.learning-rate in a "
            "new run"
        )
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=True)
    update_biases(model.model, load, moe_load, config.balance, step, plan.steps)
    session.step += 1
    session.tokens += config.tokens_per_step
    session.flops += plan.flops(step)
    return {
        "event": "train",
        "step": session.step,
        "loss": loss.item(),
        "tokens": session.tokens,
        "flops": session.flops,
        "depth": depth,
        "learning_rate": learning_rate,
        "grad_norm": norm.item(),
        "load": load.tolist(),
        "router_entropy": entropy.item(),
    } | ({} if moe_load is None else {"moe_load": moe_load.tolist()})


def summarize(session: Session) -> dict[str, Any]:
    """What the run came to: the held-out loss beside those of counted models, and the use of the blocks."""
    config = session.config
    result, by_source = _measure(session, config.model.num_routed_depths)
    summary = {
        "event": "summary",
        "step": session.step,
        "held_out_loss": result.loss,
        "tokens": session.tokens,
        "flops": session.flops,
        "ended_by": session.plan.limit,
        "seconds": round(session.seconds, 1),
        "parameters": count_parameters(session.model.config).total,
        "busiest_block_share": result.busiest_share,
        "load": result.load.tolist(),
    } | by_source
    if config.eval.ngrams and session.world.is_main:
        documents = (ids for source in session.sources for ids in token_documents(source.documents, session.tokenizer))
        counts = NGramBaselines.count(documents, session.model.config.vocab_size)
        summary["unigram_loss"] = counts.unigram_loss(session.held_out)
        summary["bigram_loss"] = counts.bigram_loss(session.held_out)
    return summary


def _measure(session: Session, depth: int) -> tuple[Evaluation, dict[str, Any]]:
    """The held-out rows measured, and what a record says of each source: epochs, and of several the losses too.

    Every rank measures all rows: they are few, and the result is the same to the last bit.
    """
    with autocast(session.config.precision, session.world.device):
        result, losses = evaluate_sources(session.model, session.held_out_by_source, session.config.batch_size, depth)
    release(session.model)
    by_source: dict[str, Any] = {"epochs": session.loader.epochs}
    return result, by_source | ({"losses": losses} if len(losses) > 1 else {})


def _balance_loss(output: Any, config: TrainConfig, documents: int, passes: int) -> Tensor | float:
    """The auxiliary loss of a forward pass, its share of the step's; the global one is that of each pass by itself."""
    coefficient = auxiliary_coefficient(config.balance)
    if coefficient == 0 or not (output.router_logits or output.moe_router_logits):
        return 0.0
    if config.balance.strategy == "aux_loss":
        return coefficient * batch_loss(output, config.balance) / passes
    return coefficient * document_losses(output, config.balance).sum() / documents


@torch.no_grad()
def _router_entropy(output: Any) -> Tensor | float:
    """Mean entropy in nats of the router's distribution over the windows."""
    if not output.router_logits:
        return 0.0
    logits = torch.stack(output.router_logits, dim=1)[output.routing.experts >= 0]
    log_probability = logits.log_softmax(-1)
    return -(log_probability.exp() * log_probability).sum(-1).mean()


def _noise_generator(seed: int, step: int, batch: int, rank: int) -> torch.Generator:
    """The router's noise is a function of the seed and the place in the run, so a resumed run draws the same."""
    place = f"router noise {seed} {step} {batch}" + (f" {rank}" if rank else "")
    return generator_named(place)


def _save(session: Session) -> None:
    state = {
        "config": as_json(session.config),
        "step": session.step,
        "tokens": session.tokens,
        "flops": session.flops,
        "seconds": session.seconds,
        "loader": session.loader.state_dict(),
        "rng": rng_state(),
    }

    def save() -> None:
        save_checkpoint(
            session.run, session.step, session.model, session.optimizer, state, session.tokenizer,
            keep=session.config.keep_checkpoints, writes=session.world.is_main,
        )  # fmt: skip

    if not session.world.is_main:
        save()
    # The others wait: one that ended while rank 0 writes would have torchrun end rank 0 too.
    session.world.from_main(save)


def _newest(run: Path) -> Path | None:
    """The checkpoint to go on from; none if the run was stopped before its first."""
    checkpoint = newest_checkpoint(run, warn=print)
    if checkpoint is None and any((run / CHECKPOINTS).glob("step-*")):
        raise UserError(
            f"no checkpoint of {run} is whole: bring its files back from a copy, or start again in another --run"
        )
    return checkpoint


def _restore(session: Session, checkpoint: Path) -> None:
    state = load_checkpoint(checkpoint, session.model, session.optimizer)
    session.loader.load_state_dict(state["loader"])
    set_rng_state(state["rng"])
    for name in ("step", "tokens", "flops", "seconds"):
        setattr(session, name, state[name])


def _describe(session: Session) -> str:
    model, config, plan = session.model.config, session.config, session.plan
    counts = count_parameters(model)
    resumed = f", resumed at step {session.step}" if session.step else ""
    budget = f", as many of {config.steps:,} as budget.{plan.limit} allows" if plan.limit != "steps" else ""
    return (
        f"{counts.total / 1e6:.1f} M parameters: {model.num_experts} blocks over {model.num_routed_depths} depths, "
        f"{model.num_prelude_layers}+{model.num_coda_layers} fixed layers, vocabulary {model.vocab_size:,}; "
        f"{plan.steps:,} steps of {config.tokens_per_step:,} tokens from {name_sources(config)}, "
        f"{shorten(plan.total_flops, 'FLOP')}{budget}{resumed}"
    )
