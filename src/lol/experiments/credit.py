"""Counterfactual credit in a small language model: does a router learn more from what every other block would cost?

    python -m lol.experiments.credit --seeds 0 1 --steps 300

A router of the article learns by the gradient of the weight of the block that it picked. Here, beside that, one window
and depth of some rows of each step is run with every block, all other choices as they were, and the router is given the
exact gradient of its expected loss over that one choice. The same runs are done without, and all are measured alike:
held-out loss, and how much the paths say. (Decided here.) Letters: B rows, R rows that are tried, n tokens, D depths,
K windows, L blocks, V vocabulary.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from jaxtyping import Float, Int
from torch import Tensor, nn

from lol.data.packing import Row
from lol.errors import UserError
from lol.model.lm import LoLForCausalLM, next_tokens
from lol.model.outputs import LoLCausalLMOutput
from lol.train.config import TrainConfig
from lol.train.evaluate import evaluate
from lol.train.metrics import MetricsLog
from lol.train.progress import Progress
from lol.train.recipes import recipe
from lol.train.session import Session, prepare
from lol.train.trainer import run_steps


@dataclass(frozen=True)
class CreditExperiment:
    """Train a recipe with and without counterfactual credit, and write what came out."""

    recipe: str = "tiny"
    """Of `lol recipe list`."""
    steps: int = 300
    """Of each run."""
    seeds: tuple[int, ...] = (0,)
    """Runs of each kind."""
    shares: tuple[float, ...] = (0.25, 1.0)
    """Shares of the rows of a step that are tried; a run without credit is done besides."""
    coefficient: float = 1.0
    """Of the credit: 1 is the gradient of the expected loss, were every choice of a row drawn from the router."""
    out: Path = Path("results/credit.json")
    """What is written."""

    def __post_init__(self) -> None:
        if not all(0 < share <= 1 for share in self.shares):
            raise UserError(f"shares of the rows are above 0 and at most 1, not {self.shares}")


class CreditedModel(nn.Module):
    """What a training pass calls in place of the model: the same output, whose loss carries the credit's gradient.

    Args:
        model: With a router.
        share: Of the rows, at least one, that are tried in each pass.
        coefficient: Of the credit.
    """

    def __init__(self, model: LoLForCausalLM, share: float, coefficient: float):
        super().__init__()
        self.model = model
        self.share, self.coefficient = share, coefficient

    def forward(self, generator: torch.Generator, **inputs: Any) -> LoLCausalLMOutput:
        """The model's output; its loss has the same value."""
        output = self.model(generator=generator, **inputs)
        chosen = output.routing.experts
        rows = max(1, round(self.share * len(chosen)))
        row, depth, window = _draw_choices(chosen, rows, generator)
        logits = torch.stack(output.router_logits, dim=1)[row, depth, window]
        cost = self._try_blocks(inputs, chosen, row, depth, window) / inputs["num_items_in_batch"]
        choices = (chosen[row] >= 0).sum((1, 2))
        expected = (logits.softmax(-1) * cost).sum(-1)
        # Each row that is tried stands for all rows, and its choice for all choices of the row.
        credit = self.coefficient * (choices * expected).sum() * len(chosen) / rows
        output.loss = output.loss + credit - credit.detach()
        return output

    @torch.no_grad()
    def _try_blocks(
        self, inputs: dict[str, Any], chosen: Int[Tensor, "B D K"], row: Tensor, depth: Tensor, window: Tensor
    ) -> Float[Tensor, "R L"]:
        """The loss of each row with each block at its choice, in nats, without the router's noise."""
        own = {name: inputs[name][row] for name in ("input_ids", "position_ids")}
        path, at = chosen[row], torch.arange(len(row))
        # These rows may all have fewer windows than the longest of the batch.
        path = path[:, :, (path >= 0).any(0).any(0)]
        cost = []
        self.model.eval()
        for block in range(self.model.config.num_experts):
            path[at, depth, window] = block
            tried = self.model(**own, path=path, num_depths=inputs["num_depths"])
            cost.append(_sum_of_losses(tried.logits, **own))
        self.model.train()
        return torch.stack(cost, dim=1)


def _draw_choices(
    chosen: Int[Tensor, "B D K"], rows: int, generator: torch.Generator
) -> tuple[Int[Tensor, "R"], Int[Tensor, "R"], Int[Tensor, "R"]]:
    """Different rows, and of each a depth and a window that is there, all alike probable."""
    row = torch.randperm(len(chosen), generator=generator)[:rows]
    there = (chosen[row] >= 0).flatten(1).float()
    place = torch.multinomial(there, 1, generator=generator).squeeze(1)
    return row, place // chosen.shape[2], place % chosen.shape[2]


def _sum_of_losses(
    logits: Float[Tensor, "R n V"], input_ids: Int[Tensor, "R n"], position_ids: Int[Tensor, "R n"]
) -> Float[Tensor, "R"]:
    """Next-token cross-entropy of each row, in nats."""
    labels = next_tokens(input_ids, position_ids, None)
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)


@torch.no_grad()
def measure(model: LoLForCausalLM, rows: Sequence[Row], batch_size: int) -> dict[str, float]:
    """Held-out losses in nats under the router's own paths and under others, and how the blocks are used.

    Returns:
        `loss`; `loss_mode_path`: every window runs the block that is most common at its depth; `loss_foreign_path`:
        every row runs the path of the row before it; `choice_entropy` of the blocks at a depth, in nats, the mean over
        depths; and `busiest_block_share` of all windows.
    """
    depths = model.config.num_routed_depths
    own = evaluate(model, rows, batch_size, depths)
    mode = own.load.argmax(-1)
    use = own.load / own.load.sum(-1, keepdim=True)
    entropy = -(use * use.clamp(min=1e-12).log()).sum(-1).mean()
    model.eval()
    losses = {"mode": 0.0, "foreign": 0.0}
    for start in range(0, len(rows), batch_size):
        batch = {name: torch.stack([row[name] for row in rows[start : start + batch_size]]) for name in rows[0]}
        chosen = model(**batch).routing.experts
        free = torch.where(chosen >= 0, mode[None, :, None], -1)
        for name, path in (("mode", free), ("foreign", chosen.roll(1, 0))):
            output = model(**batch, path=path, labels=batch["input_ids"], num_items_in_batch=1)
            losses[name] += output.loss.item()
    targets = own.targets
    return {
        "loss": own.loss,
        "loss_mode_path": losses["mode"] / targets,
        "loss_foreign_path": losses["foreign"] / targets,
        "choice_entropy": entropy.item(),
        "busiest_block_share": own.busiest_share,
    }


def train_once(config: TrainConfig, share: float | None, coefficient: float) -> dict[str, Any]:
    """One run; with credit where a share is given."""
    with tempfile.TemporaryDirectory() as folder:
        session = prepare(config, Path(folder), None)
        if share is not None:
            session.module = CreditedModel(session.model, share, coefficient)
        seconds = _take_all_steps(session, Path(folder))
        held_out = measure(session.model, session.held_out, config.batch_size)
    return {"share": share, "seed": config.seed, "cpu_seconds": round(seconds, 1), **held_out}


def _take_all_steps(session: Session, folder: Path) -> float:
    began = time.process_time()
    with MetricsLog(folder) as log, Progress(session.plan.steps, 0, enabled=None, work=session.plan.flops) as progress:
        run_steps(session, log, progress)
    return time.process_time() - began


def compare(experiment: CreditExperiment) -> dict[str, Any]:
    """All runs of the experiment, as JSON values."""
    base = recipe(experiment.recipe)
    quiet = replace(base, steps=experiment.steps, checkpoint_every=0, eval=replace(base.eval, every=0, ngrams=False))
    runs = []
    for seed in experiment.seeds:
        for share in (None, *experiment.shares):
            runs.append(train_once(replace(quiet, seed=seed), share, experiment.coefficient))
            print(json.dumps(runs[-1]), flush=True)
    settings = asdict(experiment) | {"out": experiment.out.name}
    return {"experiment": settings, "torch": torch.__version__, "runs": runs}


def main() -> None:
    """Do the experiment that the command line asks for."""
    experiment = tyro.cli(CreditExperiment)
    torch.set_num_threads(1)
    result = compare(experiment)
    experiment.out.parent.mkdir(parents=True, exist_ok=True)
    experiment.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
