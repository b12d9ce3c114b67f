"""Muon for the matrices of the blocks, AdamW for everything else, as one optimizer.

Both are torch's own. What is ours is what `torch.optim.Muon` is handed: it takes single matrices, and here the
library's blocks, like the experts of a mixture, are stacks (L, out, in), and ranks may hold slices.

- A stack is L matrices, each of which is orthogonalised by itself. No projections are fused: queries, keys, values,
  gate and up are matrices of their own.
- Slices of a stack go along its blocks, so every rank has whole matrices and turns its own. A sliced matrix of prelude
  or coda is gathered with its gradient and its momentum, three collectives a step, turned on every rank alike, and
  each keeps its slice. Neither depends on the path.
- A matrix whose gradient is exactly 0, that of a block no window chose, rests: no step, no decay, momentum as it was;
  so does a parameter without gradient under torch. Muon's step has the same length however small the momentum is: the
  block would walk on in its last direction for some two hundred steps. (Decided here.)
- The learning rate is scaled by 0.2 sqrt(max(out, in)) (torch's "match_rms_adamw"), so that a step is as long as one of
  AdamW's: one learning rate and one weight decay serve both.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lol.train.parallel import spread_like, whole

MOMENTUM = "momentum_buffer"
"""The name in the optimizer's state, as torch's Muon calls it."""


class MuonAdamW(torch.optim.Optimizer):
    """An optimizer with groups of both kinds; those of Muon have a "momentum", AdamW's have "betas".

    Args:
        matrices: For Muon: (out, in), or stacks of such. The head of this file says how they may be sliced.
        groups: AdamW's parameter groups, each with its weight decay.
        momentum: Muon's; Nesterov's, as is torch's default.
        weight_decay: Of the matrices, not scaled by their shape.
        lr, betas, eps: As torch's AdamW has them; `lr` is Muon's too.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        weight_decay: float,
    ):
        self._adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)  # pyright: ignore
        muon = {"params": list(matrices), "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([*self._adamw.param_groups, muon], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """One step of both; where ranks hold slices, all of them must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # At every step, because loading a state dict puts new objects in the place of both.
        self._adamw.param_groups = [group for group in self.param_groups if "betas" in group]
        self._adamw.state = self.state
        self._adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if "momentum" in group else ():
                if parameter.grad is not None:
                    self._turn(parameter, parameter.grad, group)
        return loss

    def _turn(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        sliced = parameter.detach(), gradient, state[MOMENTUM]
        if parameter.ndim == 3:
            # Slices go along the blocks.
            stacks = [part.to_local() if isinstance(part, DTensor) else part for part in sliced]
            _muon_step(group, *(part.unbind(0) for part in stacks))
            return
        full = [whole(part) for part in sliced]
        _muon_step(group, *([part] for part in full))
        for part, result in zip(sliced, full, strict=True):
            if part is not result and part is not gradient:
                part.copy_(spread_like(result, part))


def _muon_step(
    group: dict[str, Any], weights: Iterable[Tensor], gradients: Iterable[Tensor], momenta: Iterable[Tensor]
) -> None:
    """torch's own step on whole matrices, in place; those without a gradient rest."""
    triples = list(zip(weights, gradients, momenta, strict=True))
    if not triples:
        return
    busy = torch.stack([gradient.any() for _, gradient, _ in triples]).tolist()
    triples = [triple for triple, is_busy in zip(triples, busy, strict=True) if is_busy]
    if not triples:
        return
    muon = torch.optim.Muon(
        [weight for weight, _, _ in triples],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        adjust_lr_fn="match_rms_adamw",
    )
    for weight, gradient, momentum in triples:
        weight.grad = gradient
        muon.state[weight][MOMENTUM] = momentum
    muon.step()
