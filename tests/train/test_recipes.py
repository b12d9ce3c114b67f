"""Recipes build, and keep what the documentation says of them."""

import pytest
import torch

from lol import LoLForCausalLM
from lol.errors import UserError
from lol.model.cost import count_parameters
from lol.train.config import as_json, from_json
from lol.train.recipes import RECIPES, recipe


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_builds_and_survives_json(name: str):
    config = recipe(name)
    assert config.recipe == name
    assert as_json(from_json(as_json(config))) == as_json(config)
    with torch.device("meta"):
        model = LoLForCausalLM(config.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(config.model).total


def test_the_demo_is_what_the_readme_says():
    config = recipe("demo")
    assert 2e6 < count_parameters(config.model).total < 4e6
    assert 1 < config.model.num_experts < config.model.num_routed_depths
    assert config.model.window_stride == config.model.window_size // 2
    assert config.growth.initial_depth == 1
    assert config.balance.strategy == "loss_free"
    assert config.data.source == "stdlib"


def test_an_unknown_recipe_lists_those_that_exist():
    with pytest.raises(UserError, match="demo"):
        recipe("huge")
