"""Mixture-of-experts layers: the grouped dispatch is a plain loop, the choice is balanced by a bias that no forward
pass moves, and the promises of the other layers hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import DynamicCache

from lol import LoLConfig, LoLForCausalLM, UserError
from lol.model.moe import MoE

EXACT = {"atol": 1e-12, "rtol": 1e-12}
SHAPE = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_prelude_layers": 2,
    "num_coda_layers": 1,
    "num_experts": 2,
    "num_routed_depths": 2,
    "window_size": 4,
    "window_stride": 2,
    "moe_num_experts": 4,
}


def randomize(module: nn.Module, seed: int = 0) -> None:
    """So large that tokens choose apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + drawn * 0.2 if "norm" in name else drawn * (3.0 if "router" in name else 0.4))
        for name, buffer in module.named_buffers():
            if "moe" in name:
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)


def build_model(seed: int = 0, **changes) -> LoLForCausalLM:
    model = LoLForCausalLM(LoLConfig(**(SHAPE | changes))).double().eval()
    randomize(model, seed)
    return model


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


# --- The layer ------------------------------------------------------------------------------------------------------


def plain(weights: dict[str, Tensor], bias: Tensor, x: Tensor, k: int) -> Tensor:
    """Token by token: the k experts of highest probability plus bias, by their probabilities divided by the sum."""
    rows = []
    for token in x:
        probability = (weights["router.weight"] @ token).softmax(-1)
        best = sorted(range(len(bias)), key=lambda index: -float(probability[index].detach() + bias[index]))[:k]
        total = sum(probability[index] for index in best)
        row = torch.zeros_like(token)
        for index in best:
            gate, up, down = (weights[f"{name}_proj.weight"][index] for name in ("gate", "up", "down"))
            row = row + probability[index] / total * (down @ (F.silu(gate @ token) * (up @ token)))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_grouped_dispatch_is_a_plain_loop(k: int, tokens: int):
    moe = MoE(LoLConfig(**(SHAPE | {"moe_top_k": k}))).double()
    randomize(moe, seed=k)
    moe.router.expert_bias.copy_(torch.tensor([0.3, 0.0, -0.2, 0.1]))
    x = torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in moe.named_parameters()}
    result, logits, experts = moe(ours)
    expected = plain(weights, moe.router.expert_bias.double(), theirs[0], k)[None]
    # The router works in float32 here too.
    assert_close(result, expected, atol=1e-5, rtol=1e-5)
    (result * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad, weights[name].grad, atol=1e-5, rtol=1e-5, msg=name)
    assert experts.shape == (1, tokens, k)
    assert logits.dtype == torch.float32


def test_an_expert_that_no_token_chose_has_gradient_exactly_zero():
    moe = MoE(LoLConfig(**SHAPE)).double()
    randomize(moe)
    moe.router.expert_bias.copy_(torch.tensor([5.0, 5.0, 0.0, 0.0]))
    moe(torch.randn(1, 6, 8, dtype=torch.float64))[0].sum().backward()
    for stack in (moe.gate_proj, moe.up_proj, moe.down_proj):
        assert stack.weight.grad[:2].any()
        assert not stack.weight.grad[2:].any()


def test_the_bias_enters_the_choice_and_not_the_weight():
    moe = MoE(LoLConfig(**SHAPE))
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:, 0] = torch.tensor([0.0, 1.0, 2.0, 3.0])
        moe.router.expert_bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    token = torch.zeros(1, 8)
    token[0, 0] = 1.0
    logits, weight, expert = moe.router(token)
    assert logits.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert expert.tolist() == [[0, 3]]
    # e^0 and e^3, divided by their sum.
    assert weight[0].tolist() == pytest.approx([1 / (1 + 20.085537), 20.085537 / (1 + 20.085537)])


def test_ties_go_to_the_lowest_index():
    moe = MoE(LoLConfig(**SHAPE))
    nn.init.zeros_(moe.router.weight)
    assert moe.router(torch.randn(5, 8))[2].tolist() == [[0, 1]] * 5


def test_what_a_hook_makes_of_the_choice_is_obeyed():
    model = build_model()

    def to_the_last(_, __, output):
        logits, weight, expert = output
        return logits, weight, expert.fill_(3)

    before = model(input_ids=ids_of(1, 9)).logits
    model.model.moe_layers[0].moe.router.register_forward_hook(to_the_last)
    output = model(input_ids=ids_of(1, 9))
    assert output.moe_routing.load[0].tolist() == [0, 0, 0, 18]
    assert not torch.equal(output.logits, before)


# --- In the model ---------------------------------------------------------------------------------------------------


def test_the_load_counts_real_tokens_of_every_layer():
    model, ids = build_model(), ids_of(2, 7)
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    output = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    routing = output.moe_routing
    assert routing.experts.shape == (2, 3, 7, 2)
    assert routing.load.sum(1).tolist() == [20, 20, 20]
    assert (routing.experts[1, :, :4] == -1).all()
    for layer in range(3):
        assert routing.load[layer].tolist() == [int((routing.experts[:, layer] == index).sum()) for index in range(4)]
        top = (output.moe_router_logits[layer].softmax(-1) + model.model.moe_layers[layer].moe.router.expert_bias).topk(
            2
        )
        assert torch.equal(top.indices[0], routing.experts[0, layer])
        assert not output.moe_router_logits[layer][1, :4].any()
    assert routing.documents.tolist() == [[0] * 7, [-1] * 4 + [0] * 3]
    assert len(routing.load.unique()) > 2


def test_a_forward_pass_moves_no_buffer():
    model = build_model().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(input_ids=ids_of(2, 7), labels=ids_of(2, 7)).loss.backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_packed_and_padded_documents_equal_the_documents_alone():
    model = build_model()
    long, short = ids_of(1, 9, seed=1), ids_of(1, 5, seed=2)
    packed = model(
        input_ids=torch.cat([long, short], 1), position_ids=torch.cat([torch.arange(9), torch.arange(5)])[None]
    )
    padded = model(
        input_ids=torch.cat([torch.full((1, 4), 12), short], 1), attention_mask=torch.tensor([[0] * 4 + [1] * 5])
    )
    alone = [model(input_ids=ids) for ids in (long, short)]
    assert_close(packed.logits, torch.cat([output.logits for output in alone], 1), atol=1e-6, rtol=0)
    assert_close(padded.logits[:, 4:], alone[1].logits, atol=1e-6, rtol=0)
    assert torch.equal(packed.moe_routing.load, alone[0].moe_routing.load + alone[1].moe_routing.load)
    assert torch.equal(padded.moe_routing.load, alone[1].moe_routing.load)
    assert packed.moe_routing.documents.tolist() == [[0] * 9 + [1] * 5]


@pytest.mark.parametrize("depths", [0, 2])
@pytest.mark.parametrize("chunk", [1, 3])
def test_cached_decoding_equals_the_full_pass(chunk: int, depths: int):
    model, ids = build_model(num_routed_depths=depths), ids_of(2, 11)
    full = model(input_ids=ids)
    cache, parts, load = DynamicCache(config=model.config), [], 0
    for start in range(0, 11, chunk):
        output = model(input_ids=ids[:, start : start + chunk], cache=cache)
        parts.append(output.logits)
        load = load + output.moe_routing.load
    assert_close(torch.cat(parts, 1), full.logits, atol=1e-5, rtol=0)
    assert torch.equal(load, full.moe_routing.load)


def test_generation_runs_with_a_cache_and_without_alike():
    model = build_model(num_routed_depths=0)
    texts = [
        model.generate(ids_of(2, 5), max_new_tokens=8, do_sample=False, use_cache=use_cache, pad_token_id=0)
        for use_cache in (True, False)
    ]
    assert torch.equal(*texts)


def test_gradient_checkpointing_changes_no_gradient_and_no_load():
    def run(checkpoint: bool) -> tuple[dict[str, Tensor], Tensor]:
        model = build_model().train()
        if checkpoint:
            model.activation_checkpointing_enable()
        output = model(input_ids=ids_of(2, 7), labels=ids_of(2, 7), generator=torch.Generator().manual_seed(0))
        output.loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}, output.moe_routing.load

    (plainly, load), (checkpointed, load_again) = run(False), run(True)
    assert torch.equal(load, load_again)
    for name, grad in plainly.items():
        assert_close(checkpointed[name], grad, **EXACT, msg=name)


def test_low_precision_keeps_the_routing_and_the_bias_in_float32():
    model = build_model().to(torch.bfloat16)
    router = model.model.moe_layers[0].moe.router
    router.expert_bias.fill_(0.251)
    assert router.to(torch.float16).to(torch.bfloat16).expert_bias.tolist() == pytest.approx([0.251] * 4, abs=1e-6)
    output = model(input_ids=ids_of(1, 6), output_router_logits=True)
    assert output.logits.dtype == torch.bfloat16
    assert {logits.dtype for logits in output.moe_router_logits} == {torch.float32}
    whole = build_model().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = whole(input_ids=ids_of(1, 6), output_router_logits=True)
    assert {logits.dtype for logits in output.moe_router_logits} == {torch.float32}


def test_a_checkpoint_holds_the_bias(tmp_path: Path):
    model = build_model().float()
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        again = LoLForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for one, other in zip(model.model.moe_layers, again.model.moe_layers, strict=True):
            assert torch.equal(one.moe.router.expert_bias, other.moe.router.expert_bias)
            assert other.moe.router.expert_bias.dtype == torch.float32
    # Weights that lie elsewhere in memory may be multiplied in another order.
    again = LoLForCausalLM.from_pretrained(tmp_path)
    assert_close(again(input_ids=ids_of(1, 6)).logits, model(input_ids=ids_of(1, 6)).logits, atol=1e-5, rtol=1e-5)


def test_initial_weights():
    config = LoLConfig(**(SHAPE | {"hidden_size": 64, "moe_intermediate_size": 96, "moe_num_experts": 3}))
    torch.manual_seed(0)
    moe = LoLForCausalLM(config).model.moe_layers[2].moe
    assert moe.gate_proj.weight.detach().std() == pytest.approx(0.02, rel=0.05)
    assert moe.router.weight.detach().std() == pytest.approx(0.02, rel=0.15)
    assert moe.down_proj.weight.detach().std() == pytest.approx(0.02 / 10**0.5, rel=0.05)
    assert not moe.router.expert_bias.any()


def test_the_published_layer():
    """412.1 M stored and 308.3 M active parameters in 24 layers of width 1,024; norms and routers left out."""
    config = LoLConfig(num_prelude_layers=24, num_coda_layers=0, num_routed_depths=0, moe_num_experts=3)
    assert config.moe_size == 1408
    with torch.device("meta"):
        model = LoLForCausalLM(config)
    matrices = {
        name: parameter.numel()
        for name, parameter in model.model.named_parameters()
        if "prelude" in name and "norm" not in name and "router" not in name
    }
    experts = sum(size for name, size in matrices.items() if ".moe." in name)
    assert round(sum(matrices.values()) / 1e6, 1) == 412.1
    assert round((sum(matrices.values()) - experts / 3) / 1e6, 1) == 308.3
    assert model.model.library is None
    assert model.model.router is None
    assert [name for name, _ in model.named_buffers() if "moe" not in name] == []


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_num_experts": 1}, "at least 2"),
        ({"moe_num_experts": 2, "moe_top_k": 3}, "choose 1 to 2"),
        ({"moe_num_experts": 2, "moe_top_k": 0}, "choose 1 to 2"),
        ({"moe_num_experts": 2, "moe_intermediate_size": 0}, "None for the rule"),
        ({"moe_num_experts": None, "moe_intermediate_size": 4}, "only read with moe_num_experts"),
    ],
)
def test_what_cannot_work_names_the_fix(fields: dict, message: str):
    with pytest.raises(UserError, match=message):
        LoLConfig(**(SHAPE | fields))
