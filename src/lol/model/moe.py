"""Mixture-of-experts layers of prelude and coda: every token goes through the k feed-forward experts of highest score.

They are the baseline's layers and those of its match. Scores are balanced by the library's rule: a bias that enters the
choice and not the weights, one per layer. (Article; renormalised weights, no noise: decided here.) Letters: B batch,
n tokens of a row, T = B n, d width, E experts, k experts of a token.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache

from lol.model.config import LoLConfig
from lol.model.grouped import autocast, fits_kernel, grouped_linear, kernel_linear
from lol.model.layers import FixedLayer, Float32Bias, Rotary, attention_update
from lol.model.library import StackedLinear, StackedOutputLinear
from lol.model.windows import take_rows


class MoERouter(Float32Bias):
    """Scores the experts for each token, in float32 always. The layer does what it returns, as with `Router`."""

    def __init__(self, config: LoLConfig):
        super().__init__()
        assert config.moe_num_experts is not None
        self.top_k = config.moe_top_k
        self.weight = nn.Parameter(torch.empty(config.moe_num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.moe_num_experts, dtype=torch.float32))

    def forward(self, x: Float[Tensor, "T d"]) -> tuple[Float[Tensor, "T E"], Float[Tensor, "T k"], Int[Tensor, "T k"]]:
        """Choose the experts of each token.

        Returns:
            logits: Raw scores.
            weight: The chosen experts' probabilities (without the bias), divided by their sum.
            expert: The chosen experts, the best first. Ties go to the lowest index.
        """
        assert self.expert_bias is not None
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
            probability = logits.softmax(-1)
            # Not topk, which says nothing about ties.
            ranking = (probability + self.expert_bias.float()).sort(dim=-1, descending=True, stable=True).indices
            expert = ranking[:, : self.top_k]
            weight = probability.gather(-1, expert)
            return logits, weight / weight.sum(-1, keepdim=True), expert


class MoE(nn.Module):
    """E SwiGLU experts, stacked, and their router. A token's picks are brought into the order of their experts, so that
    each projection is one grouped product, as in the library."""

    def __init__(self, config: LoLConfig):
        super().__init__()
        assert config.moe_num_experts is not None
        experts, d, hidden = config.moe_num_experts, config.hidden_size, config.moe_size
        self.router = MoERouter(config)
        self.gate_proj = StackedLinear(experts, d, hidden)
        self.up_proj = StackedLinear(experts, d, hidden)
        self.down_proj = StackedOutputLinear(experts, hidden, d)

    def forward(
        self, x: Float[Tensor, "B n d"]
    ) -> tuple[Float[Tensor, "B n d"], Float[Tensor, "B n E"], Int[Tensor, "B n k"]]:
        """The weighted sum of the chosen experts, the raw scores, and the choice."""
        batch, columns = x.shape[:2]
        flat = x.flatten(0, 1)
        logits, weight, expert = self.router(flat)
        picks = flat[:, None].expand(-1, expert.shape[1], -1).flatten(0, 1)
        result = self._run(picks, expert.flatten()).unflatten(0, expert.shape)
        result = (result * weight[..., None].to(result.dtype)).sum(1).to(x.dtype)
        return tuple(part.unflatten(0, (batch, columns)) for part in (result, logits, expert))  # pyright: ignore

    def _run(self, picks: Float[Tensor, "N d"], expert: Int[Tensor, "N"]) -> Float[Tensor, "N d"]:
        """Each row through its expert."""
        order = expert.argsort(stable=True)
        inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel(), device=order.device))
        gate, up, down = (stack(autocast) for stack in (self.gate_proj, self.up_proj, self.down_proj))
        counts = expert.new_zeros(gate.shape[0]).index_add(0, expert, torch.ones_like(expert))
        if all(map(fits_kernel, (gate, up, down))):
            project = partial(kernel_linear, ends=counts.cumsum(0).to(torch.int32))
        else:
            project = partial(_project_runs, counts=counts.tolist())
        rows = take_rows(picks, order, inverse)
        rows = project(F.silu(project(rows, stack=gate)) * project(rows, stack=up), stack=down)
        return take_rows(rows, inverse, order)


def _project_runs(rows: Tensor, stack: Tensor, counts: list[int]) -> Tensor:
    """Each expert's run of rows through its matrix; those without rows are left out."""
    weights = stack.unbind(0)
    used = [index for index, count in enumerate(counts) if count]
    return grouped_linear(rows, [counts[index] for index in used], [weights[index] for index in used])


class MoEBlock(FixedLayer):
    """A layer of the prelude or coda with a mixture of experts in place of SwiGLU."""

    def __init__(self, config: LoLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.moe = MoE(config)

    def forward(
        self,
        x: Float[Tensor, "B n d"],
        rotary: Rotary,
        attention_mask: Any,
        position_ids: Int[Tensor, "B n"],
        cache: Cache | None = None,
    ) -> tuple[Float[Tensor, "B n d"], Float[Tensor, "B n E"], Int[Tensor, "B n k"]]:
        """The state after the layer, the router's raw scores, and the experts of each token."""
        x, normed = self.compute(x, rotary, attention_mask, position_ids, cache)
        update, logits, expert = self.moe(normed)
        return x + update, logits, expert

    def compute(
        self,
        x: Float[Tensor, "B n d"],
        rotary: Rotary,
        attention_mask: Any,
        position_ids: Int[Tensor, "B n"],
        cache: Cache | None,
    ) -> tuple[Float[Tensor, "B n d"], Float[Tensor, "B n d"]]:
        """The layer up to its experts: the state, and its norm. As in `Block`."""
        attend = partial(
            self.attend, rotary=rotary, attention_mask=attention_mask, position_ids=position_ids, cache=cache
        )
        x = x + attention_update(self, x, attend)
        return x, self.mlp_norm(x)
