"""Keeping the library's blocks in use: the bias that moves after every step, and the losses beside or instead of it.

Letters: B rows, D depths, K windows of a row, L blocks, G documents.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lol.model.outputs import Routing
from lol.train.config import BalanceConfig


@torch.no_grad()
def update_bias(
    bias: Float[Tensor, "*depth L"], load: Int[Tensor, "D L"], config: BalanceConfig, step: int, steps: int
) -> None:
    """Move the balancing bias in place, once per optimizer step: `bias_m += rate · sign(mean load - load_m)`. (Article)

    Args:
        bias: (L,) for one bias over all depths: the load is summed over them. (D, L) for one per depth: depths that
            the step did not run stay as they are.
        load: Windows that ran each block, summed over all micro-batches and ranks of the step; depths that ran.
        config: Rate, limit, share of the steps after which the bias rests, and whether each move is centred.
        step: The step that was just taken, from 0.
        steps: Steps of the run.
    """
    if config.strategy != "loss_free" or step >= config.stop * steps:
        return
    if bias.ndim == 1:
        moving, used = bias, load.sum(0)
    else:
        moving, used = bias[: load.shape[0]], load
    used = used.to(torch.float64)
    move = config.rate * torch.sign(used.mean(-1, keepdim=True) - used)
    if config.centre:
        move = move - move.mean(-1, keepdim=True)
    moving.add_(move.to(bias.dtype)).clamp_(-config.limit, config.limit)


def sequence_auxiliary_losses(
    router_logits: Sequence[Float[Tensor, "B K L"]], routing: Routing, config: BalanceConfig
) -> Float[Tensor, "G"]:
    """Per document, `L · Σ_m f_m · ā_m` over all its windows at all depths; exactly 1 in balance. (Article.)

    f_m is the share of the windows that count for block m, ā_m its mean probability. Documents in no order.
    """
    probability, counted, document = _windows(router_logits, routing, config)
    _, document = document.unique(return_inverse=True)
    documents = int(document.max()) + 1
    windows = counted.new_zeros(documents).index_add(0, document, torch.ones_like(document, dtype=counted.dtype))
    share = counted.new_zeros(documents, counted.shape[1]).index_add(0, document, counted) / windows[:, None]
    mean = torch.zeros_like(share).index_add(0, document, probability) / windows[:, None]
    return counted.shape[1] * (share * mean).sum(-1)


def global_auxiliary_loss(
    router_logits: Sequence[Float[Tensor, "B K L"]], routing: Routing, config: BalanceConfig
) -> Float[Tensor, ""]:
    """`L · Σ_m f_m · ā_m` over all windows of the forward pass: the loss of `strategy="aux_loss"`. (Article.)"""
    probability, counted, _ = _windows(router_logits, routing, config)
    return counted.shape[1] * (counted.mean(0) * probability.mean(0)).sum()


def _windows(
    router_logits: Sequence[Float[Tensor, "B K L"]], routing: Routing, config: BalanceConfig
) -> tuple[Float[Tensor, "N L"], Float[Tensor, "N L"], Int[Tensor, "N"]]:
    """All windows of all depths: their probabilities, the block that counts for each (one-hot), their document."""
    assert routing.experts is not None
    assert routing.documents is not None
    logits = torch.stack(tuple(router_logits), dim=1)
    real = routing.experts >= 0
    probability = logits[real].softmax(-1)
    counted = routing.experts[real] if config.count == "chosen" else probability.argmax(-1)
    rows = torch.arange(real.shape[0], device=real.device)[:, None, None].expand_as(real)
    document = rows[real] * (routing.documents.max() + 1) + routing.documents[real]
    return probability, F.one_hot(counted, logits.shape[-1]).to(probability.dtype), document
