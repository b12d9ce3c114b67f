"""A model leaves its run as a transformers folder, and a run starts from one."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lol.errors import UserError
from lol.train.loading import export_model, load_model
from lol.train.metrics import read_metrics
from lol.train.session import prepare
from lol.train.step import noise_generator
from lol.train.trainer import train
from small_run import Lol, saved_tensors, small_config

QUIET = {"router_noise_max": 0.0}


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("export") / "run"
    train(small_config(corpus, model=QUIET), run)
    return run


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    export_model(run, out)
    return out


def test_an_export_is_the_newest_checkpoint_without_training(run: Path, exported: Path) -> None:
    names = {file.name for file in (run / "checkpoints" / "step-00000008").iterdir()}
    of_training = {"optimizer.safetensors", "training.json", "training.safetensors", "complete.json"}
    assert {file.name for file in exported.iterdir()} == names - of_training
    expected, tokenizer = load_model(run)
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokens = AutoTokenizer.from_pretrained(exported)("library of layers", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [tokenizer("library of layers")["input_ids"]]
    assert torch.equal(model(tokens).logits, expected(tokens).logits)


def test_export_on_the_command_line(lol: Lol, run: Path, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    # Of what was exported, too.
    assert lol("export", "--model", exported, "--out", out) == (0, f"written: {out}\n", "")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        file.name: file.read_bytes() for file in exported.iterdir()
    }
    code, _, err = lol("export", "--model", run, "--out", out)
    assert (code, err) == (2, f"lol: {out} exists already: name a new folder as --out\n")


def test_an_export_that_fails_leaves_nothing(run: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, hard))
    try:
        with pytest.raises(UserError, match=r"out could not be written .* make room there"):
            export_model(run, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_run_starts_from_an_exported_model(corpus: Path, run: Path, exported: Path, tmp_path: Path) -> None:
    """Its first loss is that of the exported model on the first batch; the optimizer and the count begin anew."""
    config = small_config(
        corpus, model=QUIET, growth={"initial_depth": None}, accumulation=1, steps=1, init=str(exported)
    )
    train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init"] == str(exported)
    [record] = [record for record in read_metrics(tmp_path / "run") if record["event"] == "train"]
    model, _ = load_model(exported)
    batch = next(iter(prepare(config, tmp_path / "other", None).loader))
    loss = model.train()(**batch, labels=batch["input_ids"], generator=noise_generator(7, 0, 0, 0)).loss
    assert record["loss"] == pytest.approx(loss.item(), abs=1e-6)
    fresh = next(record["loss"] for record in read_metrics(run) if record["event"] == "train")
    assert abs(record["loss"] - fresh) > 0.1
    assert (record["step"], record["tokens"]) == (1, config.tokens_per_step)
    steps = [tensor for name, tensor in saved_tensors(tmp_path / "run", 1).items() if name.endswith(".step")]
    assert {step.item() for step in steps} == {1.0}


def test_weights_and_biases_and_tokenizer_are_the_folders(exported: Path, tmp_path: Path) -> None:
    """Of a longer context too, and saved in bfloat16; the sources have another tokenizer."""
    model, tokenizer = load_model(exported)
    model.bfloat16().save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"other words altogether, {number} of them" for number in range(400)))
    config = small_config(other, model=QUIET, data={"context_length": 40}, init=str(tmp_path / "half"))
    session = prepare(config, tmp_path / "run", None)
    assert session.tokenizer.get_vocab() == tokenizer.get_vocab()
    own = session.model.state_dict()
    assert own["model.expert_bias"].abs().max() > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(own[name], tensor.float()), name
    assert session.model.dtype == torch.float32


def test_what_a_run_cannot_start_from_is_refused(corpus: Path, exported: Path, tmp_path: Path) -> None:
    def refused(message: str, **changes: object) -> None:
        with pytest.raises(UserError, match=message):
            train(small_config(corpus, **({"model": QUIET, "init": str(exported)} | changes)), tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()

    refused("there is no such folder", init=str(tmp_path / "typo"))
    refused("num_experts is 3 in the checkpoint, 2 in this model", model=QUIET | {"num_experts": 2})
    tokenizer = tmp_path / "tokenizer"
    train(small_config(corpus, model={"vocab_size": 270}, steps=1), tmp_path / "small")
    shutil.copytree(tmp_path / "small" / "checkpoints" / "step-00000001", tokenizer)
    refused("has other tokens than the model in", data={"tokenizer": str(tokenizer)})
    empty = shutil.copytree(exported, tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    refused("empty holds no weights", init=str(empty))
