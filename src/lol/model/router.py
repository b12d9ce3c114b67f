"""The router: what it reads of the past, how it scores the library, how a block is chosen.

Everything here runs in float32 whatever the model's dtype or autocast, so that training, evaluation and decoding
choose alike. Letters: K windows, d width, L blocks, D depths, G documents.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lol.model.carry import DepthPass
from lol.model.config import LoLConfig
from lol.model.windows import WindowLayout


def router_features(
    state: Float[Tensor, "T d"],
    layout: WindowLayout,
    depth_embedding: Float[Tensor, "d"],
    router_only: Float[Tensor, "G d"] | None,
    past: DepthPass | None = None,
) -> Float[Tensor, "K d"]:
    """What the router reads for each window, never the window itself. (Article, step 2 of its forward pass.)

    The mean of the means of the document's earlier windows, each counting once; for the first window of a document
    ½ (depth embedding + the state of its first token). The embeddings of the document's router-only tokens are added
    to the input of each of its windows (decided here). `past` is what a cache keeps of the windows before these tokens.
    """
    state = state.float()
    if past is None:
        means = torch.segment_reduce(state, "mean", lengths=layout.windows.length, axis=0, unsafe=True)
    else:
        means = past.means
    place = layout.place_in_document
    by_document = means.new_zeros(layout.num_documents, int(place.max()) + 1, means.shape[1])
    so_far = by_document.index_put((layout.document, place), means).cumsum(1)
    earlier = so_far[layout.document, (place - 1).clamp(min=0)]
    if past is not None:
        earlier = torch.where(place[:, None] > 0, earlier, 0) + past.past_means[layout.row]
    count = layout.index_in_document[:, None]
    first = 0.5 * (depth_embedding.float() + state[layout.windows.start])
    features = torch.where(count > 0, earlier / count.clamp(min=1), first)
    if past is not None:
        return features + past.rows.router_only[layout.row]
    return features if router_only is None else features + router_only.float()[layout.document]


class Router(nn.Module):
    """One linear layer that scores the blocks, with learned noise in training; called once per depth.

    The core uses what the call returns and nothing else, so a hook that replaces the returned triple reroutes the
    model. d·L + L² + 2L parameters, times D when untied.
    """

    def __init__(self, config: LoLConfig):
        super().__init__()
        experts = config.num_experts
        lead = () if config.tie_router else (config.num_routed_depths,)
        self.tied = config.tie_router
        self.noise_max = config.router_noise_max
        self.weight = nn.Parameter(torch.empty(*lead, experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(*lead, experts))
        self.noise_weight = nn.Parameter(torch.empty(*lead, experts, experts))
        self.noise_bias = nn.Parameter(torch.empty(*lead, experts))

    def forward(
        self,
        features: Float[Tensor, "K d"],
        depth: int,
        expert_bias: Float[Tensor, "L"],
        noise: Float[Tensor, "K L"] | None = None,
        forced: Int[Tensor, "K"] | None = None,
        forced_weight: float | None = None,
    ) -> tuple[Float[Tensor, "K L"], Float[Tensor, "K"], Int[Tensor, "K"]]:
        """Choose a block for each window.

        Args:
            features: The router's input (`router_features`), float32.
            depth: 0-based; an untied router uses that depth's parameters.
            expert_bias: The balancing bias; it enters the choice and nothing else.
            noise: Standard normal draws in training, `None` otherwise.
            forced: A block per window to use instead of the choice, -1 where the router is free.
            forced_weight: Weight of a forced block; `None` takes the router's own probability of it.

        Returns:
            logits: Raw scores, with the noise in them: their softmax are the probabilities that chose.
            weight: Probability of the block that runs (without the bias).
            expert: The block that runs. Ties go to the lowest index.
        """
        with torch.autocast(features.device.type, enabled=False):
            logits = F.linear(features, self._at(self.weight, depth), self._at(self.bias, depth))
            if noise is not None:
                spread = F.softplus(
                    F.linear(logits, self._at(self.noise_weight, depth), self._at(self.noise_bias, depth))
                )
                logits = logits + noise * spread.clamp(max=self.noise_max)
            probability = logits.softmax(-1)
            expert = (probability + expert_bias.float()).argmax(-1)
            is_forced = None
            if forced is not None:
                is_forced = forced >= 0
                expert = torch.where(is_forced, forced, expert)
            weight = probability.gather(-1, expert[:, None]).squeeze(-1)
            if is_forced is not None and forced_weight is not None:
                weight = weight.masked_fill(is_forced, forced_weight)
        return logits, weight, expert

    def _at(self, parameter: Tensor, depth: int) -> Tensor:
        return (parameter if self.tied else parameter[depth]).float()
