"""Text that passes through a cache in chunks, put together again like the output of a single pass."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from lol import LoLForCausalLM
from lol.model.cache import RoutedLayer, RowState
from model_cases import VOCABULARY, Spec, make_model

EQUAL = {"atol": 1e-5, "rtol": 1e-5}
NEAR_TIE = 1e-4
W = 8
SPEC = Spec(8, 2, 1, 1, 3, 3, W, W // 2)


def small(seed: int = 0, router_only_tokens: bool = False, **changes) -> LoLForCausalLM:
    """A float32 model without parameters that are the same at start."""
    return make_model(Spec(**(vars(SPEC) | changes)), seed, router_only_tokens).float()


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int]) -> Tensor:
    """A mask whose rows end together."""
    columns = max(lengths)
    return torch.stack([torch.arange(columns) >= columns - length for length in lengths]).long()


def padded(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    mask = left_padded(lengths)
    return ids_of(*mask.shape, seed=seed), mask


def routed_layers(cache: DynamicCache) -> list[RoutedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, RoutedLayer)]


def core_bytes(cache: DynamicCache) -> int:
    return sum(layer.num_bytes for layer in routed_layers(cache))


def states(cache: DynamicCache) -> list[RowState]:
    """What the routed depths keep."""
    return [layer.rows for layer in routed_layers(cache)]


def same_states(one: list[RowState], other: list[RowState]) -> None:
    """Equal in everything that is a row's own (keys past the count are nobody's)."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        for name in ("count", "position", "expert", "weight", "running_sum", "earlier_sum", "router_only"):
            assert_close(getattr(a, name), getattr(b, name), **EQUAL)
        for row, count in enumerate(a.count.tolist()):
            assert_close(a.keys[row, :, :count], b.keys[row, :, :count], **EQUAL)
            assert_close(a.values[row, :, :count], b.values[row, :, :count], **EQUAL)


@dataclass
class Together:
    """The passes as one output: `logits`, `routing.experts`, `routing.weights`, `router_logits`, summed `load`."""

    logits: Tensor
    routing: SimpleNamespace
    router_logits: list[Tensor] | None
    load: Tensor


def in_chunks(
    model: LoLForCausalLM,
    ids: Tensor,
    sizes: list[int],
    mask: Tensor | None = None,
    cache: DynamicCache | None = None,
    embeds: bool = False,
    path: Tensor | None = None,
    router_only_ids: Tensor | None = None,
    **inputs,
) -> Together:
    """Run the columns of `ids` in chunks of these sizes, the last size again and again."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    outputs, start, number = [], 0, 0
    while start < ids.shape[1]:
        end = min(start + sizes[min(number, len(sizes) - 1)], ids.shape[1])
        given = dict(inputs)
        given["inputs_embeds" if embeds else "input_ids"] = (
            model.model.embed_tokens(ids[:, start:end]) if embeds else ids[:, start:end]
        )
        if mask is not None:
            given["attention_mask"] = mask[:, :end]
        if router_only_ids is not None:
            given["router_only_ids"] = router_only_ids[:, start:end]
        if path is not None:
            longest = end if mask is None else int(mask[:, :end].sum(1).max())
            given["path"] = path[..., : model.config.windows_in(longest)] if path.ndim > 1 else path
        outputs.append(model(**given, cache=cache, output_router_logits=True))
        start, number = end, number + 1
    return put_together(outputs)


def put_together(outputs: list) -> Together:
    """Later passes must repeat what an earlier one said of a window that goes on."""
    first = outputs[0].routing.experts
    batch, depths = first.shape[:2]
    ends = [
        output.routing.first_window[..., None] + torch.arange(1, output.routing.experts.shape[2] + 1)
        for output in outputs
    ]
    width = max(int((end * (output.routing.experts >= 0)).max()) for end, output in zip(ends, outputs, strict=True))
    experts, weights = first.new_full((batch, depths, width), -1), torch.zeros(batch, depths, width)
    num_blocks = outputs[0].routing.load.shape[1]
    logits = [torch.zeros(batch, width, num_blocks, dtype=torch.float32) for _ in range(depths)]
    for output in outputs:
        routing = output.routing
        for row, depth, place in (routing.experts >= 0).nonzero().tolist():
            window = int(routing.first_window[row, depth]) + place
            expert, weight = routing.experts[row, depth, place], routing.weights[row, depth, place].float()
            if experts[row, depth, window] >= 0:
                assert experts[row, depth, window] == expert
                assert weights[row, depth, window] == weight
                if output.router_logits is not None:
                    assert (output.router_logits[depth][row, place] == 0).all()
            else:
                experts[row, depth, window], weights[row, depth, window] = expert, weight
                if output.router_logits is not None:
                    logits[depth][row, window] = output.router_logits[depth][row, place]
    return Together(
        logits=torch.cat([output.logits for output in outputs], dim=1),
        routing=SimpleNamespace(experts=experts, weights=weights),
        router_logits=None if outputs[0].router_logits is None else logits,
        load=sum(output.routing.load for output in outputs),
    )


def is_decided(model: LoLForCausalLM, full) -> bool:
    """Whether no window's choice is so close that rounding may turn it."""
    if full.router_logits is None or model.config.num_experts == 1:
        return True
    bias = model.model.expert_bias
    for depth, logits in enumerate(full.router_logits):
        own = bias if bias.ndim == 1 else bias[depth]
        best, second = (logits.float().softmax(-1) + own).topk(2).values.unbind(-1)
        real = full.routing.experts[:, depth] >= 0
        if ((best - second)[real] < NEAR_TIE).any():
            return False
    return True


def check_equal(together: Together, full, mask: Tensor | None = None, tolerance: dict = EQUAL) -> None:
    """Hold the chunks to the single pass: logits at real tokens, routes, weights, router logits, load."""
    assert torch.equal(together.routing.experts, full.routing.experts)
    assert_close(together.routing.weights, full.routing.weights, **tolerance)
    real = torch.ones(full.logits.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    assert_close(together.logits[real], full.logits[real], **tolerance)
    assert torch.equal(together.load, full.routing.load)
    if full.router_logits is not None:
        for own, wanted in zip(together.router_logits, full.router_logits, strict=True):
            assert_close(own, wanted.float(), **tolerance)
