"""Measuring a model on held-out rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lol.data.packing import Row
from lol.model.lm import LoLForCausalLM, count_targets


@dataclass(frozen=True)
class Evaluation:
    """Mean next-token loss in nats over all targets of the rows, how many those are, and the windows that ran each
    block (D, L)."""

    loss: float
    targets: int
    load: Int[Tensor, "D L"]

    @property
    def busiest_share(self) -> float:
        """Share of all windows that ran the block that ran most."""
        per_block = self.load.sum(0)
        return float(per_block.max() / per_block.sum().clamp(min=1))


@torch.no_grad()
def evaluate(model: LoLForCausalLM, rows: Sequence[Row], batch_size: int, num_depths: int) -> Evaluation:
    """Run the model over the rows in eval mode (no noise) and leave it in the mode it was in."""
    was_training = model.training
    model.eval()
    loss, targets = torch.zeros((), dtype=torch.float64), 0
    load = torch.zeros(num_depths, model.config.num_experts, dtype=torch.long)
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        batch = {name: torch.stack([row[name] for row in chunk]).to(model.device) for name in chunk[0]}
        labelled = {"labels": batch["input_ids"]} | batch
        output = model(**labelled, num_depths=num_depths, num_items_in_batch=1)
        loss += output.loss.double().cpu()
        load += output.routing.load.cpu()
        targets += count_targets(batch)
    model.train(was_training)
    return Evaluation(float(loss) / targets, targets, load)


def evaluate_sources(
    model: LoLForCausalLM, rows: Mapping[str, Sequence[Row]], batch_size: int, num_depths: int
) -> tuple[Evaluation, dict[str, float]]:
    """Measure the rows of each source by itself: the result over all targets of all of them, and each one's loss."""
    results = {name: evaluate(model, some, batch_size, num_depths) for name, some in rows.items()}
    if len(results) == 1:
        (only,) = results.values()
        return only, {name: result.loss for name, result in results.items()}
    targets = sum(result.targets for result in results.values())
    loss = sum(result.loss * result.targets for result in results.values()) / targets
    load = torch.stack([result.load for result in results.values()]).sum(0)
    return Evaluation(loss, targets, load), {name: result.loss for name, result in results.items()}
