"""Every baseline is a setting of the same model, and equals transformers' own code with the weights copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from lol import LoLConfig, LoLForCausalLM
from lol.model.layers import Block
from lol.model.moe import MoEBlock
from model_cases import LLAMA_NAMES

EQUAL = {"atol": 1e-5, "rtol": 0}
# Up to ten layers, whose rounding adds up.
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
LENGTH, WINDOW = 23, 6
SHAPE = {"vocab_size": 31, "hidden_size": 32, "num_attention_heads": 4, "rope_theta": 500.0, "rms_norm_eps": 1e-5}
HIDDEN = 48


def build(**changes: Any) -> LoLForCausalLM:
    """Random weights of a size at which attention and routing are not flat."""
    fields = {"intermediate_size": HIDDEN, "num_prelude_layers": 1, "num_coda_layers": 1, "window_size": WINDOW}
    torch.manual_seed(0)
    model = LoLForCausalLM(LoLConfig(**(SHAPE | fields | {"window_stride": 3} | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * drawn if "norm" in name else 0.2 * drawn)
    return model


def build_theirs(model_class: type, config_class: type, layers: int, **changes: Any) -> PreTrainedModel:
    fields = {key: value for key, value in SHAPE.items() if key != "rope_theta"}
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": SHAPE["rope_theta"]}}
    config = config_class(
        **fields,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_key_value_heads=SHAPE["num_attention_heads"],
        head_dim=SHAPE["hidden_size"] // SHAPE["num_attention_heads"],
        tie_word_embeddings=False,
        pad_token_id=None,
        eos_token_id=None,
        **changes,
    )
    return model_class(config).eval()


def executed_layers(ours: LoLForCausalLM) -> list[dict[str, Tensor]]:
    """The weights of every layer that runs, in order."""
    model, layers = ours.model, []
    for layer in model.prelude:
        layers.append(dict(layer.named_parameters()))
    for block in ours.config.fixed_path or []:
        layers.append({name: stack[block] for name, stack in model.library.named_parameters()})
    for layer in model.coda:
        layers.append(dict(layer.named_parameters()))
    return layers


@torch.no_grad()
def copy_weights(ours: LoLForCausalLM, theirs: PreTrainedModel) -> None:
    copies = {"model.embed_tokens.weight": ours.model.embed_tokens.weight, "lm_head.weight": ours.lm_head.weight}
    copies["model.norm.weight"] = ours.model.norm.weight
    for index, layer in enumerate(executed_layers(ours)):
        for name, weight in layer.items():
            part = name.removesuffix(".weight")
            if part in LLAMA_NAMES:
                copies[f"model.layers.{index}.{LLAMA_NAMES[part]}.weight"] = weight
        if "moe.router.weight" in layer:
            place = f"model.layers.{index}.mlp"
            copies[f"{place}.gate.weight"] = layer["moe.router.weight"]
            both = [layer["moe.gate_proj.weight"], layer["moe.up_proj.weight"]]
            copies[f"{place}.experts.gate_up_proj"] = torch.cat(both, dim=1)
            copies[f"{place}.experts.down_proj"] = layer["moe.down_proj.weight"]
    state = theirs.state_dict()
    assert state.keys() == copies.keys()
    for name, tensor in copies.items():
        state[name].copy_(tensor)


def ids_of(rows: int = 2) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def check_equal(ours: LoLForCausalLM, theirs: PreTrainedModel) -> None:
    """Logits, loss, gradient of the embedding, cached decoding token by token and in chunks, generated text."""
    copy_weights(ours, theirs)
    ids = ids_of()
    expected = theirs(input_ids=ids, labels=ids)
    found = ours(input_ids=ids, labels=ids)
    assert expected.logits.std() > 0.3
    assert_close(found.logits, expected.logits, **EQUAL)
    assert_close(found.loss, expected.loss, **EQUAL)
    expected.loss.backward()
    found.loss.backward()
    assert_close(ours.model.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad, **EQUAL)
    for chunk in (1, 5):
        cache, parts = DynamicCache(config=ours.config), []
        with torch.no_grad():
            for start in range(0, LENGTH, chunk):
                parts.append(ours(input_ids=ids[:, start : start + chunk], cache=cache).logits)
        assert_close(torch.cat(parts, 1), expected.logits, **EQUAL)
    padded, mask = F.pad(ids[:1, :9], (4, 0)), F.pad(torch.ones(1, 9, dtype=torch.long), (4, 0))
    texts = [
        model.generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
        for model in (ours, theirs)
    ]
    assert torch.equal(*texts)


def test_dense_is_llama():
    ours = build(num_experts=4, num_routed_depths=4, routing="fixed", fixed_path=[0, 1, 2, 3], core_attention="full")
    check_equal(ours, build_theirs(LlamaForCausalLM, LlamaConfig, layers=6))


def test_dense_is_llama_with_all_layers_in_the_prelude_too():
    ours = build(num_prelude_layers=4, num_coda_layers=0, num_routed_depths=0)
    check_equal(ours, build_theirs(LlamaForCausalLM, LlamaConfig, layers=4))


def test_sliding_window_is_ministral():
    """Llama's layers, some of which see a sliding window."""
    ours = build(num_experts=3, num_routed_depths=3, routing="fixed", fixed_path=[0, 1, 2], core_attention="sliding")
    kinds = ["full_attention", *["sliding_attention"] * 3, "full_attention"]
    theirs = build_theirs(MinistralForCausalLM, MinistralConfig, layers=5, layer_types=kinds, sliding_window=WINDOW)
    check_equal(ours, theirs)
    full = build_theirs(LlamaForCausalLM, LlamaConfig, layers=5)
    copy_weights(ours, full)
    ids = ids_of()
    assert not torch.allclose(full(input_ids=ids).logits[:, WINDOW:], ours(input_ids=ids).logits[:, WINDOW:], atol=0.01)


def test_moe_is_mixtral():
    ours = build(num_prelude_layers=3, num_routed_depths=0, moe_num_experts=3, moe_intermediate_size=HIDDEN)
    assert all(isinstance(layer, MoEBlock) for layer in (*ours.model.prelude, *ours.model.coda))
    theirs = build_theirs(MixtralForCausalLM, MixtralConfig, layers=4, num_local_experts=3, num_experts_per_tok=2)
    check_equal(ours, theirs)
    load = ours(input_ids=ids_of()).moe_routing.load
    assert (load > 0).all()
    assert load.sum(1).tolist() == [2 * 2 * LENGTH] * 4


def loop(ours: LoLForCausalLM, theirs: PreTrainedModel, ids: Tensor, blocks: int, loops: int) -> Tensor:
    """Llama's layers: the first, then `blocks` of them again and again, each after a fresh look at the first's result,
    then the last."""
    model, injection = theirs.model, ours.model.injection
    position = torch.arange(ids.shape[1])[None]
    angles = model.rotary_emb(model.embed_tokens(ids), position)

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, attention_mask=None, position_ids=position, position_embeddings=angles)

    seen = run(model.layers[0], model.embed_tokens(ids))
    state = seen
    step = torch.log(1 + torch.exp(injection.delta))
    for _ in range(loops):
        for index in range(blocks):
            kept = torch.exp(-step * torch.exp(injection.log_decay))
            state = run(model.layers[1 + index], kept * state + step * injection.input_scale * seen)
    return theirs.lm_head(model.norm(run(model.layers[-1], state)))


@pytest.mark.parametrize(("blocks", "loops"), [(2, 4), (4, 2), (1, 3)])
def test_looped_is_a_loop(blocks: int, loops: int):
    depths = blocks * loops
    ours = build(
        num_experts=blocks,
        num_routed_depths=depths,
        routing="fixed",
        fixed_path=list(range(blocks)) * loops,
        core_attention="full",
        input_injection="diagonal",
    )
    theirs = build_theirs(LlamaForCausalLM, LlamaConfig, layers=blocks + 2)
    once = build(
        num_experts=blocks,
        num_routed_depths=blocks,
        routing="fixed",
        fixed_path=list(range(blocks)),
        core_attention="full",
    )
    once.load_state_dict({name: tensor for name, tensor in ours.state_dict().items() if "injection" not in name})
    copy_weights(once, theirs)
    assert isinstance(ours.model.prelude[0], Block)
    ids = ids_of()
    # Fewer loops are what growing and sampled depth run.
    for ran in (loops, loops - 1):
        expected = loop(ours, theirs, ids, blocks, ran)
        found = ours(input_ids=ids, num_depths=blocks * ran).logits
        assert expected.std() > 0.3
        assert_close(found, expected, **CLOSE)
    loop(ours, theirs, ids, blocks, loops).square().mean().backward()
    expected_grad = ours.model.injection.delta.grad.clone()
    ours.zero_grad()
    ours(input_ids=ids).logits.square().mean().backward()
    assert_close(ours.model.injection.delta.grad, expected_grad, atol=1e-5, rtol=1e-4)
    cache, parts = DynamicCache(config=ours.config), []
    for start in range(0, LENGTH, 4):
        parts.append(ours(input_ids=ids[:, start : start + 4], cache=cache).logits)
    assert_close(torch.cat(parts, 1), loop(ours, theirs, ids, blocks, loops), **CLOSE)
