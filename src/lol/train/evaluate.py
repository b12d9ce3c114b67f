"""Measuring a model on held-out rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lol.data.packing import Row
from lol.model.lm import LoLForCausalLM, count_targets


@dataclass(frozen=True)
class Evaluation:
    """Mean next-token loss in nats over all targets of the rows, and the windows that ran each block (D, L)."""

    loss: float
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
        output = model(**batch, labels=batch["input_ids"], num_depths=num_depths, num_items_in_batch=1)
        loss += output.loss.double().cpu()
        load += output.routing.load.cpu()
        targets += count_targets(batch)
    model.train(was_training)
    return Evaluation(float(loss) / targets, load)
