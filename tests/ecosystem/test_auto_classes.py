"""Save and load through transformers' Auto classes, after `import lol`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from ecosystem_cases import build_model, differing, some_ids, tensors_of
from lol import LoLConfig, LoLForCausalLM, LoLModel
from lol.train.loading import find_checkpoint


def test_every_auto_class_opens_a_checkpoint_of_a_run(trained: Path):
    folder = find_checkpoint(trained)
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModel.from_pretrained(folder)
    assert (type(config), type(model), type(base)) == (LoLConfig, LoLForCausalLM, LoLModel)
    assert differing(base, tensors_of(model.model)) == []
    text = "library of layers"
    batch = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True) == text
    assert int(batch["input_ids"].max()) < config.vocab_size
    with torch.no_grad():
        assert torch.equal(base(**batch).last_hidden_state, model.model(**batch).last_hidden_state)


def test_models_are_made_from_a_config():
    config = build_model().config
    assert type(AutoModelForCausalLM.from_config(config)) is LoLForCausalLM
    assert type(AutoModel.from_config(config)) is LoLModel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_reloads_change_no_bit(tmp_path: Path, dtype: str):
    model = build_model(depth_film=True, input_injection="diagonal").to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    held = tensors_of(model)
    with torch.no_grad():
        logits = model(some_ids()).logits
    for _ in range(20):
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert differing(model, held) == []
        assert model.model.expert_bias.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model(some_ids()).logits, logits)


def test_a_saved_model_names_only_its_own_file_of_code(tmp_path: Path):
    """Also one that came from a hub repository, and one whose class a user has derived and registered."""
    model = build_model()
    model.config.auto_map = {
        "AutoConfig": "someone/model--modeling_lol.LoLConfig",
        "AutoModelForSequenceClassification": "their_head.Head",
    }
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).auto_map == {
        "AutoConfig": "modeling_lol.LoLConfig",
        "AutoModel": "modeling_lol.LoLModel",
        "AutoModelForCausalLM": "modeling_lol.LoLForCausalLM",
        "AutoModelForSequenceClassification": "their_head.Head",
    }
    assert [path.name for path in tmp_path.glob("*.py")] == ["modeling_lol.py"]


def test_registering_for_auto_classes_copies_no_source_of_ours_but_that_of_a_users_class(tmp_path: Path):
    class Derived(LoLForCausalLM):
        pass

    LoLConfig.register_for_auto_class()
    LoLForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    build_model().save_pretrained(tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").glob("*.py")] == ["modeling_lol.py"]

    Derived.register_for_auto_class("AutoModelForCausalLM")
    Derived(build_model().config).save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "theirs" / Path(__file__).name).exists()
    saved = AutoConfig.from_pretrained(tmp_path / "theirs").auto_map
    assert saved["AutoModelForCausalLM"] == "test_auto_classes.Derived"
    assert saved["AutoModel"] == "modeling_lol.LoLModel"
