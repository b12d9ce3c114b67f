"""Where a step's loss or gradient stopped being a number: which rank, which micro-batch, which rows.

What a step adds up over ranks and micro-batches no longer shows where a NaN came from. The weights are not touched yet
and the noise is a function of the place in the run, so the same passes are simply run again, one by one, and looked at:
the logits, and the gradient that comes back to the stream between the layers. Both are each row's own. (Decided here.)
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lol.train.parallel import passes_on
from lol.train.run_folder import CHECKPOINTS
from lol.train.session import Session

_RANKS_SHOWN, _ROWS_SHOWN, _TOKENS_SHOWN = 8, 8, 16


def explain_non_finite(
    session: Session,
    batches: Sequence[Mapping[str, Tensor]],
    run_pass: Callable[[int], tuple[Any, Tensor]],
    loss: float,
    norm: float,
) -> str:
    """The message for a step that is not taken. Every rank must call this; all get the same text.

    Args:
        session: The run, its weights as they were before the step.
        batches: This rank's rows of the micro-batches.
        run_pass: Runs the forward pass of a micro-batch again; its output and what its backward pass begins at.
        loss: The step's.
        norm: That of the step's whole gradient.
    """
    session.optimizer.zero_grad(set_to_none=True)
    own = None
    for index, batch in enumerate(batches):
        found = _look(session, index, batch, run_pass)
        if own is None and found is not None:
            own = f"rank {session.world.rank}, micro-batch {index + 1} of {len(batches)}: {found}"
    session.optimizer.zero_grad(set_to_none=True)
    places = [place for place in session.world.gather(own) if place is not None]
    shown = places[:_RANKS_SHOWN] + [f"{len(places) - _RANKS_SHOWN} more ranks"] * (len(places) > _RANKS_SHOWN)
    where = "; ".join(shown) or "in no row by itself, but in a sum over rows, passes or ranks that is too large"
    newest = session.world.from_main(lambda: _newest(session.run))
    kept = "no checkpoint was written before" if newest is None else f"the last checkpoint before is {newest}"
    return (
        f"step {session.step + 1}: the loss is {loss:.4g} and the gradient's norm {norm:.4g}; training stops before "
        f"the weights are touched, and {kept}. Where it begins: {where}. The same run comes to the same step again: "
        "start a new one with a lower --optim.learning-rate, or without those rows"
    )


def _look(
    session: Session, index: int, batch: Mapping[str, Tensor], run_pass: Callable[[int], tuple[Any, Tensor]]
) -> str | None:
    """What of a pass is not finite, and in which rows; `None` if all of it is."""
    ids = batch["input_ids"]
    bad = torch.zeros(len(ids), dtype=torch.bool, device=session.model.device)

    def look(x: Tensor) -> None:
        bad.logical_or_(~x.isfinite().flatten(1).all(1))

    def listen(_module: nn.Module, _args: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        # Router-only tokens are embedded as a flat list: they are no rows.
        if state.ndim == 3 and state.requires_grad:
            state.register_hook(look)

    body = session.model.model
    hooks = [module.register_forward_hook(listen) for module in (body.embed_tokens, *body.prelude, *body.coda)]
    try:
        with passes_on(session.module, last=False):
            output, total = run_pass(index)
            look(output.logits.detach())
            what = "the gradient" if output.loss.isfinite() else "the loss"
            total.backward()
    finally:
        for hook in hooks:
            hook.remove()
    rows = bad.nonzero().squeeze(1).tolist()
    if not rows:
        return None if output.loss.isfinite() else what
    listed = ", ".join(str(row + 1) for row in rows[:_ROWS_SHOWN]) + ", …" * (len(rows) > _ROWS_SHOWN)
    text = session.tokenizer.decode(ids[rows[0], :_TOKENS_SHOWN].tolist())
    return f"{what}, row {listed} of its {len(ids)}, the first of which begins {json.dumps(text, ensure_ascii=False)}"


def _newest(run: Path) -> Path | None:
    return max((run / CHECKPOINTS).glob("step-*"), default=None)
