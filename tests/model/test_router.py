"""The router by numbers worked out by hand, its precision, and that the core uses what it returns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lol import LoLConfig
from lol.model.router import Router, router_features
from lol.model.windows import WindowLayout, find_documents, lay_windows
from model_cases import Spec, make_batch, make_model


def make_router(experts: int = 2, **fields) -> Router:
    """Width 2, the identity as its matrix (cut to `experts` rows), everything else 0."""
    config = LoLConfig(hidden_size=2, num_attention_heads=1, num_experts=experts, num_routed_depths=3, **fields)
    router = Router(config)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.zero_()
        router.weight.copy_(torch.eye(experts, 2))
    return router.requires_grad_(False)


def softmax(*logits: float) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(logit) / total for logit in logits]


def packed(lengths: list[int], shift: int, size: int) -> WindowLayout:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return lay_windows(find_documents((1, sum(lengths)), positions, None, torch.device("cpu")), shift, size)


# --- What it reads --------------------------------------------------------------------------------------------------


def test_features_by_hand():
    """Windows of 1, 2 and 2 tokens, then a document of one window: half windows count as much as whole ones."""
    layout = packed([5, 2], shift=1, size=2)
    assert layout.windows.length.tolist() == [1, 2, 2, 1, 1]
    state = torch.tensor([[8.0], [2.0], [4.0], [100.0], [300.0], [6.0], [50.0]])
    features = router_features(state, layout, torch.tensor([2.0]), None)
    # ½(2 + 8); the mean 8 of window 0; (8 + 3)/2, not 14/3; ½(2 + 6); 6.
    assert features.flatten().tolist() == [5.0, 8.0, 5.5, 4.0, 6.0]


def test_router_only_tokens_add_to_every_window_of_their_document():
    layout = packed([5, 2], shift=1, size=2)
    state, embedding = torch.zeros(7, 2), torch.zeros(2)
    features = router_features(state, layout, embedding, torch.tensor([[1.0, 2.0], [30.0, 40.0]]))
    assert features.tolist() == [[1.0, 2.0]] * 3 + [[30.0, 40.0]] * 2


def test_features_of_a_low_precision_state_are_exact():
    """256 + 1 has no bfloat16: a mean taken there would be 256 and not 256.5."""
    layout = packed([4], shift=0, size=2)
    state = torch.tensor([[256.0], [257.0], [0.0], [0.0]])
    assert router_features(state.half(), layout, torch.zeros(1), None)[1].item() == 256.5
    state[1] = 258.0
    assert router_features(state.bfloat16(), layout, torch.zeros(1), None)[1].item() == 257.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = router_features(state.bfloat16(), layout, torch.zeros(1), None)
    assert features.dtype == torch.float32
    assert features[1].item() == 257.0


# --- How it scores and chooses --------------------------------------------------------------------------------------


def test_scores_are_one_linear_layer():
    router = make_router()
    router.bias.copy_(torch.tensor([0.5, -0.25]))
    logits, weight, expert = router(torch.tensor([[1.0, 3.0], [2.0, 0.0]]), 0, torch.zeros(2))
    assert logits.tolist() == [[1.5, 2.75], [2.5, -0.25]]
    assert expert.tolist() == [1, 0]
    assert weight.tolist() == pytest.approx([softmax(1.5, 2.75)[1], softmax(2.5, -0.25)[0]])


def test_an_untied_router_uses_the_parameters_of_its_depth():
    router = make_router(tie_router=False)
    router.weight[1] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    router.bias[2] = torch.tensor([10.0, 20.0])
    features = torch.tensor([[1.0, 3.0]])
    results = [router(features, depth, torch.zeros(2))[0].tolist() for depth in range(3)]
    assert results == [[[1.0, 3.0]], [[3.0, 1.0]], [[11.0, 23.0]]]


def test_noise_starts_at_ln_2():
    """z + eps · softplus(0)."""
    noise = torch.tensor([[1.0, -2.0]])
    logits, _, expert = make_router()(torch.tensor([[1.0, 1.5]]), 0, torch.zeros(2), noise)
    assert logits[0].tolist() == pytest.approx([1 + math.log(2), 1.5 - 2 * math.log(2)])
    assert expert.item() == 0


def test_the_spread_of_the_noise_is_a_layer_on_the_logits():
    router = make_router()
    router.noise_weight.copy_(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
    router.noise_bias.copy_(torch.tensor([-1.0, 0.5]))
    logits, _, _ = router(torch.tensor([[1.0, 3.0]]), 0, torch.zeros(2), torch.tensor([[0.5, -1.0]]))
    spread = [math.log1p(math.exp(2 * 3 - 1)), math.log1p(math.exp(1 + 0.5))]
    assert logits[0].tolist() == pytest.approx([1 + 0.5 * spread[0], 3 - spread[1]])


@pytest.mark.parametrize("ceiling", [10.0, 0.25])
def test_the_spread_of_the_noise_has_a_ceiling(ceiling: float):
    router = make_router(router_noise_max=ceiling)
    router.noise_bias.copy_(torch.tensor([1000.0, -1000.0]))
    logits, _, _ = router(torch.zeros(1, 2), 0, torch.zeros(2), torch.tensor([[2.0, 2.0]]))
    assert logits.tolist() == [[2 * ceiling, 0.0]]


def test_the_bias_enters_the_choice_and_nothing_else():
    features = torch.tensor([[2.0, 1.0]])
    free_logits, free_weight, free_expert = make_router()(features, 0, torch.zeros(2))
    logits, weight, expert = make_router()(features, 0, torch.tensor([0.0, 0.5]))
    likely, unlikely = softmax(2.0, 1.0)
    assert likely - unlikely < 0.5
    assert (free_expert.item(), expert.item()) == (0, 1)
    assert torch.equal(logits, free_logits)
    assert free_weight.item() == pytest.approx(likely)
    assert weight.item() == pytest.approx(unlikely)
    # The bias is added to probabilities and not to logits, where it would have to be larger than 1.
    assert make_router()(features, 0, torch.tensor([0.0, 0.4]))[2].item() == 0


def test_ties_go_to_the_lowest_index():
    router = make_router(experts=4)
    assert router(torch.tensor([[1.0, 1.0], [-1.0, -1.0], [0.0, 1.0]]), 0, torch.zeros(4))[2].tolist() == [0, 2, 1]
    router.weight.zero_()
    bias = torch.tensor([0.0, 0.5, 0.0, 0.5])
    assert router(torch.zeros(2, 2), 0, bias)[2].tolist() == [1, 1]


def test_a_forced_block_runs_with_the_routers_own_probability():
    features = torch.tensor([[2.0, 0.0]] * 3)
    forced = torch.tensor([1, -1, 0])
    own = softmax(2.0, 0.0)
    logits, weight, expert = make_router()(features, 0, torch.zeros(2), None, forced)
    assert logits.tolist() == features.tolist()
    assert expert.tolist() == [1, 0, 0]
    assert weight.tolist() == pytest.approx([own[1], own[0], own[0]])
    _, weight, expert = make_router()(features, 0, torch.zeros(2), None, forced, 1.0)
    assert expert.tolist() == [1, 0, 0]
    assert weight.tolist() == pytest.approx([1.0, own[0], 1.0])


# --- In the model ---------------------------------------------------------------------------------------------------

SPEC = Spec(8, 2, 1, 1, 3, 4, 4, 2)


@pytest.mark.parametrize("training", [False, True])
def test_the_logits_that_are_returned_are_those_that_chose(training: bool):
    model, batch = make_model(SPEC, 1).train(training), make_batch([[11, 5], [9]], 1)
    model.model.expert_bias.zero_()
    output = model(**batch.inputs(), output_router_logits=True)
    experts, weights = output.routing.experts, output.routing.weights
    probability = torch.stack(output.router_logits, dim=1).softmax(-1)
    real = experts >= 0
    assert len(experts[real].unique()) > 1
    assert torch.equal(probability.gather(-1, experts.clamp(min=0)[..., None]).squeeze(-1)[real], weights[real])
    assert torch.equal(probability.argmax(-1)[real], experts[real])


def captured_router_calls(model, inputs: dict[str, Tensor], autocast: bool) -> list[tuple[Tensor, tuple]]:
    """(features, what the router returned) of each depth."""
    calls = []
    handle = model.model.router.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(**inputs)
    handle.remove()
    return calls


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float16"])
def test_the_router_scores_in_float32(how: str):
    dtype = {"autocast": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[how]
    model, batch = make_model(SPEC, 0).to(dtype), make_batch([[11, 5], [9]], 0)
    router, bias = model.model.router, model.model.expert_bias
    calls = captured_router_calls(model, batch.inputs(), autocast=how == "autocast")
    assert len(calls) == SPEC.num_routed_depths
    for features, (logits, weight, expert) in calls:
        assert (features.dtype, logits.dtype, weight.dtype) == (torch.float32,) * 3
        expected = torch.nn.functional.linear(features, router.weight.float(), router.bias.float())
        assert torch.equal(logits, expected)
        assert torch.equal(expert, (expected.softmax(-1) + bias).argmax(-1))
        assert torch.equal(weight, expected.softmax(-1).gather(-1, expert[:, None]).squeeze(-1))
        # The products in low precision are others: the assertions above could fail.
        assert not torch.equal(expected, (features.to(torch.bfloat16) @ router.weight.to(torch.bfloat16).t()).float())


def test_a_bfloat16_models_router_reads_its_states_in_float32():
    """The input of each depth, worked out in float64 from the bfloat16 state that the depth before left."""
    model = make_model(Spec(8, 2, 1, 1, 3, 3, 4, 0), 0).to(torch.bfloat16)
    ids = make_batch([[12]], 0, extra_columns=0).input_ids
    calls = captured_router_calls(model, {"input_ids": ids}, autocast=False)
    # hidden_states: the embedding, the prelude's one layer, then the state after each depth.
    with torch.no_grad():  # as in the captured pass: with gradients, attention rounds elsewhere
        states = model(ids, output_hidden_states=True).hidden_states[1:]
    for depth, (features, _) in enumerate(calls):
        assert states[depth].dtype == torch.bfloat16
        state = states[depth][0].double()
        means = [state[4 * k : 4 * k + 4].mean(0) for k in range(3)]
        first = (model.model.depth_embedding[depth].double() + state[0]) / 2
        expected = torch.stack([first, means[0], (means[0] + means[1]) / 2])
        assert_close(features.double(), expected, atol=1e-6, rtol=1e-6)


def test_replacing_what_the_router_returns_reroutes_the_model():
    model, batch = make_model(SPEC, 0), make_batch([[11, 5], [9]], 0)
    free = model(**batch.inputs())
    forced = model(**batch.inputs(), path=[2] * SPEC.num_routed_depths, path_weight=1.0)

    def always_two(_module, _args, output):
        logits, weight, expert = output
        return logits, torch.ones_like(weight), torch.full_like(expert, 2)

    handle = model.model.router.register_forward_hook(always_two)
    hooked = model(**batch.inputs())
    handle.remove()
    assert not torch.equal(free.logits, forced.logits)
    assert torch.equal(hooked.logits, forced.logits)
    assert torch.equal(hooked.routing.experts, forced.routing.experts)
    assert torch.equal(hooked.routing.weights, forced.routing.weights)
    assert hooked.routing.load[:, :2].sum() == 0
    assert torch.equal(model(**batch.inputs()).logits, free.logits)
