"""The checkpoint on disk: names, shapes, dtypes and initial values, and that a reloaded model is the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM

from lol import LoLConfig, LoLForCausalLM, LoLModel
from lol.model.layers import DiagonalInjection

# Every size differs, so that no two axes can be confused.
V, D, HIDDEN, EXPERTS, DEPTHS = 13, 8, 20, 3, 5
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 2,
    "num_prelude_layers": 2,
    "num_coda_layers": 1,
    "num_experts": EXPERTS,
    "num_routed_depths": DEPTHS,
    "window_size": 4,
    "window_stride": 2,
}
BLOCK = {
    "attn_norm": (D,),
    "q_proj": (D, D),
    "k_proj": (D, D),
    "v_proj": (D, D),
    "o_proj": (D, D),
    "mlp_norm": (D,),
    "gate_proj": (HIDDEN, D),
    "up_proj": (HIDDEN, D),
    "down_proj": (D, HIDDEN),
}
FIXED = {
    "model.embed_tokens.weight": (V, D),
    **{f"model.prelude.{i}.{part}.weight": shape for i in range(2) for part, shape in BLOCK.items()},
    **{f"model.coda.0.{part}.weight": shape for part, shape in BLOCK.items()},
    **{f"model.library.{part}.weight": (EXPERTS, *shape) for part, shape in BLOCK.items()},
    "model.norm.weight": (D,),
    "lm_head.weight": (V, D),
}
ROUTED = {
    "model.router.weight": (EXPERTS, D),
    "model.router.bias": (EXPERTS,),
    "model.router.noise_weight": (EXPERTS, EXPERTS),
    "model.router.noise_bias": (EXPERTS,),
    "model.depth_embedding": (DEPTHS, D),
    "model.expert_bias": (EXPERTS,),
}
ALL_OPTIONS = {
    "tie_router": False,
    "balance_scope": "depth",
    "depth_film": True,
    "input_injection": "diagonal",
    "router_only_tokens": True,
}


def make(seed: int = 0, **options) -> LoLForCausalLM:
    """Every tensor random, the balancing bias too: initial values such as 0 would hide a tensor that was not loaded."""
    model = LoLForCausalLM(LoLConfig(**SIZES | options)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return model


def logits_of(model: LoLForCausalLM) -> Tensor:
    ids = torch.arange(22).remainder(V).view(2, 11)
    with torch.no_grad():
        return model(ids).logits


# --- Names and shapes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, FIXED | ROUTED),
        (
            {"tie_router": False},
            FIXED | {name: (DEPTHS, *shape) if ".router." in name else shape for name, shape in ROUTED.items()},
        ),
        ({"balance_scope": "depth"}, FIXED | ROUTED | {"model.expert_bias": (DEPTHS, EXPERTS)}),
        ({"routing": "fixed", "fixed_path": [0, 1, 2, 1, 0]}, FIXED),
        (
            {"depth_film": True},
            FIXED
            | ROUTED
            | {f"model.film.{part}_{kind}": (DEPTHS, D) for part in ("attn", "mlp") for kind in ("scale", "shift")},
        ),
        (
            {"input_injection": "diagonal"},
            FIXED | ROUTED | {f"model.injection.{name}": (D,) for name in ("delta", "log_decay", "input_scale")},
        ),
        ({"router_only_tokens": True}, FIXED | ROUTED | {"model.filler_embedding": (D,)}),
        (
            {"tie_word_embeddings": True},
            {name: shape for name, shape in (FIXED | ROUTED).items() if name != "lm_head.weight"},
        ),
    ],
    ids=["plain", "untied router", "bias per depth", "fixed", "film", "injection", "router-only", "tied embeddings"],
)
def test_the_tensors_of_a_checkpoint(tmp_path: Path, options: dict, expected: dict[str, tuple[int, ...]]):
    make(**options).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_lol.py",
    ]


# --- A reloaded model is the same model -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS, {"tie_word_embeddings": True}], ids=["plain", "all", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reloading_changes_no_bit(tmp_path: Path, options: dict, dtype: torch.dtype):
    model = make(**options).to(dtype)
    expected = logits_of(model)
    tensors = model.state_dict()
    for _ in range(5):
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert type(model) is LoLForCausalLM
        assert torch.equal(logits_of(model), expected)
        reloaded = model.state_dict()
        assert reloaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert reloaded[name].dtype == (torch.float32 if name == "model.expert_bias" else dtype), name
            assert torch.equal(reloaded[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_the_bias_keeps_its_bits_in_a_model_of_another_dtype(tmp_path: Path, dtype: torch.dtype | str):
    model = make()
    bias = model.model.expert_bias
    # The bits matter: bfloat16 does not hold these numbers.
    assert not torch.equal(bias.bfloat16().float(), bias)
    assert not torch.equal(bias.half().float(), bias)
    if dtype == "auto":
        model = model.bfloat16()
    model.save_pretrained(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["model.expert_bias"], bias)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.lm_head.weight.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    assert loaded.model.expert_bias.dtype == torch.float32
    assert torch.equal(loaded.model.expert_bias, bias)


def test_casting_leaves_the_bias_alone():
    model = make()
    bias = model.model.expert_bias.clone()
    for cast in (
        lambda module: module.to(torch.bfloat16),
        lambda module: module.half(),
        lambda module: module.double(),
        lambda module: module.float(),
        lambda module: module.bfloat16().to("cpu"),
    ):
        for module in (model, model.model):
            cast(module)
            assert model.model.expert_bias.dtype == torch.float32
            assert torch.equal(model.model.expert_bias, bias)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert dict(model.named_buffers())["model.expert_bias"] is model.model.expert_bias
    assert make().to("meta").model.expert_bias.device.type == "meta"


def test_the_base_model_loads_from_the_same_checkpoint(tmp_path: Path):
    model = make(**ALL_OPTIONS)
    model.save_pretrained(tmp_path)
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(base) is LoLModel
    assert info["missing_keys"] == set()
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(base.state_dict()[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_process_gets_the_same_bits(tmp_path: Path, dtype: str):
    model = make(**ALL_OPTIONS).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    save_file({"logits": logits_of(model), "bias": model.model.expert_bias}, tmp_path / "expected.safetensors")
    program = """
import sys, torch, lol
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(sys.argv[3]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
expected = load_file(sys.argv[2])
with torch.no_grad():
    logits = model(torch.arange(22).remainder(13).view(2, 11)).logits
print(torch.equal(logits, expected["logits"]), logits.dtype)
print(torch.equal(model.model.expert_bias, expected["bias"]), model.model.expert_bias.dtype)
"""
    arguments = [str(tmp_path / "model"), str(tmp_path / "expected.safetensors"), str(torch.get_num_threads())]
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == [f"True torch.{dtype}", "True torch.float32"]


# --- Initial values -------------------------------------------------------------------------------------------------


def large(**options) -> LoLForCausalLM:
    """Large enough that a standard deviation can be told."""
    sizes = SIZES | {"hidden_size": 64, "vocab_size": 500, "intermediate_size": 96, "num_routed_depths": 13}
    torch.manual_seed(0)
    return LoLForCausalLM(LoLConfig(**sizes | options))


@pytest.mark.parametrize("std", [0.02, 0.3])
def test_initial_values(std: float):
    model = large(**ALL_OPTIONS, initializer_range=std)
    # 2 (P + D + C) = 2 (2 + 13 + 1).
    smaller = std / 32**0.5
    zeros = ("model.router.bias", "noise_weight", "noise_bias", "expert_bias", "_scale", "_shift", "log_decay")
    for name, tensor in model.state_dict().items():
        if name == "model.injection.input_scale" or "norm" in name:
            assert (tensor == 1).all(), name
        elif name.endswith(zeros):
            assert (tensor == 0).all(), name
        elif name == "model.injection.delta":
            assert_close(tensor, torch.full_like(tensor, DiagonalInjection.START_DELTA))
        else:
            expected = smaller if "o_proj" in name or "down_proj" in name else std
            # Four standard errors of a sample's standard deviation and mean.
            assert abs(tensor.std().item() / expected - 1) < 4 / (2 * tensor.numel()) ** 0.5, name
            assert abs(tensor.mean().item()) < 4 * expected / tensor.numel() ** 0.5, name


def test_every_block_starts_different():
    weight = large().model.library.q_proj.weight
    assert not torch.equal(weight[0], weight[1])


def test_tied_embeddings_are_one_tensor():
    model = large(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert large().lm_head.weight is not None
    assert not torch.equal(large().lm_head.weight, large().model.embed_tokens.weight)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nothing was written to reads as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.prelude.1.attn_norm.weight",
        "model.coda.0.down_proj.weight",
        "model.library.q_proj.weight",
        "model.library.o_proj.weight",
        "model.library.mlp_norm.weight",
        *ROUTED,
        "model.filler_embedding",
        "model.film.attn_scale",
        "model.injection.delta",
        "model.injection.input_scale",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_a_tensor_that_a_checkpoint_lacks_gets_its_initial_value(tmp_path: Path, name: str):
    """And those that it holds keep what was loaded."""
    make(**ALL_OPTIONS).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {name}
    loaded = model.state_dict()
    fresh = loaded.pop(name)
    if "norm" in name or name.endswith("input_scale"):
        assert (fresh == 1).all()
    elif name.endswith(("router.bias", "noise_weight", "noise_bias", "expert_bias", "attn_scale")):
        assert (fresh == 0).all()
    elif name.endswith("delta"):
        assert_close(fresh, torch.full_like(fresh, DiagonalInjection.START_DELTA))
    else:
        assert 0 < fresh.abs().max() < 0.02 * 6
    assert loaded.keys() == tensors.keys()
    for other, tensor in loaded.items():
        assert torch.equal(tensor, tensors[other]), other


def test_loading_leaves_no_tensor_uninitialised(tmp_path: Path):
    model = make(**ALL_OPTIONS)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == set()
    assert info["unexpected_keys"] == set()
    assert info["mismatched_keys"] == set()
    held = {name for name, _ in [*loaded.named_parameters(), *loaded.named_buffers()]}
    assert held == loaded.state_dict().keys()
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in loaded.parameters())
