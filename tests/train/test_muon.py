"""Muon: stacks are turned as torch turns their matrices one by one, and which weights it takes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.train.config import OptimConfig, TrainConfig
from lol.train.muon import MuonAdamW
from lol.train.optim import make_optimizer
from small_run import MODEL

BLOCKS, STEPS, IDLE = 3, 4, (2, 1)
"""The block that has no gradient, and from which step on."""


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_a_stack_is_its_matrices_under_torchs_muon(shape: tuple[int, int]) -> None:
    """Bit for bit; a block of which no window chose has gradient 0 here and none there."""
    generator = torch.Generator().manual_seed(0)
    stack = nn.Parameter(torch.randn(BLOCKS, *shape, generator=generator))
    norm = nn.Parameter(torch.randn(shape[0], generator=generator))
    single = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    own_norm = nn.Parameter(norm.detach().clone())
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3}
    adamw: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6}
    optimizer = MuonAdamW([stack], [{"params": [norm], "weight_decay": 0.0}], **settings, **adamw)
    references = [
        torch.optim.Muon(single, **settings, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([own_norm], lr=0.02, weight_decay=0.0, fused=True, **adamw),
    ]
    resting = None
    for step in range(STEPS):
        # Blocks whose gradients differ by orders of magnitude: turned together, the large one would decide.
        stack.grad = torch.randn(stack.shape, generator=generator) * torch.tensor([1.0, 1e-3, 10.0])[:, None, None]
        norm.grad = torch.randn(norm.shape, generator=generator)
        own_norm.grad = norm.grad.clone()
        if step >= IDLE[1]:
            stack.grad[IDLE[0]] = 0
            resting = stack[IDLE[0]].clone() if resting is None else resting
        for block, matrix in enumerate(single):
            matrix.grad = None if block == IDLE[0] and step >= IDLE[1] else stack.grad[block].clone()
        for group in (*optimizer.param_groups, *(group for part in references for group in part.param_groups)):
            group["lr"] = 0.02 / (step + 1)
        for part in (optimizer, *references):
            part.step()
    assert torch.equal(stack, torch.stack(list(single)))
    assert torch.equal(norm, own_norm)
    assert torch.equal(
        optimizer.state[stack]["momentum_buffer"],
        torch.stack([references[0].state[matrix]["momentum_buffer"] for matrix in single]),
    )
    assert torch.equal(stack[IDLE[0]], resting)


def test_muon_takes_the_projections_and_adamw_the_rest() -> None:
    features = {"depth_film": True, "input_injection": "diagonal", "router_only_tokens": True, "moe_num_experts": 3}
    model = LoLForCausalLM(LoLConfig(**MODEL, **features, moe_intermediate_size=8))
    optimizer = make_optimizer(model, OptimConfig(name="muon", weight_decay=0.3, momentum=0.8))
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others, muon = ({name_of[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert muon == {
        f"{place}.{projection}_proj.weight"
        for place, projections in {
            "model.library": "q k v o gate up down",
            "model.prelude.0": "q k v o",
            "model.prelude.0.moe": "gate up down",
            "model.coda.0": "q k v o",
            "model.coda.0.moe": "gate up down",
        }.items()
        for projection in projections.split()
    }
    assert decayed == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.router.weight",
        "model.router.noise_weight",
        "model.prelude.0.moe.router.weight",
        "model.coda.0.moe.router.weight",
    }
    assert decayed | others | muon == set(name_of.values())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0, 0.3]
    assert optimizer.param_groups[2]["momentum"] == 0.8


def test_a_state_dict_goes_on() -> None:
    """As transformers' Trainer saves it: loading puts new groups and states in the place of the old."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(2, 4, 4, generator=generator), torch.randn(4, generator=generator)]
    gradients = [torch.randn(3, *tensor.shape, generator=generator) for tensor in start]

    def make(values: list[torch.Tensor]) -> tuple[list[nn.Parameter], MuonAdamW]:
        stack, norm = (nn.Parameter(value.detach().clone()) for value in values)
        groups = [{"params": [norm], "weight_decay": 0.0}]
        return [stack, norm], MuonAdamW(
            [stack], groups, lr=0.1, betas=(0.9, 0.9), eps=1e-8, momentum=0.9, weight_decay=0.1
        )

    def take(parameters: list[nn.Parameter], optimizer: MuonAdamW, step: int) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient[step].clone()
        optimizer.step()

    straight, optimizer = make(start)
    take(straight, optimizer, 0)
    resumed, other = make(straight)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (1, 2):
        take(straight, optimizer, step)
        take(resumed, other, step)
    assert all(torch.equal(own, wanted) for own, wanted in zip(resumed, straight, strict=True))


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_a_momentum_that_would_never_move_is_refused(momentum: float) -> None:
    with pytest.raises(UserError, match=r"optim.momentum must be from 0 to below 1"):
        TrainConfig(optim=OptimConfig(momentum=momentum))
