"""On every rank: the gradients of its rows under a mode of parallelism, beside those of one process on all rows.

gradient_program.py OUT MODE…    OUT: a JSON file, written by rank 0: case → what test_parallel.py asserts on
"""

import copy
import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lol import LoLConfig, LoLForCausalLM
from lol.train.config import OptimConfig
from lol.train.optim import make_optimizer
from lol.train.parallel import World, clip_gradients, join_world, parallelize, passes_on, spread_like, whole

ROWS, LENGTH, DEPTHS, LIMIT = 8, 24, 4, 0.05
# Of even rows and of odd ones, which are other ranks'. -1 leaves the router free.
PATHS = {
    "same path": [[0, 1, 2, 1], [0, 1, 2, 1]],
    "permuted": [[0, 1, 2, 3], [3, 2, 1, 0]],
    "disjoint sets": [[0, 1, 0, 1], [2, 3, 2, 3]],
    "one block each": [[0, 0, 0, 0], [3, 3, 3, 3]],
    "free": [[-1, -1, -1, -1], [-1, -1, -1, -1]],
}
# Of a case: what differs from a pass through all depths.
CASES: dict[str, dict[str, Any]] = {name: {"path": path} for name, path in PATHS.items()}
CASES["shallow"] = {"path": [path[:2] for path in PATHS["disjoint sets"]], "num_depths": 2}
CASES["checkpointing"] = {"path": PATHS["disjoint sets"], "checkpointing": True}
CASES["truncated"] = {"path": PATHS["disjoint sets"], "options": {"backprop_depth": 2}}
CASES["truncated but for first windows"] = {
    "path": PATHS["disjoint sets"],
    "options": {"backprop_depth": 2, "first_window_full_backprop": True},
}
CASES["two micro-batches"] = {"path": PATHS["disjoint sets"], "micro_batches": 2}
# Cases of other models. Without injection truncation leaves the prelude without a gradient.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("disjoint sets", {"tie_word_embeddings": True}),
    "mixtures": ("disjoint sets", {"moe_num_experts": 3, "moe_intermediate_size": 8, "moe_top_k": 2}),
    "no gradient before the core": ("truncated", {"input_injection": "none"}),
}


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that run inside of it, by name."""

    def __init__(self):
        super().__init__()
        self.collectives = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.collectives[str(func)] += 1
        return func(*args, **(kwargs or {}))


def build(**changes: Any) -> LoLForCausalLM:
    """A float64 model whose router tells windows apart."""
    torch.manual_seed(0)
    config = LoLConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_prelude_layers=1,
        num_coda_layers=1,
        num_experts=4,
        num_routed_depths=DEPTHS,
        window_size=8,
        window_stride=4,
        depth_film=True,
        router_noise_max=0.0,
        **({"input_injection": "diagonal"} | changes),
    )
    model = LoLForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.double()


def batches(case: dict[str, Any]) -> list[dict[str, Tensor]]:
    """All rows, in micro-batches, with the path of each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 31, (ROWS, LENGTH), generator=generator)
    # Documents of different lengths: ranks have different numbers of targets.
    positions = torch.arange(LENGTH).expand(ROWS, -1).clone()
    positions[1, 5:] = torch.arange(LENGTH - 5)
    positions[2, 9:] = torch.arange(LENGTH - 9)
    path = torch.tensor(case["path"]).repeat(ROWS // 2, 1)[:, :, None]
    whole_batch = {"input_ids": ids, "position_ids": positions, "path": path}
    count = case.get("micro_batches", 1)
    return [{name: tensor.tensor_split(count)[index] for name, tensor in whole_batch.items()} for index in range(count)]


def run(module: nn.Module, case: dict[str, Any], world: World) -> Tensor:
    """Leaves the gradients of the mean over all targets of all ranks; the load of this rank."""
    parts = batches(case)
    targets = sum(int((part["position_ids"] > 0).sum()) for part in parts)
    depth = case.get("num_depths", DEPTHS)
    load = torch.zeros(depth, 4, dtype=torch.long)
    for index, part in enumerate(parts):
        own = world.rows(part)
        with passes_on(module, last=index == len(parts) - 1):
            output = module(
                **own, labels=own["input_ids"], num_depths=depth, num_items_in_batch=targets, **case.get("options", {})
            )
            output.loss.backward()
        load += output.routing.load
    return load


def compare(mode: str, case: dict[str, Any], world: World, **changes: Any) -> dict[str, Any]:
    """One case: errors of gradients and clipping against one process, and the collectives."""
    alone = build(**changes).train()
    model = copy.deepcopy(alone)
    module = parallelize(model, mode, world)
    if case.get("checkpointing"):
        model.activation_checkpointing_enable()
    expected_load = run(alone, case, World())
    with CountCollectives() as counter:
        load = run(module, case, world)
    [load] = world.add_up(load)
    # Noise is off, so its parameters have none.
    expected = {name: own.grad.clone() for name, own in alone.named_parameters() if own.grad is not None}
    found = {name: whole(own.grad) for name, own in model.named_parameters() if own.grad is not None}
    errors = {
        name: float((found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30))
        for name, gradient in expected.items()
        if gradient.abs().max() > 0
    }
    norms = [clip_gradients(part.parameters(), LIMIT) for part in (alone, model)]
    clipped = [
        float((whole(parameter.grad) - own.grad).abs().max())
        for own, parameter in zip(alone.parameters(), model.parameters(), strict=True)
        if own.grad is not None
    ]
    result = {
        "error": max(errors.values()),
        "names": [list(part.state_dict()) for part in (alone, model)],
        "with gradient": [list(found), list(expected)],
        "nonzero": sum(bool(gradient.abs().max() > 0) for gradient in expected.values()),
        "busy": load.sum(0).tolist(),
        "load": load.tolist() == expected_load.tolist(),
        "norms": [float(norm) for norm in norms],
        "clipped": max(clipped),
        "collectives": dict(counter.collectives),
        "round trip": all(
            torch.equal(whole(spread_like(whole(parameter.detach()), parameter)), whole(parameter.detach()))
            for parameter in model.parameters()
        ),
    }
    return result | {"muon": compare_muon(alone, model)}


def compare_muon(alone: LoLForCausalLM, model: LoLForCausalLM) -> dict[str, float]:
    """Two steps of Muon on both, from the same gradients: the largest difference of weights and of momenta."""
    for own, parameter in zip(alone.parameters(), model.parameters(), strict=True):
        parameter.grad = None if own.grad is None else spread_like(own.grad.clone(), parameter)
    before = alone.model.library.q_proj.weight.detach().clone()
    states = []
    for part in (alone, model):
        optimizer = make_optimizer(part, OptimConfig(name="muon", learning_rate=0.01))
        optimizer.step()
        optimizer.step()
        state = [(parameter, optimizer.state[parameter].get("momentum_buffer")) for parameter in part.parameters()]
        states.append([whole(tensor.detach()) for pair in state for tensor in pair if tensor is not None])
    return {
        "error": max(float((own - other).abs().max()) for own, other in zip(*states, strict=True)),
        "moved": (alone.model.library.q_proj.weight - before).abs().amax((1, 2)).tolist(),
    }


def main(out: str, modes: list[str]) -> None:
    torch.set_num_threads(1)
    # One group for all modes: the store keeps what a rank published for the group before, and another would meet it.
    dist.init_process_group("gloo")
    results = {}
    for mode in modes:
        with join_world(mode) as world:
            for name, case in CASES.items():
                results[f"{mode}: {name}"] = compare(mode, case, world)
            for name, (case, changes) in MODELS.items():
                results[f"{mode}: {name}"] = compare(mode, CASES[case], world, **changes)
    if world.is_main:
        with open(out, "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
