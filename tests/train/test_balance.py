"""The balancing rules by numbers that a hand can check."""

import pytest
import torch

from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.model.outputs import LoLCausalLMOutput, MoERouting, Routing
from lol.train.balance import (
    batch_loss,
    document_losses,
    global_auxiliary_loss,
    moe_global_auxiliary_loss,
    moe_sequence_auxiliary_losses,
    sequence_auxiliary_losses,
    update_bias,
    update_biases,
)
from lol.train.config import BalanceConfig
from small_run import MODEL


def moved(load: list[list[int]], *, shape: tuple[int, ...] = (3,), step: int = 0, **config: object) -> torch.Tensor:
    bias = torch.zeros(shape)
    update_bias(bias, torch.tensor(load), BalanceConfig(**config), step=step, steps=10)
    return bias


def test_the_load_is_summed_over_depths() -> None:
    # Loads 5, 1, 0 with mean 2.
    assert moved([[4, 0, 0], [1, 1, 0]], rate=0.5).tolist() == [-0.5, 0.5, 0.5]
    # A block at the mean stays.
    assert moved([[3, 2, 1]], rate=0.5).tolist() == [-0.5, 0.0, 0.5]


def test_a_centred_move_adds_up_to_nothing() -> None:
    assert moved([[4, 1, 1]], rate=0.3, centre=True).tolist() == pytest.approx([-0.4, 0.2, 0.2])


def test_one_bias_per_depth_and_a_step_that_ran_two_of_three() -> None:
    assert moved([[4, 1, 1], [0, 3, 3]], shape=(3, 3), rate=0.5).tolist() == [
        [-0.5, 0.5, 0.5],
        [0.5, -0.5, -0.5],
        [0.0, 0.0, 0.0],
    ]


def test_the_bias_stays_within_its_limit() -> None:
    assert moved([[4, 1, 1]], rate=50.0).tolist() == [-16.0, 16.0, 16.0]
    assert moved([[4, 1, 1]], rate=50.0, limit=2.0).tolist() == [-2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("step", "config", "moves"),
    [
        (6, {"stop": 0.7}, True),
        (7, {"stop": 0.7}, False),
        (9, {"stop": 0.7}, False),
        (9, {"stop": 1.0}, True),
        (0, {"strategy": "aux_loss"}, False),
        (0, {"strategy": "none"}, False),
    ],
)
def test_when_the_bias_rests(step: int, config: dict[str, object], moves: bool) -> None:
    assert bool(moved([[4, 1, 1]], step=step, **config).any()) == moves


def two_documents() -> tuple[list[torch.Tensor], Routing]:
    """One row, two depths, two blocks: document 0 has two windows at the second depth, document 1 one everywhere.

    Depth 0: document 0 runs block 0 at probabilities (¾, ¼); document 1 block 0 at (½, ½); then an empty place.
    Depth 1: document 0 runs block 1, block 0 at (¾, ¼), (¼, ¾); document 1 block 1 at (¼, ¾).
    """
    probabilities = torch.tensor([[[[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]], [[0.75, 0.25], [0.25, 0.75], [0.25, 0.75]]]])
    routing = Routing(
        experts=torch.tensor([[[0, 0, -1], [1, 0, 1]]]),
        weights=torch.ones(1, 2, 3),
        documents=torch.tensor([[[0, 1, -1], [0, 0, 1]]]),
        load=torch.tensor([[2, 0], [1, 2]]),
    )
    return list(probabilities.log().unbind(1)), routing


def test_the_loss_of_each_document() -> None:
    logits, routing = two_documents()
    # Document 0: f = (2/3, 1/3), ā = (7/12, 5/12). Document 1: f = (1/2, 1/2), so 1 whatever ā is.
    expected = [2 * (2 / 3 * 7 / 12 + 1 / 3 * 5 / 12), 1.0]
    assert sorted(sequence_auxiliary_losses(logits, routing, BalanceConfig()).tolist()) == pytest.approx(expected[::-1])


def test_counting_the_most_probable_block_in_place_of_the_one_that_ran() -> None:
    logits, routing = two_documents()
    # Document 0: blocks 0, 0, 1 are the most probable; document 1: block 0 (a tie: the lower) and block 1.
    expected = [1.0, 2 * (2 / 3 * 7 / 12 + 1 / 3 * 5 / 12)]
    losses = sequence_auxiliary_losses(logits, routing, BalanceConfig(count="unbiased"))
    assert sorted(losses.tolist()) == pytest.approx(expected)
    routing.experts = torch.tensor([[[1, 1, -1], [1, 1, 1]]])
    again = sequence_auxiliary_losses(logits, routing, BalanceConfig(count="unbiased"))
    assert again.tolist() == losses.tolist()
    assert sequence_auxiliary_losses(logits, routing, BalanceConfig()).tolist() != losses.tolist()


def test_the_loss_of_all_windows() -> None:
    logits, routing = two_documents()
    # f = (3/5, 2/5), ā = ((¾ + ½ + ¾ + ¼ + ¼)/5, …) = (½, ½)
    assert global_auxiliary_loss(logits, routing, BalanceConfig()).item() == pytest.approx(1.0)
    routing.experts = torch.tensor([[[0, 0, -1], [0, 0, 0]]])
    logits[1][0, 2] = torch.tensor([0.75, 0.25]).log()
    # f = (1, 0), ā = (3/5, 2/5)
    assert global_auxiliary_loss(logits, routing, BalanceConfig()).item() == pytest.approx(2 * 0.6)


def test_the_losses_teach_the_router_to_spread() -> None:
    logits, routing = two_documents()
    leaves = [tensor.clone().requires_grad_() for tensor in logits]
    sequence_auxiliary_losses(leaves, routing, BalanceConfig()).sum().backward()
    # Less of block 0, which document 0 runs most; the empty place teaches nothing.
    assert leaves[0].grad[0, 0, 0] > 0
    assert leaves[0].grad[0, 2].tolist() == [0.0, 0.0]


# --- mixture-of-experts layers


def two_layers() -> tuple[list[torch.Tensor], MoERouting]:
    """One row of two documents and a place of padding, three experts, two of them per token.

    Layer 0: document 0 has two tokens at (½, ¼, ¼) that run experts 0, 1 and 0, 2; document 1 one token at (¼, ¼, ½)
    that runs 2 and 0. Layer 1: all probabilities are 1/3.
    """
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.8, 0.1, 0.1]])
    experts = torch.tensor([[[[0, 1], [0, 2], [2, 0], [-1, -1]], [[0, 1], [1, 2], [0, 1], [-1, -1]]]])
    routing = MoERouting(
        experts=experts, documents=torch.tensor([[0, 0, 1, -1]]), load=torch.tensor([[3, 1, 2], [2, 3, 1]])
    )
    return [probabilities.log()[None], torch.zeros(1, 4, 3)], routing


def test_the_loss_of_each_document_in_moe_layers() -> None:
    logits, routing = two_layers()
    # Layer 0, document 0: f = (½, ¼, ¼), ā = (½, ¼, ¼). Document 1: f = (½, 0, ½), ā = (¼, ¼, ½).
    # Layer 1 is balanced: 1.
    expected = [(3 * (1 / 4 + 1 / 16 + 1 / 16) + 1) / 2, (3 * (1 / 8 + 1 / 4) + 1) / 2]
    losses = moe_sequence_auxiliary_losses(logits, routing, BalanceConfig())
    assert losses.tolist() == pytest.approx(expected)


def test_counting_the_most_probable_experts_in_moe_layers() -> None:
    logits, routing = two_layers()
    logits[0] = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.8, 0.1, 0.1]]).log()[None]
    logits[1] = logits[0]
    # Document 0: f = (½, ½, 0), ā = (0.5, 0.3, 0.2). Document 1: f = (0, ½, ½), ā = (0.2, 0.3, 0.5).
    losses = moe_sequence_auxiliary_losses(logits, routing, BalanceConfig(count="unbiased"))
    assert losses.tolist() == pytest.approx([1.2, 1.2])


def test_the_loss_of_all_tokens_in_moe_layers() -> None:
    logits, routing = two_layers()
    # f = (3, 1, 2)/6, ā = (5/12, ¼, ⅓)
    expected = (3 * (3 / 6 * 5 / 12 + 1 / 6 * 1 / 4 + 2 / 6 * 1 / 3) + 1) / 2
    assert moe_global_auxiliary_loss(logits, routing, BalanceConfig()).item() == pytest.approx(expected)


def test_library_and_moe_layers_add_up() -> None:
    (core_logits, core), (moe_logits, moe) = two_documents(), two_layers()
    both = LoLCausalLMOutput(
        router_logits=tuple(core_logits), routing=core, moe_router_logits=tuple(moe_logits), moe_routing=moe
    )
    config = BalanceConfig()
    of_core, of_moe = (
        sequence_auxiliary_losses(core_logits, core, config),
        moe_sequence_auxiliary_losses(moe_logits, moe, config),
    )
    assert torch.equal(document_losses(both, config), of_core + of_moe)
    only_moe = LoLCausalLMOutput(router_logits=(), routing=core, moe_router_logits=tuple(moe_logits), moe_routing=moe)
    assert torch.equal(document_losses(only_moe, config), of_moe)
    only_core = LoLCausalLMOutput(router_logits=tuple(core_logits), routing=core)
    assert torch.equal(document_losses(only_core, config), of_core)
    total = global_auxiliary_loss(core_logits, core, config) + moe_global_auxiliary_loss(moe_logits, moe, config)
    assert torch.equal(batch_loss(both, config), total)


def test_every_layer_has_a_bias_of_its_own() -> None:
    model = LoLForCausalLM(LoLConfig(**MODEL, moe_num_experts=3)).model
    load, moe_load = torch.tensor([[4, 1, 1]]), torch.tensor([[6, 0, 0], [2, 1, 3]])
    update_biases(model, load, moe_load, BalanceConfig(rate=0.5), step=0, steps=10)
    assert model.expert_bias.tolist() == [-0.5, 0.5, 0.5]
    assert [layer.moe.router.expert_bias.tolist() for layer in model.moe_layers] == [[-0.5, 0.5, 0.5], [0.0, 0.5, -0.5]]
    update_biases(model, load, moe_load, BalanceConfig(strategy="aux_loss"), step=1, steps=10)
    assert model.expert_bias.tolist() == [-0.5, 0.5, 0.5]
