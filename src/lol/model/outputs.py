"""What a forward pass returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache
from transformers.utils.generic import ModelOutput

from lol.model.core import DepthRoute
from lol.model.windows import Documents, WindowLayout


@dataclass
class Routing(ModelOutput):
    """Which block ran where.

    Windows are numbered per row, in order of position; a packed row numbers its documents' windows one after the
    other. Depths whose shift cuts a row into fewer windows, and rows with fewer tokens, leave places empty. With a
    cache, only the windows that hold this pass's tokens are here, the first of them number `first_window` of its row.

    Args:
        experts: (batch, depths, windows) block of each window, -1 where there is no window.
        weights: (batch, depths, windows) weight of its update, float32, 0 where there is no window.
        documents: (batch, depths, windows) number of the window's document in its row, -1 where there is no window.
        first_window: (batch, depths) number of the first window here in its row; 0 without a cache.
        load: (depths, L) windows that ran each block, int64; with a cache, those that began in this pass.
    """

    experts: Int[Tensor, "B D K"] | None = None
    weights: Float[Tensor, "B D K"] | None = None
    documents: Int[Tensor, "B D K"] | None = None
    first_window: Int[Tensor, "B D"] | None = None
    load: Int[Tensor, "D L"] | None = None


class MoEChoice(NamedTuple):
    """What one mixture-of-experts layer chose."""

    logits: Float[Tensor, "B n E"]
    experts: Int[Tensor, "B n k"]


@dataclass
class MoERouting(ModelOutput):
    """Which feed-forward experts each token went through in the mixture-of-experts layers of prelude and coda.

    Args:
        experts: (batch, layers, n, k) the k experts of each token, the best first, -1 at padding.
        documents: (batch, n) number of the token's document in its row, -1 at padding.
        load: (layers, E) tokens that went through each expert, int64.
    """

    experts: Int[Tensor, "B M n k"] | None = None
    documents: Int[Tensor, "B n"] | None = None
    load: Int[Tensor, "M E"] | None = None


@dataclass
class LoLModelOutput(ModelOutput):
    """Output of `LoLModel`.

    Args:
        last_hidden_state: (batch, n, d) after the final norm; 0 at padding.
        cache: The cache, where one was used.
        hidden_states: With `output_hidden_states`: the embedding, then the state after every prelude layer, routed
            depth and coda layer, the last one after the final norm.
        router_logits: With `output_router_logits`: per depth the raw logits (batch, windows, L), 0 where there is no
            window, or where it began in an earlier pass of a cache. Their softmax is the distribution that chose; in
            training the noise is in them.
        routing: Which block ran where.
        moe_router_logits: With `output_router_logits`, in models with mixture-of-experts layers: per such layer the raw
            scores (batch, n, E), 0 at padding.
        moe_routing: Which experts ran there.
    """

    last_hidden_state: Float[Tensor, "B n d"] | None = None
    cache: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    routing: Routing | None = None
    moe_router_logits: tuple[Tensor, ...] | None = None
    moe_routing: MoERouting | None = None


@dataclass
class LoLCausalLMOutput(ModelOutput):
    """Output of `LoLForCausalLM`: that of `LoLModel`, with a loss and logits.

    Args:
        loss: Mean next-token cross-entropy in nats, if labels were given.
        logits: (batch, n, vocabulary), or the positions that `logits_to_keep` asked for.
        aux_loss: Always `None`: balance is kept by the bias, outside of the loss.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    router_logits: tuple[Tensor, ...] | None = None
    routing: Routing | None = None
    moe_router_logits: tuple[Tensor, ...] | None = None
    moe_routing: MoERouting | None = None
    aux_loss: Tensor | None = None


def collect_routing(routes: list[DepthRoute], batch: int, num_experts: int, device: torch.device) -> Routing:
    """Bring what the depths did into the numbering of rows."""
    width = max((route.layout.width for route in routes), default=0)
    depths = len(routes)
    first_window = torch.zeros(batch, depths, dtype=torch.long, device=device)
    experts = torch.full((batch, depths, width), -1, device=device)
    documents = torch.full((batch, depths, width), -1, device=device)
    weights = torch.zeros(batch, depths, width, device=device)
    load = torch.zeros(depths, num_experts, dtype=torch.long, device=device)
    for layout, at in _by_layout(routes):
        here = torch.tensor(at, device=device)
        expert = torch.stack([routes[depth].expert for depth in at])
        row, window = layout.row, layout.place
        grid = (row[None], here[:, None], window[None])
        experts[grid] = expert
        documents[grid] = layout.document_in_row
        weights[grid] = torch.stack([routes[depth].weight.detach() for depth in at])
        first = window == 0
        first_window[row[first][None], here[:, None]] = layout.index_in_row[first]
        begins = torch.ones_like(row) if layout.kept is None else (layout.kept == 0).long()
        load[here] = load[here].scatter_add(1, expert, begins.expand_as(expert))
    return Routing(experts=experts, weights=weights, documents=documents, first_window=first_window, load=load)


def _by_layout(routes: list[DepthRoute]) -> list[tuple[WindowLayout, list[int]]]:
    """The layouts and the depths that share each."""
    groups: dict[int, tuple[WindowLayout, list[int]]] = {}
    for depth, route in enumerate(routes):
        groups.setdefault(id(route.layout), (route.layout, []))[1].append(depth)
    return list(groups.values())


def collect_router_logits(routes: list[DepthRoute]) -> tuple[Tensor, ...] | None:
    """Per depth, the raw logits (batch, windows, L), with as many windows as the row of most windows has at any depth.

    They keep their gradient, for losses on the router.
    """
    if any(route.logits is None for route in routes):
        return None
    width = max((route.layout.width for route in routes), default=0)
    return tuple(route.layout.to_rows(route.logits, width, 0.0) for route in routes if route.logits is not None)


def collect_moe_routing(choices: Sequence[MoEChoice], documents: Documents) -> MoERouting:
    """The choices of all mixture-of-experts layers, without those at padding."""
    real = documents.grid_document >= 0
    experts = torch.stack([choice.experts for choice in choices], dim=1).masked_fill(~real[:, None, :, None], -1)
    load = [F.one_hot(choice.experts[real], choice.logits.shape[-1]).sum((0, 1)) for choice in choices]
    return MoERouting(experts=experts, documents=documents.grid_document_in_row, load=torch.stack(load))


def collect_moe_logits(choices: Sequence[MoEChoice], documents: Documents) -> tuple[Tensor, ...]:
    """Their raw scores, 0 at padding; they keep their gradient, for losses on the router."""
    padding = documents.grid_document < 0
    return tuple(choice.logits.masked_fill(padding[..., None], 0.0) for choice in choices)
