"""transformers' own tests of models and configurations, run on ours.

A test that is left out, because it skips itself or because it does not hold, is listed here and in
docs/transformers-suite.md with its reason. One that is listed and passes fails, and so does one that skips itself and
is not listed.
"""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers_suite import load_suite, suite_folder

from lol import LoLConfig, LoLForCausalLM, LoLModel

if not suite_folder().is_dir():
    pytest.skip(
        "transformers' own tests are not here: run python tests/ecosystem/fetch_transformers_tests.py",
        allow_module_level=True,
    )

common = load_suite("test_modeling_common")
configuration = load_suite("test_configuration_common")
training = load_suite("test_training_mixin")

# The suite reads the warning of the cache's old name itself.
pytestmark = pytest.mark.filterwarnings("always:`past_key_values` is deprecated:FutureWarning")

PER_TOKEN = "for experts that are chosen per token; ours are blocks, chosen per window"
CAPTURED = "outputs are returned by the layers, not captured by hooks"
ROTARY = "angles follow from rope_theta alone; there is no rotary module to configure"
COMPOSITE = "for models that are made of several models"
CONVERTED = "no checkpoint of another layout is converted on loading"

LEFT_OUT = {
    "test_attention_outputs": "attention weights are not returned",
    "test_attn_implementation_composite_models": COMPOSITE,
    "test_can_capture_specific_layers_hidden_states": CAPTURED,
    "test_can_load_from_already_mapped_keys": CONVERTED,
    "test_can_set_attention_dynamically_composite_model": COMPOSITE,
    "test_capture_outputs_decorator": CAPTURED,
    "test_eager_matches_batched_and_grouped_inference_0_fp16": PER_TOKEN,
    "test_eager_matches_batched_and_grouped_inference_1_fp32": PER_TOKEN,
    "test_eager_matches_batched_and_grouped_inference_2_bf16": PER_TOKEN,
    "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": "attention weights are not returned",
    "test_encoder_decoder_loss_no_double_shift": "for models with an encoder",
    "test_internal_model_config_and_subconfig_are_same": COMPOSITE,
    "test_model_rope_scaling_frequencies": ROTARY,
    "test_model_rope_scaling_from_config_0_linear": ROTARY,
    "test_model_rope_scaling_from_config_1_dynamic": ROTARY,
    "test_model_rope_scaling_from_config_2_yarn": ROTARY,
    "test_model_rope_with_partial_rotation": ROTARY,
    "test_moe_models_record_router_logits": PER_TOKEN,
    "test_num_layers_is_small": "the smallest model that has every part executes four layers, not two",
    "test_resize_position_vector_embeddings": "positions have no embeddings",
    "test_reverse_loading_mapping": CONVERTED,
    "test_sdpa_can_dispatch_composite_models": COMPOSITE,
    "test_sliding_window_mask": "for layers that slide; prelude and coda attend to everything",
    "test_tp_plan_matches_params": "there is no plan for tensor parallelism",
    "test_vision_axial_rope": "for images",
}
NOT_ON_A_CPU = {
    "an accelerator": (
        "test_can_load_with_device_context_manager",
        "test_can_load_with_global_device_set",
        "test_cpu_offload",
        "test_disk_offload_bin",
        "test_disk_offload_safetensors",
        "test_flash_attn_kernels_mps_inference_equivalence",
        "test_flex_attention_with_grads",
        "test_model_parallelism",
        "test_sdpa_can_compile_dynamic",
        "test_sdpa_can_dispatch_on_flash",
        "test_torch_compile_for_training",
    ),
    "Flash Attention or the kernels library": (
        "test_flash_attn_2_can_compile_with_attention_mask_None_without_graph_break",
        "test_flash_attn_2_can_dispatch_composite_models",
        "test_flash_attn_2_fp32_ln",
        "test_flash_attn_2_from_config",
        "test_flash_attn_2_inference_equivalence",
        "test_flash_attn_2_inference_equivalence_right_padding",
        "test_flash_attn_3_can_dispatch_composite_models",
        "test_flash_attn_3_from_config",
        "test_flash_attn_3_inference_equivalence",
        "test_flash_attn_3_inference_equivalence_right_padding",
        "test_flash_attn_4_can_dispatch_composite_models",
        "test_flash_attn_4_from_config",
        "test_flash_attn_4_inference_equivalence",
        "test_flash_attn_4_inference_equivalence_right_padding",
        "test_flash_attn_kernels_inference_equivalence",
        "test_kernels_can_load_without_crashing",
    ),
    "DeepSpeed": (
        "test_resize_embeddings_untied_with_deepspeed",
        "test_resize_embeddings_untied_with_deepspeed_multi_gpu",
        "test_resize_tokens_embeddings_with_deepspeed",
        "test_resize_tokens_embeddings_with_deepspeed_multi_gpu",
    ),
}
"""By what they need. Where it is there, they run."""

NEED = {name: need for need, names in NOT_ON_A_CPU.items() for name in names}


class SmallModels:
    """What the suite asks of the model under test: two windows and a half, at two depths with different borders."""

    base_model_class = LoLModel
    causal_lm_class = LoLForCausalLM
    is_training = True
    batch_size = 3
    seq_length = 10
    vocab_size = 99
    hidden_size = 32
    num_attention_heads = 4
    num_hidden_layers = 4

    def get_config(self) -> LoLConfig:
        return LoLConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=48,
            num_attention_heads=self.num_attention_heads,
            num_prelude_layers=1,
            num_coda_layers=1,
            num_experts=3,
            num_routed_depths=2,
            window_size=4,
            window_stride=2,
            depth_film=True,
            input_injection="diagonal",
            pad_token_id=0,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[LoLConfig, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(1, self.vocab_size, shape)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones(shape, dtype=torch.long)}


class LoLModelTest(
    common.ModelTesterMixin, training.TrainingTesterMixin, common.GenerationTesterMixin, unittest.TestCase
):
    """The suite. Its generation tests are not published: see `test_generation_properties.py`."""

    all_model_classes = (LoLModel, LoLForCausalLM)
    # The suite reads from the year of a file's licence whether to check this.
    test_can_init_all_missing_weights_before_2023 = True
    model_tester = SmallModels()
    # Models this small learn the batch by heart in a tenth of the suite's steps.
    training_overfit_steps = 40
    training_overfit_learning_rate = 1e-2

    @property
    def has_attentions(self) -> bool:
        """Whether the running test may ask for attention weights; the rest of these tests holds without them."""
        return self._testMethodName not in (
            "test_model_outputs_equivalence",
            "test_retain_grad_hidden_states_attentions",
        )

    def setUp(self) -> None:
        # Heads that score text are told from others by these names.
        for names, name in ((MODEL_MAPPING_NAMES, "LoLModel"), (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "LoLForCausalLM")):
            self.enterContext(mock.patch.dict(names, {"lol": name}))

    @contextmanager
    def subTest(self, *_: Any, **__: Any) -> Iterator[None]:
        """A part that fails or skips is the test that fails or skips: otherwise it would not be held to the list."""
        yield


def held_to_the_list(name: str, method: Callable[..., None]) -> Callable[..., None]:
    """The test, which has to be listed if and only if it does not pass."""

    def run(self: LoLModelTest) -> None:
        reason = LEFT_OUT.get(name)
        try:
            method(self)
        except unittest.SkipTest as skip:
            if reason is None:
                pytest.fail(f"skips itself and is not listed: {skip}")
        except Exception:
            if reason is None:
                raise
        else:
            if reason is not None:
                pytest.fail(f"is listed as left out ({reason}), and passes")
        if reason is not None:
            raise unittest.SkipTest(reason)

    return functools.update_wrapper(run, method, updated=())


def skipped_for_what_it_needs(method: Callable[..., None]) -> bool:
    return getattr(method, "__unittest_skip__", False)


TESTS = {name: getattr(LoLModelTest, name) for name in dir(LoLModelTest) if name.startswith("test_")}
TESTS = {name: method for name, method in TESTS.items() if callable(method)}
for _name, _method in TESTS.items():
    if not skipped_for_what_it_needs(_method):
        setattr(LoLModelTest, _name, held_to_the_list(_name, _method))


LoLModelTest.test_training_overfit = pytest.mark.slow(LoLModelTest.test_training_overfit)


class LoLConfigTest(unittest.TestCase):
    """The suite's checks of a configuration class."""

    def test_config(self) -> None:
        given = {"hidden_size": 32, "num_attention_heads": 4, "window_size": 16, "window_stride": 8, "depth_film": True}
        configuration.ConfigTester(self, config_class=LoLConfig, **given).run_common_tests()


def test_the_lists_name_tests_of_the_suite() -> None:
    assert set(LEFT_OUT) | set(NEED) <= set(TESTS)
    assert not set(LEFT_OUT) & set(NEED)


def test_what_the_suite_skips_here_is_listed() -> None:
    assert {name for name, method in TESTS.items() if skipped_for_what_it_needs(method)} <= set(NEED)


def test_the_documentation_has_the_lists() -> None:
    text = (Path(__file__).parents[2] / "docs" / "transformers-suite.md").read_text()
    rows = {
        cells[0].strip(" `"): cells[1].strip()
        for cells in (line.strip("|").split("|") for line in text.splitlines())
        if len(cells) == 2
    }
    assert {name: rows.get(name) for name in LEFT_OUT} == LEFT_OUT
    assert {name: rows.get(name) for name in NEED} == NEED
    assert {name for name in rows if name.startswith("test_")} == set(LEFT_OUT) | set(NEED)
