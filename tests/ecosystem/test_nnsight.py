"""nnsight reads what the router returned at each depth, and replaces it.

The router is one module that is called once per depth: its calls are the iterations of `tracer.iter`.
"""

import nnsight
import pytest
import torch
from nnsight import NNsight

from ecosystem_cases import build_model, packed_row, some_ids

DEPTHS = 4


@pytest.mark.parametrize("packed", [False, True])
def test_reading_the_router_at_every_depth(packed: bool):
    model = build_model()
    inputs = {"input_ids": some_ids(2)}
    if packed:
        inputs = {name: torch.stack([packed_row(seed)[name] for seed in (0, 1)]) for name in packed_row(0)}
    with torch.no_grad():
        plain = model(**inputs, output_router_logits=True)
    net = NNsight(model)
    with torch.no_grad(), net.trace(**inputs) as tracer:
        calls = nnsight.save([])
        for _ in tracer.iter[:DEPTHS]:
            calls.append(net.model.router.output)
        logits = net.output.logits.save()
    assert torch.equal(logits, plain.logits)
    assert len(calls) == DEPTHS
    for depth, (raw, weight, expert) in enumerate(calls):
        windows = plain.routing.experts[:, depth] >= 0
        assert torch.equal(raw, plain.router_logits[depth][windows])
        assert torch.equal(weight, plain.routing.weights[:, depth][windows])
        assert torch.equal(expert, plain.routing.experts[:, depth][windows])
    assert len({int(block) for _, _, expert in calls for block in expert}) > 1


@pytest.mark.parametrize("path_weight", [1.0, None], ids=["weight 1", "the router's own weight"])
def test_rerouting_every_depth_is_a_forced_path(path_weight: float | None):
    model, ids, path = build_model(), some_ids(2), [2, 1, 0, 1]
    with torch.no_grad():
        expected = model(ids, path=path, path_weight=path_weight)
        net = NNsight(model)
        with net.trace(ids) as tracer:
            for depth in tracer.iter[:DEPTHS]:
                raw, weight, expert = net.model.router.output
                expert = torch.full_like(expert, path[depth])
                own = raw.softmax(-1).gather(-1, expert[:, None]).squeeze(-1)
                weight = own if path_weight is None else torch.full_like(weight, path_weight)
                net.model.router.output = (raw, weight, expert)
            logits = net.output.logits.save()
            experts = net.output.routing.experts.save()
        assert torch.equal(logits, expected.logits)
        assert torch.equal(experts, expected.routing.experts)
        assert not torch.equal(logits, model(ids).logits)


def test_rerouting_some_windows_of_one_depth():
    model, ids = build_model(), some_ids(1)
    with torch.no_grad():
        free = model(ids).routing.experts
        block = (int(free[0, 2, 1]) + 1) % 3
        path = torch.full((DEPTHS, free.shape[2]), -1)
        path[2, 1] = block
        expected = model(ids, path=path, path_weight=1.0).logits
        net = NNsight(model)
        with net.trace(ids) as tracer:
            for _ in tracer.iter[2]:
                raw, weight, expert = net.model.router.output
                chosen = torch.arange(len(expert)) == 1
                net.model.router.output = (
                    raw,
                    weight.masked_fill(chosen, 1.0),
                    expert.masked_fill(chosen, block),
                )
            logits = net.output.logits.save()
        assert torch.equal(logits, expected)


def test_states_of_layers_and_gradients():
    """Prelude, the library's depths and the coda are modules like any other."""
    model, ids = build_model(), some_ids(1)
    net = NNsight(model)
    with net.trace(ids, labels=ids) as tracer:
        prelude = net.model.prelude[0].output.save()
        states = nnsight.save([])
        for _ in tracer.iter[:DEPTHS]:
            states.append(net.model.library.output)
        loss = net.output.loss.save()
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    for found, expected in zip([prelude, *states], hidden[1 : DEPTHS + 2], strict=True):
        assert torch.equal(found.detach().flatten(), expected.flatten())
    loss.backward()
    assert model.model.router.weight.grad.abs().max() > 0
