"""The command line: what every verb does, and how it answers a mistake."""

import dataclasses
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lol import cli
from lol.data.tokenizer import load_tokenizer, train_tokenizer
from lol.paths.record import record_paths
from lol.train.config import MODEL_FIELDS, TrainConfig
from lol.train.loading import load_model
from lol.train.metrics import read_metrics
from small_run import MODEL, environment, write_corpus

Run = tuple[int, str, str]
Lol = Callable[..., Run]

MODEL_FLAGS = [word for name, value in MODEL.items() for word in (f"--model.{name.replace('_', '-')}", str(value))]
FLAGS = [*MODEL_FLAGS, "--batch-size", "2", "--data.context-length", "32", "--eval.rows", "4", "--seed", "3"]
FLAGS += ["--data.document-chars", "40", "--data.held-out-fraction", "0.2", "--no-eval.ngrams"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "trained"
    assert cli.main(["train", "--run", str(run), "--data", str(corpus), "--steps", "2", *FLAGS]) == 0
    return run


@pytest.fixture(scope="module")
def model(trained: Path) -> Path:
    return trained / "checkpoints" / "step-00000002"


@pytest.fixture
def lol(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lol:
    """Run a command in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*args: object) -> Run:
        capsys.readouterr()
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as exit_:
            code = exit_.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


# --- from training to text and paths


def test_train_says_what_it_came_to(lol: Lol, corpus: Path, tmp_path: Path) -> None:
    code, out, err = lol("train", "--run", tmp_path / "run", "--data", corpus, "--steps", "1", *FLAGS, "--eval.ngrams")
    assert (code, err) == (0, "")
    summary = read_metrics(tmp_path / "run")[-1]
    assert out.splitlines()[-5:] == [
        "held-out loss, nats per token:",
        f"  this model  {summary['held_out_loss']:.3f}",
        f"  bigram      {summary['bigram_loss']:.3f}",
        f"  unigram     {summary['unigram_loss']:.3f}",
        f"busiest block: {100 * summary['busiest_block_share']:.0f} % of the held-out windows",
    ]


def test_the_short_flags(lol: Lol, corpus: Path, tmp_path: Path) -> None:
    flags = ["--recipe", "demo", "--steps", "2", "--seed", "5", "--checkpoint-every", "1", "--data", corpus]
    run = tmp_path / "run"
    code, _, err = lol("train", "--run", run, *FLAGS, *flags, "--model.num-experts", "5", "--optim.betas", "0.5", "0.6")
    assert (code, err) == (0, "")
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe"], config["steps"], config["seed"], config["checkpoint_every"]) == ("demo", 2, 5, 1)
    assert config["data"]["source"] == str(corpus)
    assert config["model"]["num_experts"] == 5
    assert config["optim"]["betas"] == [0.5, 0.6]
    # What no flag changed is the recipe's.
    assert config["balance"]["rate"] == 0.01
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    saved = json.loads((run / "checkpoints" / names[0] / "config.json").read_text())
    assert (saved["num_experts"], saved["max_position_embeddings"]) == (5, 32)


def test_resume_continues_and_may_change_what_computes_nothing(lol: Lol, corpus: Path, tmp_path: Path) -> None:
    command = ["train", "--run", tmp_path / "run", "--data", corpus, "--steps", "2", *FLAGS, "--checkpoint-every", "1"]
    assert lol(*command)[0] == 0
    assert "resumed at step 2" in lol(*command, "--resume", "--checkpoint-every", "0", "--eval.ngrams")[1]
    assert lol(*command, "--resume", "--steps", "3")[0] == 2


def test_generate_is_decided_by_its_seed(lol: Lol, trained: Path) -> None:
    command = ["generate", "--model", trained, "--prompt", "router of", "--max-new-tokens", "12"]
    code, text, err = lol(*command)
    assert (code, err) == (0, "")
    assert text.startswith("router of")
    assert len(text) > len("router of") + 5
    assert lol(*command)[1] == text
    assert lol(*command, "--seed", "1")[1] != text
    greedy = [lol(*command, "--temperature", "0", "--seed", seed)[1] for seed in (0, 1)]
    assert greedy[0] == greedy[1] != text


def test_a_forced_path_runs_and_minus_one_leaves_a_depth_free(
    lol: Lol, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    loaded, tokenizer = load_model(trained)
    loaded.model.register_forward_hook(lambda _module, _args, output: ran.append(output.routing.experts))
    monkeypatch.setattr("lol.train.loading.load_model", lambda _folder: (loaded, tokenizer))
    command = ["generate", "--model", trained, "--prompt", "router of", "--max-new-tokens", "20"]
    free = lol(*command)[1]
    ran.clear()
    code, forced, _ = lol(*command, "--path", "2", "-1", "0", "1")
    assert (code, len(ran)) == (0, 20)
    for experts in ran:
        for depth, block in ((0, 2), (2, 0), (3, 1)):
            assert set(experts[0, depth].tolist()) <= {block, -1}
            assert block in experts[0, depth]
    assert forced != free


def test_paths_show_prints_a_line_for_every_window(lol: Lol, trained: Path) -> None:
    text = "library of layers router depth"
    code, out, err = lol("paths", "show", "--model", trained, "--text", text)
    assert (code, err) == (0, "")
    loaded, tokenizer = load_model(trained)
    table = record_paths(loaded, [text], tokenizer)
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["depth", "window", "tokens", "block", "weight", "text"]
    assert [(int(line[0]), int(line[1]), line[2], int(line[3]), line[4]) for line in lines[1:]] == [
        (depth, window, f"{start}-{end - 1}", expert, f"{weight:.2f}")
        for depth, window, start, end, expert, weight in table[
            ["depth", "window", "start", "end", "expert", "weight"]
        ].itertuples(index=False)
    ]
    assert len(table) >= 4 * 2
    assert "<|bos|>library" in out


def test_paths_report_writes_the_file_it_names(lol: Lol, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "there.html"
    code, shown, err = lol("paths", "report", "--run", trained, "--out", out, "--documents", "1")
    assert (code, shown, err) == (0, f"written: {out}\n", "")
    page = out.read_text()
    assert "trained: a library of 3 blocks" in page
    assert not (trained / "report.html").exists()


def test_a_tokenizer_is_trained_and_trained_with(lol: Lol, corpus: Path, tmp_path: Path) -> None:
    folder, run = tmp_path / "tokenizer", tmp_path / "run"
    code, out, err = lol("tokenizer", "--data", corpus, "--vocab-size", "265", "--out", folder)
    assert (code, out, err) == (0, f"written: {folder} (265 tokens)\n", "")
    flags = ["--steps", "1", *FLAGS, "--data.tokenizer", folder]
    assert lol("train", "--run", run, "--data", corpus, *flags)[0] == 0
    checkpoint = run / "checkpoints" / "step-00000001"
    assert json.loads((checkpoint / "config.json").read_text())["vocab_size"] == 265
    text = "library of layers"
    assert load_tokenizer(checkpoint)(text)["input_ids"] == load_tokenizer(folder)(text)["input_ids"]
    code, _, err = lol("tokenizer", "--data", corpus, "--out", folder)
    assert (code, err) == (2, f"lol: {folder} exists already: name a new folder as --out\n")


# --- help


def test_the_help_fits_a_screen_and_names_every_verb(lol: Lol) -> None:
    code, out, _ = lol("--help")
    assert code == 0
    assert lol() == (0, out, "")
    lines = out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for words in cli.VERBS:
        assert any(line.startswith(f"  {' '.join(words)} ") for line in lines)


class _Read(Exception):
    """The flags were read; nothing is run."""


@pytest.mark.parametrize("example", [line.strip() for line in cli.USAGE.splitlines() if line.strip().startswith("lol ")])
def test_every_example_of_the_help_is_read(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _read(example, monkeypatch)


@pytest.mark.parametrize("command", [cli.Train, cli.Generate, cli.PathsShow, cli.PathsReport, cli.TrainTokenizer])
def test_every_example_of_a_verb_is_read(command: type, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [line.strip().removeprefix("Example: ") for line in command.__doc__.splitlines() if "Example: " in line]
    assert len(examples) == 1
    assert isinstance(_read(examples[0], monkeypatch), command)


def _read(example: str, monkeypatch: pytest.MonkeyPatch) -> object:
    read, parse = [], cli._parse

    def parse_only(*args: object, **rest: object) -> None:
        read.append(parse(*args, **rest))
        raise _Read

    monkeypatch.setattr(cli, "_parse", parse_only)
    with pytest.raises(_Read):
        cli.main(shlex.split(example)[1:])
    return read[0]


def test_every_field_of_a_run_has_a_flag(lol: Lol) -> None:
    code, out, _ = lol("train", "--help")
    assert code == 0
    flags = {word.strip(",") for word in out.split() if word.startswith("--")}
    config = TrainConfig()
    for item in dataclasses.fields(config):
        section = getattr(config, item.name)
        below = MODEL_FIELDS if item.name == "model" else []
        if dataclasses.is_dataclass(section) and item.name != "model":
            below = [field.name for field in dataclasses.fields(section)]
        for name in [f"{item.name}.{field}" for field in below] or [item.name]:
            assert f"--{name.replace('_', '-')}" in flags
    assert {"--run", "--resume", "--data"} <= flags
    # No field of transformers' own, and every one of ours is explained.
    assert "--model.dtype" not in flags
    assert "blocks stored in the library" in out


@pytest.mark.parametrize("words", cli.VERBS)
def test_every_verb_has_help(lol: Lol, words: tuple[str, ...]) -> None:
    code, out, err = lol(*words, "--help")
    assert (code, err) == (0, "")
    assert f"usage: lol {' '.join(words)}" in out


# --- mistakes


def assert_refused(answer: Run, *messages: str) -> None:
    """Exit code 2 and one clear message."""
    code, _, err = answer
    assert code == 2
    for message in messages:
        assert message in err
    assert "Traceback" not in err
    assert err.count("lol: ") + err.count("─ ") >= 1


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
        (["--recipe", "cake"], ["there is no recipe 'cake': choose one of demo"]),
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
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
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


def test_a_run_whose_checkpoints_are_damaged(lol: Lol, corpus: Path, trained: Path, tmp_path: Path) -> None:
    command = ["train", "--run", tmp_path / "run", "--data", corpus, "--steps", "2", *FLAGS, "--checkpoint-every", "1"]
    assert lol(*command)[0] == 0
    older, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes()[:500])
    code, out, err = lol("generate", "--model", tmp_path / "run", "--prompt", "router", "--max-new-tokens", "2")
    assert code == 0
    assert "step-00000002 is damaged and is passed over: model.safetensors has 500 bytes" in err
    assert out.startswith("router")
    (older / "model.safetensors").unlink()
    assert_refused(lol("generate", "--model", tmp_path / "run"), "holds no whole checkpoint")
    assert_refused(lol(*command, "--resume"), "no checkpoint of", "is whole")


def test_a_tokenizer_that_is_larger_than_the_model(lol: Lol, model: Path, tmp_path: Path) -> None:
    folder = copy(model, tmp_path / "model")
    train_tokenizer(["zebra zebra zebra quagga quagga"] * 9, 290).save_pretrained(folder)
    answer = lol("generate", "--model", folder, "--prompt", "zebra quagga")
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
    assert_refused(lol(*report, trained, "--out", tmp_path / "no" / "such.html"), "such.html: No such file")
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


def test_ctrl_c_ends_in_one_line(lol: Lol, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, tokenizer = load_model(trained)

    def interrupt(_module: torch.nn.Module, _args: tuple) -> None:
        signal.raise_signal(signal.SIGINT)

    loaded.register_forward_pre_hook(interrupt)
    monkeypatch.setattr("lol.train.loading.load_model", lambda _folder: (loaded, tokenizer))
    code, _, err = lol("generate", "--model", trained, "--prompt", "a")
    assert (code, err) == (130, "lol: interrupted\n")


# --- as a program


def start(*args: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lol", *map(str, args)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_module_is_the_program(lol: Lol, trained: Path) -> None:
    command = ["generate", "--model", trained, "--prompt", "router of", "--max-new-tokens", "5"]
    child = start(*command)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out, err) == lol(*command)
    script = Path(sys.executable).with_name("lol")
    if script.exists():
        assert "from lol.cli import main" in script.read_text()


@pytest.mark.slow
def test_a_mistake_ends_the_program_with_2(tmp_path: Path) -> None:
    child = start("train", "--run", tmp_path / "run", "--data", tmp_path / "missing.txt")
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (2, "")
    assert err.startswith("lol: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["generate", "paths show"])
def test_a_reader_that_leaves_is_no_error(trained: Path, verb: str) -> None:
    """`lol … | head -1`: the pipe is closed after a line, while there is more to write."""
    text = "router of layers " * 300
    rest = ["--prompt", text, "--max-new-tokens", "3"] if verb == "generate" else ["--text", text]
    child = start(*verb.split(), "--model", trained, *rest)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    assert (child.wait(timeout=120), err) == (0, "")


@pytest.mark.slow
def test_ctrl_c_while_a_run_is_prepared(corpus: Path, tmp_path: Path) -> None:
    """Before the first step there is nothing to save, and the folder is left to the next try."""
    run = tmp_path / "run"
    child = start("train", "--run", run, "--data", "stdlib", "--model.vocab-size", "8000", "--steps", "1")
    until = time.monotonic() + 60
    while not (run / "config.json").exists() and child.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out, err) == (130, "", "lol: interrupted\n")
    assert not (run / "config.json").exists()
