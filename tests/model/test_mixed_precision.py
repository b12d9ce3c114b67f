"""Under bfloat16 autocast, attention on a CPU and all routing run in float32."""

import pytest
import torch
import torch.nn.functional as F

from lol import LoLConfig, LoLForCausalLM


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_on_a_cpu_and_routing_are_float32(monkeypatch: pytest.MonkeyPatch, attention: str):
    torch.manual_seed(0)
    config = LoLConfig(
        vocab_size=16,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        num_prelude_layers=1,
        num_coda_layers=1,
        num_experts=2,
        num_routed_depths=2,
        window_size=4,
        window_stride=2,
    )
    model = LoLForCausalLM(config)
    model.set_attn_implementation(attention)
    model.eval()
    used, products, plain, linear = [], [], F.scaled_dot_product_attention, F.linear

    def attend(query, *rest, **options):
        used.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return plain(query, *rest, **options)

    def multiply(x, *rest):
        result = linear(x, *rest)
        products.append(result.dtype)
        return result

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(F, "linear", multiply)
    ids = torch.arange(12)[None] % 16
    exact = model(ids).logits
    used.clear()
    products.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(ids, output_router_logits=True)
    # Of each depth; prelude and coda call it where it is their implementation.
    assert len(used) >= (4 if attention == "sdpa" else 2)
    assert set(used) == {(torch.float32, False)}
    assert set(products) == {torch.bfloat16, torch.float32}
    assert {logits.dtype for logits in output.router_logits} == {torch.float32}
    assert not torch.equal(output.logits, exact)
    torch.testing.assert_close(output.logits.float(), exact, atol=0.05, rtol=0.05)
