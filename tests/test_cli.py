"""The command line: what every verb does, its help, and how it ends when it is stopped."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lol import cli, flags
from lol.data.tokenizer import load_tokenizer
from lol.paths.record import record_paths
from lol.train.config import MODEL_FIELDS, TrainConfig
from lol.train.loading import load_model
from lol.train.metrics import read_metrics
from lol.train.recipes import recipe
from lol.verbs import VERBS, models, text
from small_run import FLAGS, Lol, environment

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
    assert config["balance"]["rate"] == recipe("demo").balance.rate != TrainConfig().balance.rate
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    saved = json.loads((run / "checkpoints" / names[0] / "config.json").read_text())
    assert (saved["num_experts"], saved["max_position_embeddings"]) == (5, 32)


def test_resume_continues_and_may_change_what_computes_nothing(lol: Lol, corpus: Path, tmp_path: Path) -> None:
    command = ["train", "--run", tmp_path / "run", "--data", corpus, "--steps", "2", *FLAGS, "--checkpoint-every", "1"]
    assert lol(*command)[0] == 0
    assert "resumed at step 2" in lol(*command, "--resume", "--checkpoint-every", "0", "--eval.ngrams")[1]
    assert lol(*command, "--resume", "--steps", "3")[0] == 2
    code, out, _ = lol("train", "--run", tmp_path / "run", "--resume")
    assert (code, "resumed at step 2" in out) == (0, True), "a resumed run knows its own flags"


def test_generate_is_decided_by_its_seed(lol: Lol, trained: Path) -> None:
    command = ["generate", "--model", trained, "--prompt", "router of", "--max-new-tokens", "8"]
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
    code, _, _ = lol(*command, "--path", "2", "-1", "0", "1")
    assert (code, len(ran)) == (0, 20)
    for experts in ran:
        for depth, block in ((0, 2), (2, 0), (3, 1)):
            assert set(experts[0, depth].tolist()) <= {block, -1}
            assert block in experts[0, depth]


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
    named = re.findall(r"^  (\w+)(?: ([\w|]+))? ", out, flags=re.MULTILINE)
    told = {tuple(filter(None, (first, second))) for first, seconds in named for second in seconds.split("|")}
    assert set(VERBS) <= told


class _Read(Exception):
    """The flags were read; nothing is run."""


@pytest.mark.parametrize(
    "command", [models.Train, text.Generate, text.PathsShow, text.PathsReport, models.Export, models.TrainTokenizer]
)
def test_every_example_of_a_verb_is_read(command: type, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [line.strip().removeprefix("Example: ") for line in command.__doc__.splitlines() if "Example: " in line]
    assert len(examples) == 1
    assert isinstance(_read(examples[0], monkeypatch), command)


def _read(example: str, monkeypatch: pytest.MonkeyPatch) -> object:
    read, parse = [], flags.parse

    def parse_only(*args: object, **rest: object) -> None:
        read.append(parse(*args, **rest))
        raise _Read

    monkeypatch.setattr(flags, "parse", parse_only)
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


@pytest.mark.parametrize("words", VERBS)
def test_every_verb_has_help(lol: Lol, words: tuple[str, ...]) -> None:
    code, out, err = lol(*words, "--help")
    assert (code, err) == (0, "")
    assert f"usage: lol {' '.join(words)}" in out


# --- stopped, and as a program


def test_ctrl_c_ends_in_one_line(lol: Lol, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, tokenizer = load_model(trained)

    def interrupt(_module: torch.nn.Module, _args: tuple) -> None:
        signal.raise_signal(signal.SIGINT)

    loaded.register_forward_pre_hook(interrupt)
    monkeypatch.setattr("lol.train.loading.load_model", lambda _folder: (loaded, tokenizer))
    code, _, err = lol("generate", "--model", trained, "--prompt", "a")
    assert (code, err) == (130, "lol: interrupted\n")


def start(*args: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lol", *map(str, args)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_module_is_the_program(lol: Lol, trained: Path) -> None:
    command = ["generate", "--model", trained, "--prompt", "router of", "--max-new-tokens", "5"]
    with start(*command) as child:
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out, err) == lol(*command)
    script = Path(sys.executable).with_name("lol")
    if script.exists():
        assert "from lol.cli import main" in script.read_text()


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(trained: Path) -> None:
    """`lol … | head -1`: the pipe is closed after a line, while there is more to write."""
    with start("paths", "show", "--model", trained, "--text", "router of layers " * 300) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        assert (child.stderr.read(), child.wait(timeout=120)) == ("", 0)


@pytest.mark.parametrize("args", [["generate"], ["train", "--help"], ["--help"]])
def test_a_reader_that_was_never_there(
    trained: Path, args: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--model", str(trained), "--prompt", "router", "--max-new-tokens", "3"] if args == ["generate"] else []
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main([*args, *more]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_ctrl_c_while_a_run_is_prepared(tmp_path: Path) -> None:
    """Before the first step there is nothing to save, and the folder is left to the next try."""
    run = tmp_path / "run"
    with start("train", "--run", run, "--data", "stdlib", "--model.vocab-size", "8000", "--steps", "1") as child:
        until = time.monotonic() + 60
        while not (run / "config.json").exists() and child.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out, err) == (130, "", "lol: interrupted\n")
    assert not (run / "config.json").exists()


@pytest.mark.parametrize("words", [("paths", "--help"), ("bench", "-h")])
def test_a_verb_in_two_words_helps_with_its_first(lol: Lol, words: tuple[str, ...]) -> None:
    code, out, _ = lol(*words)
    assert (code, out) == (0, cli.USAGE + "\n")


def test_an_argument_that_is_no_text_is_refused(lol: Lol, tmp_path: Path) -> None:
    code, _, err = lol("generate", "--model", tmp_path, "--prompt", "a\udcff")
    assert (code, "UTF-8" in err) == (2, True)
