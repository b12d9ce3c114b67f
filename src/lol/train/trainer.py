"""The training loop, to be read from top to bottom: open, prepare, step, measure, save, sum up."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lol.data.ngram import NGramBaselines
from lol.data.packing import token_documents
from lol.errors import UserError
from lol.model.cost import count_parameters
from lol.train.checkpoint import newest_checkpoint
from lol.train.config import TrainConfig, as_json
from lol.train.corpus import name_sources
from lol.train.evaluate import Evaluation, evaluate_sources
from lol.train.interrupt import SIGNALS, Interrupt
from lol.train.metrics import FILE as METRICS
from lol.train.metrics import MetricsLog, trim_metrics
from lol.train.parallel import autocast, join_world, release
from lol.train.progress import Progress, shorten
from lol.train.run_folder import CHECKPOINTS, open_run
from lol.train.session import Session, prepare, save
from lol.train.step import draw_batches, take_step
from lol.train.tracking import check_trackers, open_tracking

# What a resumed run may change: it decides what is kept and shown, and where and when it is computed, not what.
MAY_DIFFER = (
    "checkpoint_every",
    "keep_checkpoints",
    "eval.ngrams",
    "parallel",
    "activation_checkpointing",
    "compile",
    "tracking",
)


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
            check_trackers(config.tracking)
            stack.enter_context(_run_folder(config, run, resume))
            return _newest(run) if resume else None

        session = prepare(config, run, world.from_main(open_folder), world)
        if world.is_main:
            trim_metrics(run, session.step)
        tracking = stack.enter_context(open_tracking(config, run, session.step)) if world.is_main else None
        log = stack.enter_context(MetricsLog(run, writes=world.is_main, also=tracking))
        console = None if world.is_main else Console(quiet=True)
        progress = stack.enter_context(
            Progress(session.plan.steps, session.step, enabled=bar, work=session.plan.flops, console=console)
        )
        for line in [_describe(session), *(tracking.places if tracking else [])]:
            progress.note(line)
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


def run_steps(session: Session, log: MetricsLog, progress: Progress) -> str | None:
    """Take the steps that are left; the name of the signal that stopped them, if one did."""
    config = session.config
    session.model.train()
    rows = iter(session.loader)
    with Interrupt() as interrupt:
        while session.step < session.plan.steps:
            began = time.monotonic()
            batches = draw_batches(session, rows)
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
                save(session)
            if stopped_by and not last:
                return stopped_by
    return None


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
    by_source: dict[str, Any] = {"epochs": session.epochs}
    return result, by_source | ({"losses": losses} if len(losses) > 1 else {})


def _newest(run: Path) -> Path | None:
    """The checkpoint to go on from; none if the run was stopped before its first."""
    checkpoint = newest_checkpoint(run, warn=print)
    if checkpoint is None and any((run / CHECKPOINTS).glob("step-*")):
        raise UserError(
            f"no checkpoint of {run} is whole: bring its files back from a copy, or start again in another --run"
        )
    return checkpoint


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
