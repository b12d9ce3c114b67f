"""Keeping the library's blocks in use: the bias that moves after every step, and the losses beside or instead of it.

Mixture-of-experts layers are balanced by the same rules, each by itself; their losses are averaged over the layers and
added to the library's with the same coefficient (decided here).

Letters: B rows, D depths, K windows of a row, L blocks, G documents; n tokens, M mixture-of-experts layers, E experts;
N windows or tokens, X blocks or experts.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lol.model.base import LoLModel
from lol.model.outputs import LoLCausalLMOutput, MoERouting, Routing
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


def update_biases(
    model: LoLModel,
    load: Int[Tensor, "D L"],
    moe_load: Int[Tensor, "M E"] | None,
    config: BalanceConfig,
    step: int,
    steps: int,
) -> None:
    """Move all balancing biases of a model, the library's and those of mixture-of-experts layers, in place.

    Args:
        model: Whose biases are moved.
        load: As `update_bias` takes it.
        moe_load: Tokens that went through each expert of each mixture-of-experts layer, summed alike; `None` without.
        config: As `update_bias` takes it, like the rest.
        step: The step that was just taken, from 0.
        steps: Steps of the run.
    """
    if model.expert_bias is not None:
        update_bias(model.expert_bias, load, config, step, steps)
    if moe_load is None:
        return
    for layer, used in zip(model.moe_layers, moe_load, strict=True):
        assert layer.moe.router.expert_bias is not None
        update_bias(layer.moe.router.expert_bias, used[None], config, step, steps)


def auxiliary_coefficient(config: BalanceConfig) -> float:
    """What the strategy's auxiliary loss is multiplied by; 0 where it has none."""
    return {"loss_free": config.sequence_aux, "aux_loss": config.global_aux, "none": 0.0}[config.strategy]


def document_losses(output: LoLCausalLMOutput, config: BalanceConfig) -> Float[Tensor, "G"]:
    """Per document, the sequence auxiliary losses of the library and of mixture-of-experts layers, added."""
    return _add_losses(output, config, sequence_auxiliary_losses, moe_sequence_auxiliary_losses)


def batch_loss(output: LoLCausalLMOutput, config: BalanceConfig) -> Float[Tensor, ""]:
    """The global auxiliary losses of the library and of mixture-of-experts layers, added."""
    return _add_losses(output, config, global_auxiliary_loss, moe_global_auxiliary_loss)


def _add_losses(
    output: LoLCausalLMOutput, config: BalanceConfig, of_library: Callable[..., Tensor], of_moe: Callable[..., Tensor]
) -> Tensor:
    losses = []
    if output.router_logits:
        losses.append(of_library(output.router_logits, output.routing, config))
    if output.moe_router_logits:
        losses.append(of_moe(output.moe_router_logits, output.moe_routing, config))
    return torch.stack(losses).sum(0)


def sequence_auxiliary_losses(
    router_logits: Sequence[Float[Tensor, "B K L"]], routing: Routing, config: BalanceConfig
) -> Float[Tensor, "G"]:
    """Per document, `L · Σ_m f_m · ā_m` over all its windows at all depths; exactly 1 in balance. (Article.)

    f_m is the share of the windows that count for block m, ā_m its mean probability. Documents in the order of rows.
    """
    return balance_by_document(*_windows(router_logits, routing, config))


def global_auxiliary_loss(
    router_logits: Sequence[Float[Tensor, "B K L"]], routing: Routing, config: BalanceConfig
) -> Float[Tensor, ""]:
    """`L · Σ_m f_m · ā_m` over all windows of the forward pass: the loss of `strategy="aux_loss"`. (Article.)"""
    return _balance_of_all(*_windows(router_logits, routing, config)[:2])


def moe_sequence_auxiliary_losses(
    router_logits: Sequence[Float[Tensor, "B n E"]], routing: MoERouting, config: BalanceConfig
) -> Float[Tensor, "G"]:
    """The same of mixture-of-experts layers, per layer over the document's tokens, and the mean over the layers.

    A token counts for each of its k experts by 1/k.
    """
    layers = [
        balance_by_document(*_tokens(logits, routing, index, config)) for index, logits in enumerate(router_logits)
    ]
    return torch.stack(layers).mean(0)


def moe_global_auxiliary_loss(
    router_logits: Sequence[Float[Tensor, "B n E"]], routing: MoERouting, config: BalanceConfig
) -> Float[Tensor, ""]:
    """The same over all tokens of the forward pass."""
    layers = [
        _balance_of_all(*_tokens(logits, routing, index, config)[:2]) for index, logits in enumerate(router_logits)
    ]
    return torch.stack(layers).mean()


def _balance_of_all(probability: Float[Tensor, "N X"], counted: Float[Tensor, "N X"]) -> Float[Tensor, ""]:
    return counted.shape[1] * (counted.mean(0) * probability.mean(0)).sum()


def balance_by_document(
    probability: Float[Tensor, "N X"], counted: Float[Tensor, "N X"], document: Int[Tensor, "N"]
) -> Float[Tensor, "G"]:
    """Per document, `X · Σ_m f_m · ā_m` over its windows or tokens; documents by their numbers.

    Args:
        probability: Of each block, for each window or token.
        counted: What each counts for each block, adding up to 1.
        document: The number of each one's document.
    """
    _, document = document.unique(return_inverse=True)
    documents = int(document.max()) + 1
    windows = counted.new_zeros(documents).index_add(0, document, torch.ones_like(document, dtype=counted.dtype))
    share = counted.new_zeros(documents, counted.shape[1]).index_add(0, document, counted) / windows[:, None]
    mean = torch.zeros_like(share).index_add(0, document, probability) / windows[:, None]
    return counted.shape[1] * (share * mean).sum(-1)


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
    counted = F.one_hot(counted, logits.shape[-1]).to(probability.dtype)
    return probability, counted, _number_documents(routing.documents, real)


def _tokens(
    logits: Float[Tensor, "B n E"], routing: MoERouting, layer: int, config: BalanceConfig
) -> tuple[Float[Tensor, "N E"], Float[Tensor, "N E"], Int[Tensor, "N"]]:
    """All tokens of one layer: probabilities, the experts that count for each (adding up to 1), documents."""
    assert routing.experts is not None
    assert routing.documents is not None
    real = routing.documents >= 0
    probability = logits[real].softmax(-1)
    experts = routing.experts[:, layer][real]
    if config.count == "unbiased":
        experts = probability.topk(experts.shape[1], dim=-1).indices
    counted = F.one_hot(experts, logits.shape[-1]).to(probability.dtype).mean(1)
    return probability, counted, _number_documents(routing.documents, real)


def _number_documents(in_row: Int[Tensor, "B *place"], real: Bool[Tensor, "B *place"]) -> Int[Tensor, "N"]:
    """A number for the document of each real place that no document of another row has."""
    row = real.nonzero()[:, 0]
    return row * (in_row.max() + 1) + in_row[real]
