"""The memory estimate: activations against what autograd saves, the rest by hand."""

import dataclasses

import pytest
import torch

from lol import LoLConfig, LoLForCausalLM
from lol.model import attention, layers
from lol.model.cost import count_parameters
from lol.train.config import DataConfig, GrowthConfig, TrainConfig
from lol.train.memory import kept_bytes, training_memory
from lol.train.recipes import recipe

ROWS = 2


@pytest.fixture(autouse=True)
def _attention_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """In bfloat16 where the products are; on a CPU it would be float32 and keep more."""
    for module in (layers, attention):
        monkeypatch.setattr(module, "float32_on_cpu", lambda attend, *heads: attend(*heads))


def measured_bytes(config: TrainConfig, rows: int = ROWS, *, bf16: bool = False) -> int:
    """Bytes that a forward pass keeps for its backward pass, weights not counted."""
    torch.manual_seed(0)
    model = LoLForCausalLM(config.model).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, config.model.vocab_size, (rows, config.data.context_length))
    growth = config.growth
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
    ):
        model(
            input_ids=ids,
            labels=ids,
            backprop_depth=growth.backprop_depth,
            first_window_full_backprop=growth.first_window_full_backprop,
        )
    return sum(storage.nbytes() for storage in storages.values())


def head_bytes(config: TrainConfig) -> int:
    """Of a token, what the last norm and the softmax keep."""
    return 12 * config.model.hidden_size + 4 * config.model.vocab_size


@pytest.mark.parametrize(
    "name",
    # Truncated backprop and injection; full attention; a sliding window; FiLM; a loop; experts, both.
    ["math-1b", "math-1b-dense", "math-1b-sliding", "huginn-360m-L4", "huginn-360m-4x4", "moe-360m", "moe-360m-moe"],
)
def test_activations_are_what_autograd_saves(name: str):
    config = recipe(f"{name}-tiny")
    tokens = ROWS * config.data.context_length
    estimate = tokens * (kept_bytes(config, 4) + head_bytes(config))
    assert estimate == pytest.approx(measured_bytes(config), rel=0.03)


def small(**model) -> TrainConfig:
    fields = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "num_experts": 3, "window_size": 32}
    fields |= {"num_prelude_layers": 1, "num_coda_layers": 1, "num_routed_depths": 2, "window_stride": 16}
    return TrainConfig(model=LoLConfig(**(fields | model)), data=DataConfig(context_length=256))


LAYERS, DEPTHS = "num_prelude_layers", "num_routed_depths"
FIXED = {"routing": "fixed", "core_attention": "full", "num_prelude_layers": 1}
# What is repeated, and in which model.
PARTS = {
    "layer": (LAYERS, {"num_routed_depths": 0}),
    "experts": (LAYERS, {"num_routed_depths": 0, "moe_num_experts": 3}),
    "routed depth": (DEPTHS, {}),
    "fixed depth": (DEPTHS, FIXED),
}


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("part", PARTS)
def test_every_part_by_itself(part: str, bf16: bool):
    """Two more of a part, of many rows, beside which the weights' copies in bfloat16 are small."""
    field, fields = PARTS[part]
    rows = 16

    def with_copies(number: int) -> TrainConfig:
        path = {"fixed_path": [depth % 3 for depth in range(number)]} if fields is FIXED else {}
        return small(**(fields | path | {field: number}))

    two, four = with_copies(2), with_copies(4)
    size = 2 if bf16 else 4
    estimate = rows * 256 * (kept_bytes(four, size) - kept_bytes(two, size))
    measured = measured_bytes(four, rows, bf16=bf16) - measured_bytes(two, rows, bf16=bf16)
    assert estimate == pytest.approx(measured, rel=0.03 if bf16 else 0.02)


def test_the_first_windows_add_their_share():
    config = small(num_routed_depths=6)
    whole = kept_bytes(config, 4)
    cut = dataclasses.replace(config, growth=GrowthConfig(backprop_depth=2))
    first = dataclasses.replace(config, growth=GrowthConfig(backprop_depth=2, first_window_full_backprop=True))
    depth = (whole - kept_bytes(cut, 4)) / 4
    # Four depths keep one window in eight.
    assert kept_bytes(first, 4) - kept_bytes(cut, 4) == pytest.approx(4 * depth * 32 / 256)
    # More depths than there are change nothing, and where a row is one window the first one is all of it.
    assert kept_bytes(dataclasses.replace(config, growth=GrowthConfig(backprop_depth=9)), 4) == whole
    full = small(num_routed_depths=6, core_attention="full")
    assert kept_bytes(dataclasses.replace(full, growth=first.growth), 4) == kept_bytes(full, 4)


def test_the_rest_by_hand():
    config = small()
    counts = count_parameters(config.model)
    total, library = counts.total, counts.parts["library"].stored
    layer = counts.parts["prelude"].stored

    alone = training_memory(config, 1, rows=3)
    assert (alone.weights, alone.gradients, alone.moments) == (4 * total, 4 * total, 8 * total)
    # Nothing is gathered; the blocks' own gradients lie beside their stack.
    assert alone.gathered == 4 * library
    assert alone.logits == 3 * 256 * 12 * (300 + 64)
    assert alone.activations == round(3 * 256 * kept_bytes(config, 4))
    assert alone.total == sum(dataclasses.asdict(alone).values())

    slices = training_memory(config, 8, rows=3)
    assert slices.weights == 4 * -(-total // 8)
    assert 2 * slices.weights == slices.moments
    # Prelude and coda are one layer each, so all weights are whole at once; the library's gradient twice.
    assert slices.gathered == 4 * total + 2 * 4 * library
    assert (slices.activations, slices.logits) == (alone.activations, alone.logits)
    # In bfloat16 the reduction takes float32.
    assert training_memory(config, 8, rows=3, bf16=True).gathered == 2 * total + (2 + 4) * library
    assert training_memory(config, 1, rows=3, bf16=True).gathered == 2 * total + 4 * library

    # Of more layers two are gathered at a time.
    deeper = small(num_prelude_layers=5, num_coda_layers=3)
    assert training_memory(deeper, 8, rows=3).gathered == slices.gathered
    without = small(num_prelude_layers=0, num_coda_layers=0)
    assert training_memory(without, 8, rows=3).gathered == slices.gathered - 2 * 4 * layer


def test_checkpointing_keeps_the_inputs_and_one_layer():
    config = small()
    full = kept_bytes(config, 4)
    layer = kept_bytes(small(num_prelude_layers=2, num_coda_layers=0, num_routed_depths=0), 4) / 2
    depth = (full - 2 * layer) / 2
    assert depth > layer
    assert kept_bytes(config, 4, checkpointing=True) == 4 * 4 * 64 + depth
    plain = training_memory(config, 8, rows=3)
    assert plain.activations > training_memory(config, 8, rows=3, checkpointing=True).activations


def test_muon_keeps_one_moment_of_its_matrices() -> None:
    config = recipe("demo")
    muon = dataclasses.replace(config, optim=dataclasses.replace(config.optim, name="muon"))
    model = LoLForCausalLM(config.model)
    matrices = sum(own.numel() for name, own in model.named_parameters() if "_proj." in name)
    one, other = (training_memory(run, 1, ROWS).moments for run in (config, muon))
    assert one - other == 4 * matrices > 0
