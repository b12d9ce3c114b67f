"""The learning rate by numbers, and which weights decay."""

import pytest
import torch

from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.train.config import OptimConfig
from lol.train.optim import learning_rate_at, make_optimizer
from small_run import MODEL


def test_warm_up_and_cosine() -> None:
    config = OptimConfig(learning_rate=2.0, final_learning_rate=0.1, warmup_steps=4)
    rates = [learning_rate_at(step, 13, config) for step in range(13)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    # A quarter, half and all of the way down: 0.2 + 1.8 · (½ + ½ cos)
    assert rates[6] == pytest.approx(0.2 + 1.8 * (0.5 + 0.25 * 2**0.5))
    assert rates[8] == pytest.approx(1.1)
    assert rates[12] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_a_run_shorter_than_its_warm_up_and_one_without() -> None:
    assert learning_rate_at(1, 2, OptimConfig(learning_rate=1.0, warmup_steps=100)) == pytest.approx(0.02)
    none = OptimConfig(learning_rate=1.0, warmup_steps=0, final_learning_rate=0.5)
    assert [learning_rate_at(step, 2, none) for step in range(2)] == [1.0, 0.5]
    assert learning_rate_at(0, 1, none) == 1.0


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_decay(tied: bool) -> None:
    features = {"depth_film": True, "input_injection": "diagonal", "router_only_tokens": True, "tie_router": tied}
    model = LoLForCausalLM(LoLConfig(**MODEL, **features))
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6))
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["weight_decay"]: {name_of[id(p)] for p in group["params"]} for group in optimizer.param_groups}
    projections = [f"{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")]
    places = ("model.prelude.0", "model.library", "model.coda.0")
    assert groups[0.3] == {f"{place}.{projection}.weight" for place in places for projection in projections} | {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.router.weight",
        "model.router.noise_weight",
    }
    assert groups[0.3] | groups[0.0] == set(name_of.values())
    left_out = {
        "model.depth_embedding",
        "model.filler_embedding",
        "model.router.bias",
        "model.library.attn_norm.weight",
    }
    assert left_out <= groups[0.0]
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-6 for group in optimizer.param_groups)


def test_the_balancing_bias_is_no_parameter() -> None:
    model = LoLForCausalLM(LoLConfig(**MODEL))
    optimizer = make_optimizer(model, OptimConfig())
    assert all(p is not model.model.expert_bias for group in optimizer.param_groups for p in group["params"])
    assert isinstance(optimizer, torch.optim.AdamW)
