"""torch's own encoder layers in place of the library's blocks: what the article's parameter counts point at.

LayerNorm, biases, an MLP of four times the width, no rotary angles; weights start as torch starts them. They are here
to be compared with, and run as a plain loop over the blocks. Letters: B examples, n tokens of an example, d width.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class TorchBlocks(nn.Module):
    """L encoder layers, each on the examples that chose it.

    Args:
        num_blocks: L.
        width: d.
        num_heads: Heads of attention.
        as_it_comes: With torch's defaults (norms after the update, ReLU, dropout of 0.1) in place of norms before it,
            GELU and no dropout.
    """

    def __init__(self, num_blocks: int, width: int, num_heads: int, as_it_comes: bool):
        super().__init__()
        settings = {} if as_it_comes else {"dropout": 0.0, "activation": "gelu", "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, batch_first=True, **settings)
            for _ in range(num_blocks)
        )

    def forward(
        self, state: Float[Tensor, "B n d"], expert: Int[Tensor, "B"], weight: Float[Tensor, "B"]
    ) -> Float[Tensor, "B n d"]:
        """s + weight · (E(s) - s), with every example's own block E."""
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=len(self.layers)).tolist()
        runs = zip(self.layers, state[order].split(counts), strict=True)
        made = torch.cat([layer(rows) if len(rows) else rows for layer, rows in runs])
        return state + weight[:, None, None] * (made[order.argsort()] - state)
