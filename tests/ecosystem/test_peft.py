"""PEFT: LoRA on the router, on the library's stacked weights, and on prelude and coda."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import TrainerControl, TrainerState, TrainingArguments

from ecosystem_cases import build_model, differing, packed_row, some_ids, tensors_of
from lol import UserError, force_path, record_paths
from lol.data.collate import collate_packed
from lol.train.callback import BalanceCallback
from lol.train.config import BalanceConfig

pytestmark = pytest.mark.filterwarnings(
    # PEFT 0.21 asks a model by transformers' old name.
    "ignore:.*is_activation_checkpointing:FutureWarning",
)
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LIBRARY = [f"library.{part}.weight" for part in PARTS]
ROUTER = ["router.weight", "router.noise_weight"]
CONFIGS = {
    "router": LoraConfig(r=2, target_parameters=ROUTER),
    "library": LoraConfig(r=2, target_parameters=LIBRARY),
    "norms too": LoraConfig(r=2, target_parameters=[*LIBRARY, "library.attn_norm.weight"]),
    "everything": LoraConfig(
        r=2, target_parameters=[*ROUTER, *LIBRARY], target_modules=r".*\.(prelude|coda)\.\d+\.\w+_proj"
    ),
    "whole router": LoraConfig(r=2, target_parameters=LIBRARY, modules_to_save=["router"]),
}
BATCH = collate_packed([packed_row(seed) for seed in (0, 1)])


def adapt(name: str, **changes) -> tuple[nn.Module, PeftModel]:
    base = build_model(**changes)
    torch.manual_seed(1)
    return base, get_peft_model(base, CONFIGS[name])


def train_a_little(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    model.train()
    for _ in range(steps):
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**{name: BATCH[name] for name in ("input_ids", "position_ids")}).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_adapter_learns_and_it_is_saved_and_merged(tmp_path: Path, name: str):
    base, model = adapt(name)
    before, plain = tensors_of(model), logits_of(base)
    assert torch.equal(logits_of(model), plain)  # B starts at zero

    train_a_little(model)
    changed = set(differing(model, before))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert changed == trained
    assert all(".lora_" in name or "modules_to_save" in name for name in trained)
    adapted = logits_of(model)
    assert (adapted - plain).abs().max() > 1e-2
    with model.disable_adapter():
        assert torch.equal(logits_of(model), plain)

    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build_model(), tmp_path).eval()
    assert torch.equal(logits_of(again), adapted)

    merged = again.merge_and_unload()
    assert tensors_of(merged).keys() == tensors_of(build_model()).keys()
    assert_close(logits_of(merged), adapted, atol=1e-5, rtol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert_close(logits_of(type(merged).from_pretrained(tmp_path / "merged")), adapted, atol=1e-5, rtol=1e-5)


def test_every_block_has_an_adapter_of_its_own():
    """A step on a path of one block teaches that block alone."""
    _, model = adapt("library")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model.train()(**BATCH, path=[1, 1, 1, 1]).loss.backward()
    optimizer.step()
    merged = model.merge_and_unload().model.library
    plain = build_model().model.library
    for part in PARTS:
        moved = (getattr(merged, part).weight - getattr(plain, part).weight).abs().amax((1, 2))
        assert moved[1] > 0, part
        assert moved[0] == moved[2] == 0, part


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tie_router": False}], ids=["one router", "a router per depth"])
def test_decoding_with_the_cache_is_decoding_without(options: dict):
    _, model = adapt("everything", **options)
    train_a_little(model)
    ids = some_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    texts = [
        model.generate(**given, use_cache=cached, output_logits=True, return_dict_in_generate=True)
        for cached in (True, False)
    ]
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    assert_close(torch.stack(texts[0].logits), torch.stack(texts[1].logits), atol=1e-5, rtol=0)
    assert not torch.equal(texts[0].sequences, build_model(**options).generate(**given))


@pytest.mark.parametrize("name", ["router", "whole router", "library"])
def test_paths_are_forced_and_recorded_through_an_adapter(name: str):
    _, model = adapt(name)
    train_a_little(model)
    path = [2, 0, 1, 0]
    with torch.no_grad():
        expected = model(**BATCH, path=path).logits
        with force_path(model, path):
            assert torch.equal(model(**BATCH).logits, expected)
            table = record_paths(model, [packed_row(0)])
    assert [table.expert[table.depth == depth].unique().tolist() for depth in range(4)] == [[2], [0], [1], [0]]


def test_the_bias_is_not_moved_under_an_adapter_that_would_not_save_it(tmp_path: Path):
    _, model = adapt("router")
    call = (TrainingArguments(output_dir=str(tmp_path), report_to="none"), TrainerState(), TrainerControl())
    with pytest.raises(UserError, match="strategy='aux_loss'"):
        BalanceCallback().on_train_begin(*call, model=model)
    BalanceCallback(BalanceConfig(strategy="aux_loss")).on_train_begin(*call, model=model)
