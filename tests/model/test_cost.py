"""What is counted from the configuration is what the modules hold, what torch counts, and what the paper publishes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import DynamicCache

from lol import LoLConfig, LoLForCausalLM
from lol.model.cost import (
    FeedForward,
    cache_bytes,
    count_flops,
    count_parameters,
    fixed_feed_forward,
    training_flops,
    window_lengths,
)
from lol.model.windows import find_documents, lay_windows
from model_cases import bounded


def built(config: LoLConfig) -> LoLForCausalLM:
    with torch.device("meta"):
        return LoLForCausalLM(config)


def held(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@st.composite
def configs(draw: st.DrawFn) -> LoLConfig:
    heads, experts, depths = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(0, 4))
    fields = {
        "vocab_size": draw(st.integers(1, 40)),
        "hidden_size": heads * draw(st.sampled_from([2, 4, 6])),
        "num_attention_heads": heads,
        "intermediate_size": draw(st.none() | st.integers(1, 20)),
        "num_prelude_layers": draw(st.integers(0, 3)),
        "num_coda_layers": draw(st.integers(0, 3)),
        "num_experts": experts,
        "num_routed_depths": depths,
        "core_attention": draw(st.sampled_from(["windowed", "full", "sliding"])),
        "tie_router": draw(st.booleans()),
        "balance_scope": draw(st.sampled_from(["global", "depth"])),
        "depth_film": draw(st.booleans()),
        "input_injection": draw(st.sampled_from(["none", "diagonal"])),
        "router_only_tokens": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "moe_num_experts": draw(st.none() | st.integers(2, 4)),
        "moe_intermediate_size": None,
    }
    if fields["moe_num_experts"] is not None:
        fields["moe_intermediate_size"] = draw(st.none() | st.integers(1, 20))
    if draw(st.booleans()):
        fields |= {"routing": "fixed", "fixed_path": [depth % experts for depth in range(depths)]}
    return LoLConfig(**fields)


@bounded(120)
@given(config=configs())
def test_counts_are_the_sums_over_the_modules(config: LoLConfig):
    model, counts = built(config), count_parameters(config)
    base = model.model
    # The tied head shares its tensor with the embedding: it counts once.
    embedding = held(torch.nn.ModuleList([base.embed_tokens, model.lm_head]))
    embedding += 0 if base.filler_embedding is None else base.filler_embedding.numel()
    # Without a depth there is none.
    core = base.library if base.library is not None else torch.nn.ModuleList()
    library, experts = held(core), config.num_experts if config.num_routed_depths else 0
    assert counts.total == held(model)
    assert counts.embedding == embedding
    assert counts.stored == held(model) - embedding
    assert counts.block * experts == library
    layers = [*base.prelude, *base.coda]
    if config.moe_num_experts is None:
        assert [held(layer) for layer in layers] == [counts.block] * len(layers)
    idle = sum(
        held(stack) for layer in base.moe_layers for stack in layer.moe.children() if stack is not layer.moe.router
    )
    if idle:
        idle = idle // config.moe_num_experts * (config.moe_num_experts - config.moe_top_k)
    assert counts.active == counts.stored - idle - library + counts.block * config.num_routed_depths
    modules = {"prelude": base.prelude, "library": core, "coda": base.coda}
    assert {name: counts.parts[name].stored for name in modules} == {name: held(part) for name, part in modules.items()}
    matrices = [p for part in modules.values() for name, p in part.named_parameters() if name.endswith("_proj.weight")]
    assert counts.body.matrices == sum(parameter.numel() for parameter in matrices)
    assert counts.parts["head"].active == model.lm_head.weight.numel()


@pytest.mark.parametrize(("experts", "millions"), [(2, 128.5), (4, 154.1), (8, 205.5)])
def test_the_published_sizes(experts: int, millions: float):
    """d=1,024, 4+4 fixed layers. The published numbers are those of the blocks' matrices; norms, router and depth
    embeddings add less than 0.1 M."""
    config = LoLConfig(num_experts=experts)
    base = built(config).model
    matrices = sum(parameter.numel() for name, parameter in base.named_parameters() if name.endswith("_proj.weight"))
    assert round(matrices / 1e6, 1) == millions
    stored = held(base) - held(base.embed_tokens)
    assert stored == count_parameters(config).stored
    assert abs(stored / 1e6 - millions) < 0.1
    # The 16 depths cost the same whatever the shelf holds, the router's rows aside.
    smallest = LoLConfig(num_experts=2)
    active = [count_parameters(c).active - held(built(c).model.router) for c in (config, smallest)]
    assert active[0] == active[1]


@pytest.mark.parametrize(("width", "millions", "digits"), [(512, 3.4, 1), (1024, 12.85, 2), (2048, 51.4, 1)])
def test_the_published_sizes_of_a_block(width: int, millions: float, digits: int):
    config = LoLConfig(hidden_size=width, num_prelude_layers=1)
    base = built(config).model
    assert round(held(base.prelude[0]) / 1e6, digits) == millions
    assert held(base.prelude[0]) == count_parameters(config).block


@pytest.mark.parametrize("tied", [True, False])
def test_the_published_size_of_the_router(tied: bool):
    d, experts = 1024, 8
    router = built(LoLConfig(tie_router=tied)).model.router
    assert held(router) == (d * experts + experts**2 + 2 * experts) * (1 if tied else 16)


# --- the published comparison with mixtures of experts


PUBLISHED_MOE = FeedForward(hidden=1408, experts=3, top_k=2)


def test_the_published_sizes_of_the_moe_and_of_its_match():
    """24 MoE layers; and 4+4 MoE layers around 24 blocks of which 16 run. The figures are those of the matrices of
    attention and SwiGLU: norms and routers would make 412.2 M and 445.8 M of them."""
    fixed = LoLConfig(num_prelude_layers=12, num_coda_layers=12, num_routed_depths=0, moe_num_experts=3)
    assert fixed_feed_forward(fixed) == PUBLISHED_MOE
    parts = count_parameters(fixed).parts
    moe = parts["prelude"] + parts["coda"]
    assert (round(moe.matrices / 1e6, 1), round(moe.active_matrices / 1e6, 1)) == (412.1, 308.3)
    assert round(moe.stored / 1e6, 1) == 412.2

    match = count_parameters(LoLConfig(num_experts=24, num_routed_depths=16, moe_num_experts=3)).body
    assert (round(match.matrices / 1e6, 1), round(match.active_matrices / 1e6, 1)) == (445.6, 308.3)
    assert round(match.stored / 1e6, 1) == 445.8
    # Exactly, as two experts of half the width are one SwiGLU.
    assert match.active_matrices == moe.active_matrices


def test_a_moe_layer_is_counted_as_its_tensors_would_be():
    d, hidden, experts, top_k = 8, 5, 3, 2
    shape = {"hidden_size": d, "num_attention_heads": 2, "num_prelude_layers": 1, "num_coda_layers": 0, "vocab_size": 9}
    config = LoLConfig(**shape)
    moe = LoLConfig(**shape, moe_num_experts=experts, moe_top_k=top_k, moe_intermediate_size=hidden)
    layer = count_parameters(moe).parts["prelude"]
    shapes = [(d, d)] * 4 + [(experts, d)] + [(experts, hidden, d)] * 2 + [(experts, d, hidden)] + [(d,), (d,)]
    assert layer.stored == sum(math.prod(shape) for shape in shapes)
    assert layer.stored - layer.active == (experts - top_k) * 3 * hidden * d
    # Its products are those of the weights that a token meets.
    n = 7
    prelude = count_flops(moe, n).prelude
    assert prelude.products == 2 * n * (4 * d * d + experts * d + top_k * 3 * hidden * d)
    assert prelude.attention == count_flops(config, n).prelude.attention


# --- floating-point operations

# torch's formulas, for the kernel that runs on a CPU and that its counter passes over.
_ATEN = torch.ops.aten
KERNELS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_prelude_layers": 1,
    "num_coda_layers": 2,
    "num_experts": 3,
    "num_routed_depths": 4,
    "window_size": 8,
    "window_stride": 4,
}


def measured_flops(step: Callable[[], object]) -> tuple[int, object]:
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        result = step()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("num_tokens", [40, 37, 11])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_stride": 0},
        {"window_stride": 8, "tie_router": False},
        {"window_stride": 3, "num_depths": 2},
        {"num_depths": 0},
        {"num_routed_depths": 0, "moe_num_experts": 3},
        {"moe_num_experts": 4, "moe_top_k": 3, "moe_intermediate_size": 5},
        {"router_noise_max": 0.0, "depth_film": True, "input_injection": "diagonal"},
        {"routing": "fixed", "fixed_path": [0, 2, 1, 1]},
        {"core_attention": "full"},
        {"core_attention": "full", "routing": "fixed", "fixed_path": [0, 1, 2, 0], "tie_word_embeddings": True},
        {"core_attention": "sliding"},
        {"core_attention": "sliding", "window_size": 64, "num_depths": 3},
    ],
    ids=str,
)
def test_flops_are_those_that_torch_counts(changes: dict[str, Any], num_tokens: int):
    """Real passes, to the last operation."""
    rows, depths = 2, changes.get("num_depths")
    config = LoLConfig(**(SMALL | {name: value for name, value in changes.items() if name != "num_depths"}))
    model, ids = LoLForCausalLM(config), torch.randint(64, (rows, num_tokens))
    flops = count_flops(config, num_tokens, depths, kernel=True)
    model.eval()
    forward, _ = measured_flops(lambda: model(input_ids=ids, num_depths=depths))
    assert forward == rows * flops.forward
    model.train()
    before, output = measured_flops(lambda: model(input_ids=ids, labels=ids, num_depths=depths))
    after, _ = measured_flops(output.loss.backward)
    assert before + after == rows * flops.training
    assert len(flops.depths) == (config.num_routed_depths if depths is None else depths)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("core", ["windowed", "full"])
def test_flops_of_truncated_backprop(first: bool, core: str):
    """The router of later windows reads the first one, and its products are counted by depth: 1 %."""
    config = LoLConfig(**(SMALL | {"core_attention": core, "router_noise_max": 0.0}))
    model, ids = LoLForCausalLM(config).train(), torch.randint(64, (2, 40))
    cut = {"backprop_depth": 1, "first_window_full_backprop": first}
    before, output = measured_flops(lambda: model(input_ids=ids, labels=ids, num_depths=3, **cut))
    after, _ = measured_flops(output.loss.backward)
    counted = 2 * training_flops(config, 40, 3, backprop_depth=1, first_window=first)
    # Without first windows nothing before the cut is reached: prelude and embedding have no backward pass either.
    missing = 0 if first else 2 * (count_flops(config, 40).prelude.training - count_flops(config, 40).prelude.forward)
    assert before + after == pytest.approx(counted - missing, rel=0.01)
    full = training_flops(config, 40, 3)
    assert training_flops(config, 40, 3, backprop_depth=3) == full
    assert (counted < 2 * full) == (core == "windowed" or not first)


def test_only_a_sliding_window_runs_as_more_than_it_counts():
    def attention(core: str, kernel: bool) -> int:
        return count_flops(LoLConfig(**(SMALL | {"core_attention": core})), 40, kernel=kernel).core.attention

    # Every query against W keys, or all n of them: 4 d a pair, in 4 depths.
    assert attention("sliding", kernel=False) == 4 * (40 * 8) * (4 * 32)
    assert attention("sliding", kernel=True) == attention("full", kernel=False) == 4 * (40 * 40) * (4 * 32)
    assert attention("windowed", kernel=False) == attention("windowed", kernel=True)
    # Five whole windows at even depths; four and two halves at odd ones.
    assert attention("windowed", kernel=False) == (2 * (5 * 64) + 2 * (4 * 64 + 2 * 16)) * (4 * 32)


@bounded(60)
@given(num_tokens=st.integers(1, 40), window=st.integers(1, 9), data=st.data())
def test_windows_are_as_long_as_they_are_laid(num_tokens: int, window: int, data: st.DataObject):
    shift = data.draw(st.integers(0, window - 1))
    documents = find_documents((1, num_tokens), None, None, torch.device("cpu"))
    laid = lay_windows(documents, shift, window).windows.length.tolist()
    assert window_lengths(num_tokens, shift, window) == laid
    assert window_lengths(num_tokens, shift, None) == [num_tokens]


# --- what decoding keeps


@pytest.mark.parametrize("num_tokens", [3, 8, 29])
def test_a_cache_holds_the_bytes_that_are_counted(num_tokens: int):
    config = LoLConfig(**SMALL)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        LoLForCausalLM(config).eval()(input_ids=torch.randint(64, (2, num_tokens)), cache=cache)
    core = cache.layers[config.num_prelude_layers :][: config.num_routed_depths]
    fixed = [layer for layer in cache.layers if layer not in core]
    held = sum(layer.num_bytes for layer in core) + sum(layer.keys.nbytes + layer.values.nbytes for layer in fixed)
    assert held == cache_bytes(config, num_tokens, 2, torch.float32)


def test_a_core_of_full_attention_keeps_every_token():
    def grown(core: str) -> int:
        config = LoLConfig(**(SMALL | {"core_attention": core}))
        return cache_bytes(config, 101, 1, torch.bfloat16) - cache_bytes(config, 100, 1, torch.bfloat16)

    # A key and a value of 32 channels, 2 bytes each, in 3 fixed layers and 4 depths.
    assert grown("windowed") == 3 * 2 * 32 * 2
    assert grown("full") == grown("sliding") == 7 * 2 * 32 * 2
