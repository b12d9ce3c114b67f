"""Separation, purity, concentration and the mode path on routings whose values are known by hand."""

import pytest
import torch

from lol.paths.agreement import (
    count_uses,
    depth_concentration,
    mode_path,
    purity,
    separation,
    separation_over_depths,
)

ALL = torch.cartesian_prod(*[torch.arange(4)] * 3)


def uses_of(experts: torch.Tensor, num_experts: int = 4) -> torch.Tensor:
    return count_uses(experts, ALL, num_experts, 4)


def test_blocks_by_label_are_apart_and_shared_by_all_depths():
    uses = uses_of(ALL)
    assert separation(uses) == separation_over_depths(uses) == 1.0
    assert purity(uses).tolist() == [1.0] * 3
    assert depth_concentration(uses) == pytest.approx(1 / 3)
    assert mode_path(uses).tolist() == [[0, 1, 2, 3]] * 3


def test_blocks_by_depth_say_nothing_of_the_label():
    uses = uses_of(torch.arange(3).expand(64, 3))
    assert separation(uses) == 0.25
    assert purity(uses).tolist() == [1.0] * 3
    assert depth_concentration(uses) == 1.0
    assert mode_path(uses).tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_one_block_per_depth_and_label():
    uses = uses_of(ALL + 4 * torch.arange(3), 12)
    assert separation(uses) == separation_over_depths(uses) == 1.0
    assert depth_concentration(uses) == 1.0


def test_a_label_may_change_its_block_from_depth_to_depth():
    uses = uses_of((ALL + torch.arange(3)) % 4)
    assert separation(uses) == 1.0
    # Each block has three labels, one per depth.
    assert separation_over_depths(uses) == pytest.approx(1 / 3)


def test_a_mixed_routing_is_the_mean_over_depths():
    # Depth 0 by label, depth 1 two labels a block, depth 2 one block for all.
    experts = torch.stack([ALL[:, 0], ALL[:, 1] // 2, torch.zeros(64, dtype=torch.long)], dim=1)
    uses = uses_of(experts)
    assert separation(uses) == pytest.approx((1 + 0.5 + 0.25) / 3)
    # Block 0 runs 16 + 32 + 64 times, block 1 16 + 32, blocks 2 and 3 at depth 0 only.
    assert depth_concentration(uses) == pytest.approx((64 / 112 + 32 / 48 + 1 + 1) / 4)


def test_a_label_on_several_blocks_is_impure():
    experts = (torch.arange(64) % 4)[:, None].expand(64, 3)
    uses = count_uses(experts, torch.zeros(64, 3, dtype=torch.long), 4, 4)
    assert purity(uses).tolist() == [0.25] * 3
    # All examples have one label, which is each block's most common.
    assert separation(uses) == 1.0
