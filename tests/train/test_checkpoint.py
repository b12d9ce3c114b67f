"""Checkpoints come back bit for bit, and whatever does not fit or is damaged is refused by name."""

import json
import logging
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_parts import make_model, make_optimizer, make_tokenizer, train_step
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

from lol.errors import UserError
from lol.train import checkpoint
from lol.train.checkpoint import checkpoint_step, load_checkpoint, newest_checkpoint, save_checkpoint
from lol.train.state import rng_state, set_rng_state


def save(run: Path, step: int, keep: int = 3, seed: int = 0) -> Path:
    model = make_model(seed)
    optimizer = make_optimizer(model)
    train_step(model, optimizer)
    return save_checkpoint(run, step, model, optimizer, {"tokens": 16 * step}, make_tokenizer(), keep)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def reseal(path: Path) -> None:
    """Make the sums right again, so that the reader itself meets the damage."""
    (path / "complete.json").unlink()
    checkpoint._seal(path)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    model, tokenizer = make_model(), make_tokenizer()
    optimizer = make_optimizer(model)
    for _ in range(3):
        train_step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.2
    path = save_checkpoint(tmp_path, 3, model, optimizer, {"rng": rng_state()}, tokenizer, keep=1)
    losses = [train_step(model, optimizer) for _ in range(3)]

    resumed = make_model(seed=1)
    other = make_optimizer(resumed, lr=5.0)
    train_step(resumed, other)
    weights = {name: tensor.data_ptr() for name, tensor in resumed.state_dict().items()}
    set_rng_state(load_checkpoint(path, resumed, other)["rng"])
    assert [train_step(resumed, other) for _ in range(3)] == losses
    assert weights == {name: tensor.data_ptr() for name, tensor in resumed.state_dict().items()}
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert other.state[ours].keys() == optimizer.state[theirs].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(other.state[ours][key], value), key
            assert other.state[ours][key].dtype == value.dtype
    for ours, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def test_a_checkpoint_is_a_transformers_folder(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    model = AutoModelForCausalLM.from_pretrained(path)
    expected = make_model(seed=1)
    load_checkpoint(path, expected, make_optimizer(expected))
    tokens = AutoTokenizer.from_pretrained(path)("badcab", return_tensors="pt")["input_ids"]
    assert tokens.shape == (1, 6)
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {(path / "config.json").stat().st_mode & 0o777}
    assert not {file.suffix for file in path.iterdir()} - {".json", ".safetensors"}


def test_moments_keep_a_dtype_that_is_not_their_weights_and_a_transposed_layout(tmp_path: Path) -> None:
    model = make_model().bfloat16()
    optimizer = make_optimizer(model)
    train_step(model, optimizer)
    parameter = model.model.layers[0].mlp.up_proj.weight
    fine = torch.randn(parameter.shape[1], parameter.shape[0]).T
    optimizer.state[parameter]["exp_avg"] = fine
    path = save_checkpoint(tmp_path, 1, model, optimizer, {}, make_tokenizer(), keep=1)
    resumed = make_model().bfloat16()
    other = make_optimizer(resumed)
    load_checkpoint(path, resumed, other)
    restored = other.state[resumed.model.layers[0].mlp.up_proj.weight]["exp_avg"]
    assert restored.dtype == torch.float32
    assert torch.equal(restored, fine)
    assert resumed.dtype == torch.bfloat16


def test_an_optimizer_that_has_not_stepped_comes_back_empty(tmp_path: Path) -> None:
    model = make_model()
    path = save_checkpoint(tmp_path, 0, model, make_optimizer(model), {}, make_tokenizer(), keep=1)
    other = make_optimizer(model)
    train_step(model, other)
    assert load_checkpoint(path, model, other) == {}
    assert not other.state


def test_the_newest_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (1, 2, 30):
        save(tmp_path, step, keep=2)
    (tmp_path / "checkpoints" / ".partial-step-00000031").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    newest = save(tmp_path, 100, keep=2)
    assert names(tmp_path) == ["notes", "step-00000030", "step-00000100"]
    assert newest_checkpoint(tmp_path) == newest
    assert checkpoint_step(newest) == 100
    with pytest.raises(UserError, match="not a checkpoint folder"):
        checkpoint_step(tmp_path)
    with pytest.raises(UserError, match="at least 1"):
        save(tmp_path, 101, keep=0)


def test_a_damaged_later_checkpoint_does_not_push_out_the_good_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    late = save(tmp_path, 9)
    with (late / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000005"]


def test_a_damaged_older_checkpoint_does_not_count_among_the_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "model.safetensors").write_bytes(b"")
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_whole_later_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000005", "step-00000009"]


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    path = save(tmp_path, 1, keep=1, seed=7)
    assert names(tmp_path) == ["step-00000001"]
    model = make_model()
    load_checkpoint(path, model, make_optimizer(model))
    expected = make_model(7)
    train_step(expected, make_optimizer(expected))
    assert torch.equal(model.model.norm.weight, expected.model.norm.weight)
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)


def test_a_replaced_checkpoint_counts_until_the_new_one_is_in_place(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    hidden = path.rename(path.with_name(".replaced-step-00000004"))
    assert newest_checkpoint(tmp_path) == hidden
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004"]


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damage_anywhere_is_found_named_and_passed_over(tmp_path: Path, damage: str) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    chance = random.Random(0)
    model = make_model()
    optimizer = make_optimizer(model)
    for file in sorted(bad.iterdir()):
        whole = file.read_bytes()
        for _ in range(4):
            at = chance.randrange(len(whole))
            # One bit, also in the manifest: there it breaks the JSON, a name, a size or a sum.
            cut = whole[:at] if damage == "truncate" else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
            file.write_bytes(cut)
            lines: list[str] = []
            newest = newest_checkpoint(tmp_path, lines.append)
            if file.name == "complete.json" and damage == "flip" and newest == bad:
                # The indentation and the format number carry nothing.
                assert json.loads(cut)["files"] == json.loads(whole)["files"]
                continue
            assert newest == good
            assert len(lines) == 1
            assert str(bad) in lines[0]
            # A damaged sum in the manifest accuses the file it is about.
            culprit = "" if file.name == "complete.json" else file.name
            assert culprit in lines[0]
            with pytest.raises(UserError, match=f"cannot be used: {culprit}"):
                load_checkpoint(bad, model, optimizer)
        file.write_bytes(whole)
    assert newest_checkpoint(tmp_path) == bad


def test_a_missing_file_is_named_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, 1)
    (path / "optimizer.safetensors").unlink()
    with caplog.at_level(logging.WARNING, logger="lol"):
        assert newest_checkpoint(tmp_path) is None
    assert "optimizer.safetensors" in caplog.text
    (path / "complete.json").unlink()
    model = make_model()
    for folder, message in ((path, "complete.json is missing"), (tmp_path / "none", "no such folder")):
        with pytest.raises(UserError, match=message):
            load_checkpoint(folder, model, make_optimizer(model))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.safetensors"])
def test_a_truncated_safetensors_with_right_sums_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    (path / name).write_bytes((path / name).read_bytes()[:-1])
    reseal(path)
    model = make_model()
    with pytest.raises(UserError, match=f"{name} is truncated"):
        load_checkpoint(path, model, make_optimizer(model))


def extra_layer() -> torch.nn.Module:
    model = make_model()
    model.model.extra = torch.nn.Linear(2, 2)
    return model


def lost_layer() -> torch.nn.Module:
    model = make_model()
    del model.model.norm.weight
    return model


def wide_norm() -> torch.nn.Module:
    model = make_model()
    model.model.norm.weight = torch.nn.Parameter(torch.zeros(9))
    return model


def mistral() -> torch.nn.Module:
    return MistralForCausalLM(
        MistralConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mistral, "type 'llama', this one is 'mistral'"),
        (lambda: make_model(rms_norm_eps=1e-3), "rms_norm_eps is 1e-06 in the checkpoint, 0.001 in this model"),
        (lambda: make_model(hidden_size=16), "hidden_size is 8 in the checkpoint, 16 in this model"),
        (extra_layer, r"model\.extra\.weight is in this model only"),
        (lost_layer, r"model\.norm\.weight is in the checkpoint only"),
        (wide_norm, r"model\.norm\.weight is float32\[8\] in the checkpoint, float32\[9\] in this model"),
        (lambda: make_model().bfloat16(), r"is float32\[16, 8\] in the checkpoint, bfloat16\[16, 8\] in this model"),
    ],
)
def test_another_architecture_is_named_and_changes_nothing(
    tmp_path: Path, make: Callable[[], torch.nn.Module], message: str
) -> None:
    path = save(tmp_path, 1)
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_checkpoint(path, model, make_optimizer(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_another_optimizer_is_named_and_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    model = make_model(seed=1)
    before = model.model.embed_tokens.weight.clone()
    swapped = make_optimizer(model)
    swapped.param_groups.reverse()
    for optimizer, message in (
        (torch.optim.SGD(model.parameters(), lr=1), "AdamW in the checkpoint, SGD in this run; 2 parameter groups"),
        (torch.optim.AdamW(model.parameters()), "2 parameter groups in the checkpoint, 1 here"),
        (swapped, r"parameter group 0 differs in model\."),
    ):
        with pytest.raises(UserError, match=message):
            load_checkpoint(path, model, optimizer)
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_a_foreign_parameter_in_the_optimizer_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(make_model().parameters())
    with pytest.raises(ValueError, match="not the model's"):
        save_checkpoint(tmp_path, 1, make_model(), optimizer, {}, make_tokenizer(), keep=1)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    training = json.loads((path / "training.json").read_bytes())
    (path / "training.json").write_text(json.dumps(training | {"format": 2}))
    reseal(path)
    model = make_model()
    with pytest.raises(UserError, match="update library-of-layers"):
        load_checkpoint(path, model, make_optimizer(model))


@pytest.mark.parametrize("limit", [0, 2_000, 12_000])
def test_a_failing_write_leaves_the_previous_checkpoint(tmp_path: Path, limit: int) -> None:
    good = save(tmp_path, 1, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The operating system refuses to let a file grow past the limit: the error of a full disk, at a moment we choose.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(UserError, match=r"step-00000002 could not be written .*MB") as caught:
            save(tmp_path, 2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == [good.name]
    assert newest_checkpoint(tmp_path) == good


def test_too_little_space_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(tmp_path, 1, keep=1)
    total = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: total._replace(free=5_000_000))
    with pytest.raises(UserError, match=r"too little free space.* needs about 17 MB and 5 MB are free"):
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == [good.name]


def test_saving_draws_no_bar_and_does_not_silence_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    written = capfd.readouterr()
    assert written.out + written.err == ""
    make_model().save_pretrained(tmp_path / "other")
    assert "Writing model shards" in capfd.readouterr().err
