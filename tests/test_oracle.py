"""The oracle against numbers worked out by hand, so that what holds the model is itself held."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle import (
    BLOCK_PARTS,
    DocumentResult,
    Spec,
    choose,
    document_forward,
    growing_depth,
    next_token_losses,
    noisy_logits,
    rotate,
    router_input,
    sequence_auxiliary_loss,
    shift_of_depth,
    updated_bias,
    windows_of,
)

SILU_2 = 2 / (1 + math.exp(-2))
# Two channels, one head, two blocks, no norm epsilon: states of +-1 have mean square 1, so the norm hands them on as
# they are.
TINY = Spec(
    hidden_size=2,
    num_attention_heads=1,
    num_prelude_layers=0,
    num_coda_layers=0,
    num_experts=2,
    num_routed_depths=1,
    window_size=4,
    window_stride=0,
    rms_norm_eps=0.0,
)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def silent_block() -> dict[str, Tensor]:
    """A block that returns its input: both output projections are zero."""
    square = torch.zeros(2, 2)
    narrow = torch.zeros(1, 2)
    return {
        "attn_norm": torch.ones(2),
        "q_proj": square,
        "k_proj": square,
        "v_proj": square,
        "o_proj": square,
        "mlp_norm": torch.ones(2),
        "gate_proj": narrow,
        "up_proj": narrow,
        "down_proj": torch.zeros(2, 1),
    }


def feeding_block(gain: float) -> dict[str, Tensor]:
    """(1, 1) becomes (1 + gain·silu(2), 1): the gate reads channel 0 twice, the up projection channel 1."""
    return silent_block() | {
        "gate_proj": torch.tensor([[2.0, 0.0]]),
        "up_proj": torch.tensor([[0.0, 1.0]]),
        "down_proj": torch.tensor([[gain], [0.0]]),
    }


def averaging_block() -> dict[str, Tensor]:
    """Adds the plain mean of the visible normed states: all scores are 0, values and outputs pass through."""
    return silent_block() | {"v_proj": torch.eye(2), "o_proj": torch.eye(2)}


def tiny_weights(blocks: list[dict[str, Tensor]], embeddings: list[list[float]]) -> dict[str, Tensor]:
    """A checkpoint whose router reads nothing and gives block 1 three times the probability of block 0."""
    size = len(blocks)
    weights = {f"model.library.{part}.weight": torch.stack([block[part] for block in blocks]) for part in BLOCK_PARTS}
    return weights | {
        "model.embed_tokens.weight": torch.tensor(embeddings),
        "model.router.weight": torch.zeros(size, 2),
        "model.router.bias": vector(0.0, math.log(3.0))[:size],
        "model.router.noise_weight": torch.zeros(size, size),
        "model.router.noise_bias": torch.zeros(size),
        "model.depth_embedding": torch.zeros(4, 2),
        "model.expert_bias": torch.zeros(size),
        "model.norm.weight": torch.ones(2),
        "lm_head.weight": torch.eye(2),
    }


def unnormed(result: DocumentResult, second_channel: float = 1.0) -> list[float]:
    """The states before the final norm, read off the ratio of the channels when channel 1 is known."""
    return [float(h[0] / h[1]) * second_channel for h in result.hidden]


# --- windows and depths ---------------------------------------------------------------------------------------------


def test_half_windows_stand_at_the_ends_of_a_shifted_depth():
    assert windows_of(5, 4, shift_of_depth(0, 4, 2)) == [[0, 1, 2, 3], [4]]
    assert windows_of(5, 4, shift_of_depth(1, 4, 2)) == [[0, 1], [2, 3, 4]]
    assert windows_of(5, 4, shift_of_depth(2, 4, 2)) == [[0, 1, 2, 3], [4]]


def test_published_window_counts():
    assert [len(windows_of(1024, 128, shift_of_depth(depth, 128, 64))) for depth in range(3)] == [8, 9, 8]


def test_a_stride_that_does_not_divide_the_window_walks_through_the_shifts():
    assert [shift_of_depth(depth, 5, 3) for depth in range(6)] == [0, 3, 1, 4, 2, 0]


def test_growing_at_known_steps():
    # 1 + 7·(1 - sqrt(1 - t/T)) passes 2 at 1 - (6/7)² = 0.2653 of the period, and 8 at its end.
    assert [growing_depth(step, 1, 8, 10_000) for step in (0, 1, 2653, 2654, 9_999, 10_000, 99_999)] == [
        1, 2, 2, 3, 8, 8, 8,
    ]  # fmt: skip
    # At 3/4 of the period the formula is exactly 1 + 4·(1 - 1/2) = 3.
    assert [growing_depth(step, 1, 5, 400) for step in (299, 300, 301)] == [3, 3, 4]
    assert growing_depth(7, 4, 4, 100) == 4
    assert growing_depth(0, 1, 6, 0) == 6


# --- one block ------------------------------------------------------------------------------------------------------


def test_swiglu_and_the_blend_by_hand():
    weights = tiny_weights([feeding_block(9.0), feeding_block(2.0)], [[1.0, 1.0], [0.0, 0.0]])
    result = document_forward(TINY, weights, [0])
    assert result.experts == [[1]]
    assert result.weights[0][0] == pytest.approx(0.75)
    assert unnormed(result) == [pytest.approx(1 + 0.75 * 2 * SILU_2)]
    assert result.load.tolist() == [[0, 1]]


def test_the_balancing_bias_moves_the_choice_but_not_the_weight():
    weights = tiny_weights([feeding_block(2.0), feeding_block(9.0)], [[1.0, 1.0], [0.0, 0.0]])
    weights["model.expert_bias"] = vector(0.6, 0.0)
    result = document_forward(TINY, weights, [0])
    assert result.experts == [[0]]
    assert unnormed(result) == [pytest.approx(1 + 0.25 * 2 * SILU_2)]


def test_balancing_bias_per_depth():
    spec = replace(TINY, num_routed_depths=2, balance_scope="depth")
    weights = tiny_weights([silent_block(), silent_block()], [[1.0, 1.0]])
    weights["model.expert_bias"] = torch.tensor([[0.6, 0.0], [0.0, 0.0]])
    assert document_forward(spec, weights, [0]).experts == [[0], [1]]


def test_a_fixed_path_adds_the_whole_change_of_its_block():
    spec = replace(TINY, routing="fixed", fixed_path=(0,))
    weights = tiny_weights([feeding_block(2.0), silent_block()], [[1.0, 1.0]])
    weights = {name: tensor for name, tensor in weights.items() if "router" not in name and "expert" not in name}
    result = document_forward(spec, weights, [0])
    assert unnormed(result) == [pytest.approx(1 + 2 * SILU_2)]
    assert (result.experts, result.weights, result.router_logits) == ([[0]], [[1.0]], [[]])
    forced = document_forward(spec, weights, [0], path=[[1]], path_weight=0.5)
    assert (forced.experts, forced.weights, unnormed(forced)) == ([[1]], [[0.5]], [1.0])


@pytest.mark.parametrize(
    ("core_attention", "window_size", "expected"),
    [
        # normed states are 1, -1, 1 in channel 0 and always 1 in channel 1; the visible mean is added
        ("full", 2, [2.0, -1.0, 1 + 1 / 3]),
        ("windowed", 2, [2.0, -1.0, 2.0]),
        ("sliding", 2, [2.0, -1.0, 1.0]),
        ("sliding", 1, [2.0, -2.0, 2.0]),
    ],
)
def test_which_tokens_a_query_sees(core_attention: str, window_size: int, expected: list[float]):
    spec = replace(TINY, window_size=window_size, core_attention=core_attention, routing="fixed", fixed_path=(0,))
    weights = tiny_weights([averaging_block()], [[1.0, 1.0], [-1.0, 1.0]])
    result = document_forward(spec, weights, [0, 1, 0])
    assert unnormed(result, second_channel=2.0) == [pytest.approx(value) for value in expected]


def test_rope_and_the_scale_of_the_scores_by_hand():
    # The query -(1, 1) at position 1 scores 2 with its own key, and -2·cos(1) with the key (1, 1) of position 0, which
    # stands 1 radian away; both over sqrt(2). Their values are -1 and 1.
    spec = replace(TINY, routing="fixed", fixed_path=(0,))
    first_channel = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    block = averaging_block() | {"q_proj": torch.eye(2), "k_proj": torch.eye(2), "v_proj": first_channel}
    weights = tiny_weights([block], [[1.0, 1.0], [-1.0, -1.0]])
    own, other = math.exp(2 / math.sqrt(2)), math.exp(-2 * math.cos(1) / math.sqrt(2))
    result = document_forward(spec, weights, [0, 1])
    assert unnormed(result, second_channel=-1.0)[1] == pytest.approx(-1 + (other - own) / (own + other))


def test_rope_turns_the_two_halves_of_a_head_in_planes():
    turned = rotate(vector(1.0, 0.0, 0.0, 1.0), position=3, theta=100.0)
    # Planes are channels (0, 2) at angle 3 and (1, 3) at angle 3·100^(-1/2) = 0.3.
    assert turned.tolist() == [pytest.approx(v) for v in (math.cos(3), -math.sin(0.3), math.sin(3), math.cos(0.3))]


def test_film_acts_after_each_norm():
    spec = replace(TINY, routing="fixed", fixed_path=(0,), depth_film=True)
    weights = tiny_weights([averaging_block() | {"down_proj": torch.zeros(2, 1)}], [[1.0, 1.0]])
    film = {"attn_scale": [0.5, 0.0], "attn_shift": [0.25, 0.0], "mlp_scale": [0.0, 0.0], "mlp_shift": [0.0, 0.0]}
    weights |= {f"model.film.{part}": torch.tensor([values]) for part, values in film.items()}
    # The only token attends to itself: 1 + (1·1.5 + 0.25).
    assert unnormed(document_forward(spec, weights, [0]), 2.0) == [pytest.approx(2.75)]

    weights = tiny_weights([feeding_block(2.0)], [[1.0, 1.0]])
    film = {"attn_scale": [9.0, 9.0], "attn_shift": [0.0, 0.0], "mlp_scale": [0.0, 1.0], "mlp_shift": [0.0, 0.5]}
    weights |= {f"model.film.{part}": torch.tensor([values]) for part, values in film.items()}
    # Nothing attends; the up projection reads channel 1, now 1·2 + 0.5.
    assert unnormed(document_forward(spec, weights, [0])) == [pytest.approx(1 + 2 * SILU_2 * 2.5)]


def test_film_has_its_own_row_at_each_depth():
    spec = replace(TINY, num_routed_depths=2, routing="fixed", fixed_path=(0, 0), depth_film=True)
    weights = tiny_weights([averaging_block()], [[1.0, 1.0]])
    weights |= {f"model.film.{part}": torch.zeros(2, 2) for part in ("attn_scale", "mlp_scale", "mlp_shift")}
    weights["model.film.attn_shift"] = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    # (1, 1) + (1, 1), then + (1 + 4, 1).
    assert unnormed(document_forward(spec, weights, [0]), 3.0) == [pytest.approx(7.0)]


def test_injection_decays_the_state_and_adds_the_preludes_output():
    spec = replace(TINY, num_routed_depths=2, routing="fixed", fixed_path=(0, 0), input_injection="diagonal")
    weights = tiny_weights([silent_block()], [[1.0, 1.0]])
    delta = vector(math.log(math.e - 1), math.log(math.e**2 - 1))  # softplus gives 1 and 2
    weights |= {
        "model.injection.delta": delta,
        "model.injection.log_decay": vector(0.0, math.log(0.5)),
        "model.injection.input_scale": vector(3.0, 0.5),
    }
    # Channel 0: s -> s/e + 3, twice from 1. Channel 1: decay exp(-2·0.5), adds 2·0.5 = 1.
    first, second = 1.0, 1.0
    for _ in range(2):
        first, second = first / math.e + 3, second / math.e + 1
    result = document_forward(spec, weights, [0])
    assert unnormed(result, second_channel=second) == [pytest.approx(first)]


# --- the router -----------------------------------------------------------------------------------------------------


def test_the_router_reads_means_of_earlier_windows_and_counts_each_once():
    states = [vector(value, 1.0) for value in (1.0, 3.0, 5.0, 7.0, 100.0)]
    windows = [[0], [1, 2], [3, 4]]
    depth_vector = vector(9.0, 0.0)
    assert router_input(states, windows, 0, depth_vector).tolist() == [5.0, 0.5]
    assert router_input(states, windows, 1, depth_vector).tolist() == [1.0, 1.0]
    assert router_input(states, windows, 2, depth_vector).tolist() == [2.5, 1.0]


def test_the_router_reads_the_states_before_this_depth_changed_them():
    spec = replace(TINY, window_size=1)
    weights = tiny_weights([feeding_block(2.0), feeding_block(2.0)], [[1.0, 1.0]])
    weights["model.router.weight"] = torch.eye(2)
    result = document_forward(spec, weights, [0, 0])
    assert result.router_logits[0][1].tolist() == [1.0, 1.0 + math.log(3.0)]


def test_noise_scales_with_a_capped_softplus():
    router = {
        "weight": torch.eye(2, dtype=torch.float64),
        "bias": vector(0.0, 1.0),
        "noise_weight": torch.tensor([[0.0, 2.0], [0.0, 0.0]], dtype=torch.float64),
        "noise_bias": vector(0.0, 50.0),
    }
    assert noisy_logits(router, vector(1.0, 1.0), None, 10.0).tolist() == [1.0, 2.0]
    moved = noisy_logits(router, vector(1.0, 1.0), vector(0.5, -1.0), 10.0)
    assert moved.tolist() == [pytest.approx(1 + 0.5 * math.log(1 + math.exp(4))), 2 - 10]


def test_ties_go_to_the_lowest_block():
    assert choose([0.25, 0.5, 0.25], [0.25, 0.0, 0.25]) == 0
    assert choose([0.25, 0.5, 0.25], [0.0, 0.0, 0.5]) == 2


def test_a_forced_window_keeps_the_routers_probability_unless_told_otherwise():
    spec = replace(TINY, window_size=1)
    weights = tiny_weights([silent_block(), silent_block()], [[1.0, 1.0]])
    result = document_forward(spec, weights, [0, 0], path=[[0, -1]])
    assert result.experts == [[0, 1]]
    assert result.weights == [[pytest.approx(0.25), pytest.approx(0.75)]]
    result = document_forward(spec, weights, [0, 0], path=[[0, -1]], path_weight=1.0)
    assert result.weights == [[1.0, pytest.approx(0.75)]]


def test_an_untied_router_has_its_own_weights_at_each_depth():
    spec = replace(TINY, num_routed_depths=2, tie_router=False)
    weights = tiny_weights([silent_block(), silent_block()], [[1.0, 1.0]])
    for part in ("weight", "noise_weight", "noise_bias"):
        weights[f"model.router.{part}"] = torch.stack([weights[f"model.router.{part}"]] * 2)
    weights["model.router.bias"] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert document_forward(spec, weights, [0]).experts == [[1], [0]]


def test_only_the_router_reads_a_router_only_token():
    spec = replace(TINY, window_size=2)
    weights = tiny_weights([silent_block(), silent_block()], [[1.0, 1.0], [-1.0, 1.0], [7.0, 4.0]])
    weights["model.filler_embedding"] = vector(-1.0, 1.0)
    weights["model.router.weight"] = torch.eye(2)
    weights["model.router.bias"] = vector(0.0, 0.0)
    result = document_forward(spec, weights, [0, 0, 0], router_only=[-1, 2, -1])
    # Window 0 reads half its first state, window 1 the mean of (1, 1) and the filler; both plus (7, 4).
    assert [z.tolist() for z in result.router_logits[0]] == [[7.5, 4.5], [7.0, 5.0]]
    plain = document_forward(spec, weights, [0, 1, 0])
    assert torch.equal(result.hidden, plain.hidden)


# --- losses and balance ---------------------------------------------------------------------------------------------


def test_next_token_losses_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0], [5.0, 5.0]], dtype=torch.float64)
    assert next_token_losses(logits, [0, 1, 0]) == [pytest.approx(math.log(4 / 3)), pytest.approx(math.log(2))]


def result_with(experts: list[list[int]], probabilities: list[list[list[float]]]) -> DocumentResult:
    logits = [[torch.tensor(a, dtype=torch.float64).log() for a in per_depth] for per_depth in probabilities]
    empty = torch.zeros(0)
    return DocumentResult(empty, experts, [], logits, empty, empty)


def test_the_sequence_loss_is_one_at_balance_and_more_beside_it():
    skewed = [[[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.6, 0.4]]]
    assert sequence_auxiliary_loss(result_with([[0, 1], [1, 0]], skewed), 2) == pytest.approx(1.0)
    # Shares 3/4 and 1/4, mean probabilities 0.6 and 0.4: 2·(0.45 + 0.1).
    assert sequence_auxiliary_loss(result_with([[0, 1], [0, 0]], skewed), 2) == pytest.approx(1.1)


def test_the_bias_moves_towards_the_mean_load_and_stops_at_its_limit():
    load = torch.tensor([[4, 0, 1], [0, 2, 2]])
    assert updated_bias(torch.zeros(3), load, 0.5, "global").tolist() == [-0.5, 0.5, 0.0]
    per_depth = updated_bias(torch.zeros(2, 3), load, 0.5, "depth").tolist()
    assert per_depth == [[-0.5, 0.5, 0.5], [0.5, -0.5, -0.5]]
    assert updated_bias(vector(-15.8, 15.8, 0.0), load, 0.5, "global").tolist() == [-16.0, 16.0, 0.0]


# --- the whole ------------------------------------------------------------------------------------------------------


def random_weights(spec: Spec, vocab: int, intermediate: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

    d, size = spec.hidden_size, spec.num_experts
    shapes = {"gate_proj": (intermediate, d), "up_proj": (intermediate, d), "down_proj": (d, intermediate)}
    shapes |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (d, d))
    shapes |= {"attn_norm": (d,), "mlp_norm": (d,)}
    weights = {f"model.library.{part}.weight": draw(size, *shapes[part]) for part in BLOCK_PARTS}
    for stack, count in (("prelude", spec.num_prelude_layers), ("coda", spec.num_coda_layers)):
        for i in range(count):
            weights |= {f"model.{stack}.{i}.{part}.weight": draw(*shapes[part]) for part in BLOCK_PARTS}
    return weights | {
        "model.embed_tokens.weight": draw(vocab, d),
        "model.router.weight": 10 * draw(size, d),
        "model.router.bias": draw(size),
        "model.router.noise_weight": draw(size, size),
        "model.router.noise_bias": draw(size),
        "model.depth_embedding": draw(spec.num_routed_depths, d),
        "model.expert_bias": 0.1 * draw(size),
        "model.norm.weight": 1 + draw(d),
        "lm_head.weight": draw(vocab, d),
    }


@pytest.mark.parametrize("stride", [0, 2, 3])
def test_a_changed_token_reaches_nothing_before_it(stride: int):
    spec = Spec(8, 2, 1, 1, 3, 3, 4, stride)
    weights = random_weights(spec, vocab=11, intermediate=6, seed=1)
    tokens = [1, 5, 2, 8, 9, 3, 3, 7, 10, 0, 4]
    before = document_forward(spec, weights, tokens)
    for t in (1, 4, 6, 10):
        changed = list(tokens)
        changed[t] = 6
        after = document_forward(spec, weights, changed)
        assert torch.equal(after.logits[:t], before.logits[:t])
        assert not torch.equal(after.logits[t], before.logits[t])
        for depth in range(spec.num_routed_depths):
            windows = windows_of(len(tokens), spec.window_size, shift_of_depth(depth, spec.window_size, stride))
            for k, window in enumerate(windows):
                if window[0] <= t:
                    assert torch.equal(after.router_logits[depth][k], before.router_logits[depth][k])
    assert len({block for per_depth in before.experts for block in per_depth}) > 1


def test_growing_runs_the_first_depths_only():
    spec = Spec(8, 2, 1, 1, 3, 3, 4, 2)
    weights = random_weights(spec, vocab=11, intermediate=6, seed=5)
    tokens = [1, 5, 2, 8, 9]
    full, grown = document_forward(spec, weights, tokens), document_forward(spec, weights, tokens, depth=2)
    assert grown.experts == full.experts[:2]
    assert grown.load[:2].tolist() == full.load[:2].tolist()
    assert grown.load[2].tolist() == [0, 0, 0]
    assert not torch.equal(grown.logits, full.logits)


def test_a_tied_head_reads_the_embedding():
    spec = Spec(8, 2, 0, 0, 3, 1, 4, 2, tie_word_embeddings=True)
    weights = random_weights(spec, vocab=11, intermediate=6, seed=7)
    del weights["lm_head.weight"]
    result = document_forward(spec, weights, [1, 2, 3])
    assert torch.allclose(result.logits, result.hidden @ weights["model.embed_tokens.weight"].T)
