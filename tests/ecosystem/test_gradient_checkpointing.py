"""Gradient checkpointing changes no gradient, in either of torch's forms."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ecosystem_cases import build_model, packed_row, some_ids
from lol import LoLForCausalLM, UserError

pytestmark = pytest.mark.filterwarnings(
    # transformers' new names are activation_checkpointing_enable and …_disable; everybody's scripts have the old ones.
    # PEFT asks by the old one too.
    "ignore:.*(is_)?activation_checkpointing:FutureWarning",
)
PACKED = {name: torch.stack([packed_row(seed)[name] for seed in (0, 1)]) for name in ("input_ids", "position_ids")}


def gradients(model: nn.Module, inputs: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Of every trained parameter, in training mode with noise; and the load."""
    model.train().zero_grad(set_to_none=True)
    output = model(**inputs, labels=inputs["input_ids"], generator=torch.Generator().manual_seed(1))
    output.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(grad is not None for grad in grads.values())
    return grads, output.routing.load


def layers_run(model: LoLForCausalLM) -> list[int]:
    """Counts, from now on, how often a layer's norm runs: twice per layer and training step when it is checkpointed."""
    counts = [0]

    def count(*_: Any) -> None:
        counts[0] += 1

    model.model.prelude[0].attn_norm.register_forward_hook(count)
    return counts


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": some_ids()},
        PACKED,
        PACKED | {"path": [0, 1, 2, 1]},
        PACKED | {"path": [2, -1, -1, 0], "path_weight": 1.0},
    ],
    ids=["noise", "packed", "path", "partly free path"],
)
def test_the_gradients_are_those_without(inputs: dict[str, Any], use_reentrant: bool | None):
    model = build_model(depth_film=True, input_injection="diagonal")
    expected, load = gradients(model, inputs)
    runs = layers_run(model)
    model.gradient_checkpointing_enable(None if use_reentrant is None else {"use_reentrant": use_reentrant})
    found, load_with = gradients(model, inputs)
    assert runs == [2]
    assert torch.equal(load_with, load)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=0, msg=name)
    model.gradient_checkpointing_disable()
    gradients(model, inputs)
    assert runs == [3]


def test_under_autocast():
    model = build_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, _ = gradients(model, PACKED)
        model.gradient_checkpointing_enable()
        found, _ = gradients(model, PACKED)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=0, msg=name)


def adapted() -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=["library.q_proj.weight", "library.down_proj.weight", "router.weight"],
        init_lora_weights=False,
    )
    return get_peft_model(build_model(), config)


def test_with_an_adapter_on_router_and_library():
    model = adapted()
    expected, _ = gradients(model, PACKED)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    found, _ = gradients(model, PACKED)
    assert len(found) == 6
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=0, msg=name)


def test_the_reentrant_form_refuses_an_adapter_on_the_library():
    """torch would say that it cannot go backward through the graph a second time."""
    model = adapted()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(UserError, match="use_reentrant': False"):
        gradients(model, PACKED)
    with torch.no_grad():
        model(**PACKED)
    model.eval()(**PACKED)
