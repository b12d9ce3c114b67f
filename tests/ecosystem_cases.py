"""What the tests of other libraries share: a small model whose windows choose apart, and rows to run it on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from lol import LoLConfig, LoLForCausalLM

VOCABULARY = 29
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "num_experts": 3,
    "num_routed_depths": 4,
    "window_size": 6,
    "window_stride": 3,
    "initializer_range": 0.3,
}
DOCUMENTS = (7, 4, 13)
LENGTH = sum(DOCUMENTS)


def build_model(**changes) -> LoLForCausalLM:
    """Every call gives the same weights, the balancing bias included."""
    torch.manual_seed(0)
    model = LoLForCausalLM(LoLConfig(**SIZES | changes)).eval()
    if model.model.router is not None:
        model.model.router.weight.data.mul_(10)
        bias = model.model.expert_bias
        bias.copy_(torch.linspace(-0.1, 0.2, bias.numel()).view_as(bias))
    return model


def packed_row(seed: int, documents: tuple[int, ...] = DOCUMENTS) -> dict[str, Tensor]:
    """A row of our loader: random tokens, positions that restart at each document."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (sum(documents),), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in documents]),
    }


def some_ids(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.stack([packed_row(seed, (length,))["input_ids"] for seed in range(rows)])


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything that a model holds, buffers that are not saved included."""
    return {name: tensor.detach().clone() for name, tensor in _held(model)}


def differing(model: nn.Module, expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ in any bit or in dtype."""
    found = dict(_held(model))
    assert found.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
    ]


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def source_folder() -> Path:
    """Where other processes find this lol."""
    import lol

    return Path(lol.__file__).parents[1]
