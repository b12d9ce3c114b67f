"""What `count_parameters` says is what the modules hold, and what the paper publishes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lol import LoLConfig, LoLForCausalLM
from lol.model.cost import count_parameters
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
    }
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
    library = held(base.library)
    assert counts.total == held(model)
    assert counts.embedding == embedding
    assert counts.stored == held(model) - embedding
    assert counts.block * config.num_experts == library
    assert [held(layer) for layer in (*base.prelude, *base.coda)] == [counts.block] * (
        config.num_prelude_layers + config.num_coda_layers
    )
    assert counts.active == counts.stored - library + library // config.num_experts * config.num_routed_depths


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
