"""`LoLConfig`: what it refuses and how it says so, what it derives, and that it survives JSON."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from lol import LoLConfig, LoLModel, UserError
from model_cases import bounded

DERIVED = [name for name, value in vars(LoLConfig).items() if isinstance(value, property)]

# A value other than the default for every field of our own.
OTHER_VALUES = {
    "vocab_size": 99,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_prelude_layers": 0,
    "num_coda_layers": 2,
    "num_experts": 5,
    "num_routed_depths": 3,
    "window_size": 7,
    "window_stride": 2,
    "routing": "fixed",
    "fixed_path": [4, 0, 4],
    "core_attention": "sliding",
    "tie_router": False,
    "router_noise_max": 0.5,
    "balance_scope": "depth",
    "depth_film": True,
    "input_injection": "diagonal",
    "router_only_tokens": True,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 77,
    "initializer_range": 0.3,
    "output_router_logits": True,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": [3, 4],
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_size": 0}, "window_size must be at least 1, not 0"),
        ({"window_size": -3}, "window_size must be at least 1, not -3"),
        ({"window_stride": -1}, "window_stride must be at least 0, not -1"),
        ({"window_stride": 129}, "window_stride=129 is larger than window_size=128: choose a stride of at most 128"),
        ({"window_size": 32}, "window_stride=64 is larger than window_size=32: choose a stride of at most 32"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"hidden_size": 15, "num_attention_heads": 3}, "hidden_size must be even, not 15"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        (
            {"num_attention_heads": 3},
            "num_attention_heads=3 does not divide hidden_size=1024 .* choose one of \\[1, 2,",
        ),
        ({"hidden_size": 48}, "num_attention_heads=16 .* heads of an even size: choose one of .*24\\]"),
        ({"hidden_size": 8}, "num_attention_heads=16 does not divide hidden_size=8"),
        ({"num_experts": 0}, "num_experts must be at least 1"),
        ({"num_prelude_layers": -1}, "num_prelude_layers must be at least 0"),
        ({"num_coda_layers": -1}, "num_coda_layers must be at least 0"),
        ({"num_routed_depths": -1}, "num_routed_depths must be at least 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1 \\(or None for the rule\\), not 0"),
        ({"rope_theta": 0}, "rope_theta must be positive"),
        ({"rope_theta": math.inf}, "rope_theta must be positive and finite"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be positive"),
        ({"initializer_range": -0.1}, "initializer_range must be 0 .* or positive"),
        ({"router_noise_max": -1}, "router_noise_max must be 0 \\(noise is off\\) or positive"),
        ({"router_noise_max": math.nan}, "router_noise_max must be 0 .* not nan"),
        ({"fixed_path": [0] * 16}, "fixed_path is only read with routing='fixed': set routing='fixed' or leave"),
        ({"routing": "fixed"}, "routing='fixed' needs fixed_path, a list of 16 block indices"),
        (
            {"routing": "fixed", "fixed_path": [0, 1]},
            "fixed_path has 2 blocks but num_routed_depths=16: give one block per depth",
        ),
        (
            {"routing": "fixed", "fixed_path": [0] * 15 + [8]},
            "fixed_path names block 8 but num_experts=8: use blocks 0 to 7",
        ),
        ({"routing": "fixed", "fixed_path": [0] * 15 + [-1]}, "fixed_path names block -1 but num_experts=8"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_the_fix(fields: dict, message: str):
    with pytest.raises(UserError, match=message):
        LoLConfig(**fields)


@pytest.mark.parametrize("hidden_size", [2, 12, 48, 90])
def test_every_number_of_heads_that_the_error_offers_works(hidden_size: int):
    with pytest.raises(UserError) as error:
        LoLConfig(hidden_size=hidden_size, num_attention_heads=7)
    offered = [int(number) for number in re.findall(r"\d+", str(error.value).split("choose one of")[1])]
    working = []
    for heads in range(1, hidden_size + 1):
        try:
            working.append(LoLConfig(hidden_size=hidden_size, num_attention_heads=heads).num_attention_heads)
        except UserError:
            continue
    assert offered == working


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_number_cannot_be_given(name: str):
    with pytest.raises(UserError, match=f"{name} follows from the other fields of LoLConfig: leave it out"):
        LoLConfig(**{name: 3})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("window_size", "128", "int"),
        ("window_size", 128.0, "int"),
        ("window_size", True, "int"),
        ("vocab_size", None, "int"),
        ("tie_router", 1, "bool"),
        ("rms_norm_eps", "1e-6", "float"),
        ("routing", "soft", "'learned', 'fixed'"),
        ("core_attention", "local", "'windowed', 'full', 'sliding'"),
        ("balance_scope", "layer", "'global', 'depth'"),
        ("input_injection", True, "'none', 'diagonal'"),
        ("fixed_path", [0.5], "int"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: object, expected: str):
    with pytest.raises(StrictDataclassFieldValidationError) as error:
        LoLConfig(**{name: value})
    assert f"'{name}'" in str(error.value)
    assert expected in str(error.value)


def test_whole_numbers_are_numbers():
    config = LoLConfig(rope_theta=500, rms_norm_eps=1, initializer_range=0, router_noise_max=0)
    assert (config.rope_theta, config.rms_norm_eps, config.initializer_range, config.router_noise_max) == (500, 1, 0, 0)


def test_a_config_that_was_changed_afterwards_is_checked_when_the_model_is_built():
    config = LoLConfig(hidden_size=8, num_attention_heads=2)
    config.window_size = 32
    with pytest.raises(UserError, match="window_stride=64 is larger than window_size=32"):
        LoLModel(config)


def test_json_round_trip(tmp_path: Path):
    defaults = LoLConfig().to_dict()
    assert [name for name, value in OTHER_VALUES.items() if defaults[name] == value] == []
    config = LoLConfig(**OTHER_VALUES)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is LoLConfig
    assert {name: getattr(loaded, name) for name in OTHER_VALUES} == OTHER_VALUES
    assert loaded.to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}
    assert LoLConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_nothing_derived_is_ever_written(tmp_path: Path):
    assert {"num_hidden_layers", "num_key_value_heads", "head_dim", "mlp_size"} <= set(DERIVED)
    config = LoLConfig(**OTHER_VALUES)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["num_experts"] == 5
    unwanted = {*DERIVED, "layer_types"}
    for keys in (written, config.to_dict(), config.to_diff_dict()):
        assert unwanted.isdisjoint(keys)


@pytest.mark.parametrize(("width", "hidden"), [(512, 1536), (1024, 2816), (2048, 5632)])
def test_the_published_widths_of_swiglu(width: int, hidden: int):
    assert LoLConfig(hidden_size=width).mlp_size == hidden
    assert LoLConfig(hidden_size=width, intermediate_size=1408).mlp_size == 1408


@bounded(100)
@given(half=st.integers(1, 5000))
def test_swiglu_is_as_wide_as_the_rule_says(half: int):
    size = LoLConfig(hidden_size=2 * half, num_attention_heads=1).mlp_size
    assert size % 256 == 0
    # In exact integers: 8d/3 <= size < 8d/3 + 256.
    assert 0 <= 3 * size - 8 * 2 * half < 3 * 256


def test_derived_numbers():
    config = LoLConfig(hidden_size=48, num_attention_heads=6, num_prelude_layers=1, num_coda_layers=3)
    assert config.head_dim == 8
    assert config.num_key_value_heads == 6
    assert config.num_hidden_layers == 1 + 16 + 3
    with pytest.raises(AttributeError):
        config.num_hidden_layers = 3


def test_window_shifts():
    config = LoLConfig(window_size=6, window_stride=4, num_routed_depths=5)
    assert [config.window_shift(depth) for depth in range(5)] == [0, 4, 2, 0, 4]
    assert config.core_window == 6
    for attention in ("full", "sliding"):
        whole = LoLConfig(window_size=6, window_stride=4, num_routed_depths=5, core_attention=attention)
        assert [whole.window_shift(depth) for depth in range(5)] == [0] * 5
        assert whole.core_window is None
        assert whole.windows_in(1000) == 1


def test_the_most_windows_of_a_document():
    config = LoLConfig(num_routed_depths=2)
    assert config.windows_in(1024) == 9
    assert config.windows_in(1024, num_depths=1) == 8
    assert config.windows_in(1024, num_depths=0) == 0
    assert [config.windows_in(n) for n in (1, 64, 65, 128, 129)] == [1, 1, 2, 2, 2]
