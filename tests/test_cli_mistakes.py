"""What the command line says to a mistake: exit code 2 and one clear message that names the fix, never a traceback."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lol.data.tokenizer import train_tokenizer
from lol.train.checkpoint import MANIFEST
from lol.train.loading import load_model
from small_run import FLAGS, Lol


@pytest.fixture(scope="module")
def model(trained: Path) -> Path:
    return trained / "checkpoints" / "step-00000002"


def copy(folder: Path, to: Path) -> Path:
    """A checkpoint to be changed, so without the manifest that would tell."""
    to.mkdir()
    for file in folder.iterdir():
        if file.name == MANIFEST:
            continue
        (to / file.name).write_bytes(file.read_bytes())
    return to


def assert_refused(answer: tuple[int, str, str], *messages: str) -> None:
    """Exit code 2 and one clear message."""
    code, _, err = answer
    assert code == 2
    for message in messages:
        assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--model.window-size", "0"], ["window_size must be at least 1, not 0"]),
        (["--model.window-stride", "9"], ["window_stride=9 is larger than window_size=8", "at most 8"]),
        (["--model.num-attention-heads", "5"], ["num_attention_heads=5 does not divide hidden_size=16", "[1, 2, 4"]),
        (["--model.routing", "fixed"], ["routing='fixed' needs fixed_path, a list of 4"]),
        (["--model.routing", "fixed", "--model.fixed-path", "0", "1", "2", "3"], ["names block 3", "0 to 2"]),
        (["--model.routing", "fixed", "--model.fixed-path", "0", "1"], ["fixed_path has 2 blocks", "one block per"]),
        (["--model.routing", "frog"], ["frog", "learned"]),
        (["--model.vocab-size", "100"], ["vocabulary size is 100", "at least 259"]),
        (["--steps", "0"], ["steps must be at least 1, not 0"]),
        (["--steps", "many"], ["many"]),
        (["--growth.initial-depth", "9"], ["growth.initial_depth=9", "1 to 4"]),
        (["--data.context-length", "1"], ["context length is 1", "at least 2"]),
        (["--data.context-length", "100000"], ["do not fill one row", "shorten the context"]),
        (["--data.held-out-fraction", "0"], ["held-out fraction is 0.0", "between 0 and 1"]),
        (["--data.tokenizer", "nowhere"], ["nowhere: no such folder", "lol tokenizer"]),
        (["--recipe", "cake"], ["there is no recipe 'cake': `lol recipe list` shows"]),
        (["--recipe", "math1b"], ["there is no recipe 'math1b': did you mean math-1b?"]),
        (["--model.frogs", "3"], ["--model.frogs"]),
        (["--resume"], ["holds no run to continue; drop --resume"]),
    ],
)
def test_train_refuses(lol: Lol, corpus: Path, tmp_path: Path, flags: list[str], messages: list[str]) -> None:
    run = tmp_path / "run"
    assert_refused(lol("train", "--run", run, "--data", corpus, "--steps", "1", *FLAGS, *flags), *messages)
    assert not (run / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no such file or folder"),
        ("empty.txt", b"", "there is no text in it"),
        ("blank.txt", b"\n \n\n", "there is no text in it"),
        ("binary.txt", b"\0\1\2\3", "zero byte"),
        ("latin.txt", b"caf\xe9 \xff\xfe", "not UTF-8"),
        ("rows.jsonl", b'{"txet": "a"}\n', "there is no column 'text'"),
        ("broken.jsonl", b"{\n", "line 1: not JSON"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "tokenizer"])
def test_data_that_cannot_be_read(
    lol: Lol, tmp_path: Path, verb: str, name: str, content: bytes | None, message: str
) -> None:
    source = tmp_path / name
    if content is not None:
        source.write_bytes(content)
    rest = ["--run", tmp_path / "run", *FLAGS] if verb == "train" else ["--out", tmp_path / "tokenizer"]
    assert_refused(lol(verb, "--data", source, *rest), name, message)
    assert not (tmp_path / "run" / "config.json").exists()
    assert not (tmp_path / "tokenizer").exists()


def test_a_run_folder_is_not_overwritten_and_not_continued_as_another(lol: Lol, corpus: Path, trained: Path) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    command = ["train", "--run", trained, "--data", corpus, "--steps", "2", *FLAGS]
    assert_refused(lol(*command), "already holds a run; pass --resume to continue it, or another --run")
    answer = lol(*command, "--resume", "--model.window-stride", "2")
    assert_refused(answer, "  model.window_stride: 4 in the run, 2 now")
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--path", "0", "1", "2", "3"], "path names block 3, but the library holds blocks 0 to 2"),
        (["--path", "0", "1", "2", "-2"], "path names block -2"),
        (["--path", "0", "1", "2"], "path has 3 depths, but 4 are run: give one block per depth"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-k", "0"], "top_k must be at least 1"),
        (["--seed", "99999999999999999999"], "seed must be from 0 to 2^63 - 1"),
        (["--top-p", "2"], "top_p must be from 0 to 1"),
    ],
)
def test_generate_refuses_before_it_writes(lol: Lol, trained: Path, flags: list[str], message: str) -> None:
    answer = lol("generate", "--model", trained, "--prompt", "router", *flags)
    assert_refused(answer, message)
    assert answer[1] == ""


def test_folders_that_hold_no_usable_model(lol: Lol, model: Path, tmp_path: Path) -> None:
    def refused(folder: Path, *messages: str) -> None:
        for command in (["generate", "--model", folder], ["paths", "show", "--model", folder, "--text", "a"]):
            assert_refused(lol(*command), *messages)

    refused(tmp_path / "nowhere", "there is no such folder", "lol train --recipe demo")
    (tmp_path / "bare").mkdir()
    refused(tmp_path / "bare", "holds no model: give a run folder")

    llama = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "llama")
    refused(tmp_path / "llama", "holds a model of type 'llama'", "trained with lol")

    cut = copy(model, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    refused(cut, "cut cannot be loaded", "use another checkpoint")

    other = copy(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_experts": 7}))
    refused(other, "cannot be loaded", "use another checkpoint")
    (other / "config.json").write_text(json.dumps(config | {"num_prelude_layers": 2}))
    refused(other, "do not fit its config.json, for example model.prelude.1.")
    (other / "config.json").write_text(json.dumps(config | {"window_size": 0}))
    refused(other, "window_size must be at least 1, not 0")
    for broken in ("{", "[]"):
        (other / "config.json").write_text(broken)
        refused(other, "config.json", "give the folder of a model")

    mute = copy(model, tmp_path / "mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (mute / name).unlink()
    refused(mute, "mute: no tokenizer can be loaded from it", "tokenizer.json")


def test_a_run_whose_checkpoints_are_damaged(lol: Lol, corpus: Path, tmp_path: Path) -> None:
    command = ["train", "--run", tmp_path / "run", "--data", corpus, "--steps", "2", *FLAGS, "--checkpoint-every", "1"]
    assert lol(*command)[0] == 0
    older, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:500])
    code, out, err = lol("generate", "--model", tmp_path / "run", "--prompt", "router", "--max-new-tokens", "2")
    assert code == 0
    assert "step-00000002 is damaged and is passed over: model.safetensors has 500 bytes" in err
    assert out.startswith("router")
    (older / "model.safetensors").unlink()
    assert_refused(
        lol("generate", "--model", newest, "--prompt", "router"), "is damaged: model.safetensors has 500 bytes"
    )
    assert_refused(lol("generate", "--model", tmp_path / "run"), "holds no whole checkpoint")
    assert_refused(lol(*command, "--resume"), "no checkpoint of", "is whole")


def test_a_tokenizer_that_is_larger_than_the_model(lol: Lol, model: Path, tmp_path: Path) -> None:
    folder = copy(model, tmp_path / "model")
    train_tokenizer(["zebra quagga okapi aardvark pangolin"] * 9, 290).save_pretrained(folder)
    answer = lol("generate", "--model", folder, "--prompt", "zebra quagga okapi aardvark pangolin")
    assert_refused(answer, "is outside of the vocabulary (0 to 279)", "another tokenizer than the model's")


def test_a_tokenizer_that_leaves_ids_out_trains(lol: Lol, corpus: Path, tmp_path: Path) -> None:
    trained = train_tokenizer(["router of layers"] * 9, 262)
    backend = json.loads(trained.backend_tokenizer.to_str())
    backend["model"]["vocab"] = {token: id_ + 20 * (id_ > 10) for token, id_ in backend["model"]["vocab"].items()}
    (tmp_path / "gaps.json").write_text(json.dumps(backend))
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "gaps.json"), **special)
    tokenizer.save_pretrained(tmp_path / "gaps")
    assert max(tokenizer.get_vocab().values()) >= len(tokenizer) + 19
    run = tmp_path / "run"
    command = ["train", "--run", run, "--data", corpus, "--steps", "1", *FLAGS, "--data.tokenizer", tmp_path / "gaps"]
    assert lol(*command, "--eval.ngrams")[0] == 0
    assert load_model(run)[0].config.vocab_size == max(tokenizer.get_vocab().values()) + 1


def test_reports_that_cannot_be_written(lol: Lol, trained: Path, tmp_path: Path) -> None:
    report = ["paths", "report", "--documents", "1", "--run"]
    assert_refused(lol(*report, tmp_path), "holds no run: give the folder that lol train wrote")
    assert_refused(lol(*report, trained, "--out", tmp_path / "no" / "such.html"), "such.html: there is no folder")
    for content, message in (("{", "config.json is not JSON"), ('{"frogs": 3}', "another version of lol")):
        (tmp_path / "config.json").write_text(content)
        assert_refused(lol(*report, tmp_path), message)


@pytest.mark.parametrize(
    ("command", "messages"),
    [
        (["fly"], ["there is no verb 'fly'", "usage: lol VERB"]),
        (["paths"], ["there is no verb 'paths'", "paths show"]),
        (["paths", "hide"], ["there is no verb 'paths hide'"]),
        (["train"], ["--run"]),
        (["generate", "--modle", "x"], ["--modle"]),
        (["tokenizer", "--data", "x", "--out", "y", "--vocab-size", "frog"], ["frog"]),
    ],
)
def test_commands_that_do_not_exist(lol: Lol, command: list[str], messages: list[str]) -> None:
    assert_refused(lol(*command), *messages)
