"""The optimizer and its learning rate."""

import math

import torch
from torch import nn

from lol.train.config import OptimConfig
from lol.train.muon import MuonAdamW

# Parts whose weights are no matrices to be kept small, though some are stacked to two axes.
_NO_DECAY = ("norm", "bias", "depth_embedding", "filler_embedding", "film", "injection")


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of all parameters, with weight decay on matrices only.

    `adamw` is torch's, in one kernel for all parameters. The library is one stack, so a block that no window chose has
    a gradient of 0, not none: AdamW still decays it and lets its moments fade. `muon` takes the projections of
    attention and feed-forward, in prelude, library and coda, and leaves the rest to AdamW; it lets such a block rest.
    """
    projections, decayed, others = [], [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in _NO_DECAY)
        if config.name == "muon" and "_proj." in name:
            projections.append(parameter)
        else:
            (decayed if is_matrix else others).append(parameter)
    decay, shared = config.weight_decay, {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    if config.name == "muon":
        return MuonAdamW(projections, groups, momentum=config.momentum, weight_decay=decay, **shared)
    return torch.optim.AdamW(groups, fused=True, **shared)


def learning_rate_at(step: int, steps: int, config: OptimConfig) -> float:
    """Linear warm-up over `warmup_steps`, then a cosine that ends at `final_learning_rate` of the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.final_learning_rate + (1 - config.final_learning_rate) * cosine)
