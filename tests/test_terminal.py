"""`lol generate` at the terminal: prompts from a pipe, conversations, and the path as it goes."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch

from lol import LoLForCausalLM, cli, terminal
from lol.generate import Window, generate_text
from lol.paths.colors import block_colors
from lol.paths.record import record_paths
from lol.train.loading import load_model
from pty_session import Session
from small_run import Lol

# A step of the model under the checks of types takes most of the time of these tests.
NEW = 5
FLAGS = ["--max-new-tokens", str(NEW), "--temperature", "0"]


class Keyboard(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def varied(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with a louder router, so that windows run different blocks."""
    folder = tmp_path_factory.mktemp("varied")
    model, tokenizer = load_model(trained)
    with torch.no_grad():
        model.model.router.weight.mul_(300)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def types(lol: Lol, monkeypatch: pytest.MonkeyPatch):
    """`types(model, text, *flags)` is `lol generate` with this text typed at its terminal."""

    def run(model: Path, text: str, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Keyboard(text))
        return lol("generate", "--model", model, *FLAGS, *flags)

    return run


def ids_written(model: LoLForCausalLM, ids: list[int], new: int = NEW, **options) -> list[int]:
    given = torch.tensor([ids])
    mask = torch.ones_like(given)
    options = {"do_sample": False, "max_new_tokens": new} | options
    return model.generate(given, attention_mask=mask, **options)[0].tolist()


# --- One prompt


@pytest.mark.parametrize(
    ("piped", "prompt"), [("router of", "router of"), ("a\nb\n", "a\nb"), ("a\n\n", "a\n"), ("", "")]
)
def test_a_pipe_is_one_prompt(lol: Lol, varied: Path, monkeypatch: pytest.MonkeyPatch, piped: str, prompt: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    code, out, err = lol("generate", "--model", varied, *FLAGS)
    assert (code, err) == (0, "")
    assert out == generate_text(*load_model(varied), prompt, max_new_tokens=NEW, temperature=0) + "\n"
    assert (code, out, err) == lol("generate", "--model", varied, *FLAGS, "--prompt", prompt)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_pipe_of_bytes_that_are_no_text(lol: Lol, varied: Path, monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors))
    code, out, err = lol("generate", "--model", varied, *FLAGS)
    assert (code, out) == (2, "")
    assert "UTF-8" in err
    assert "Traceback" not in err


def test_the_path_is_shown_beside_an_untouched_text(lol: Lol, varied: Path) -> None:
    command = ["generate", "--model", varied, *FLAGS, "--prompt", "library of layers router"]
    code, plain, err = lol(*command)
    assert (code, err) == (0, "")
    code, out, err = lol(*command, "--show-path")
    assert (code, out) == (0, plain)
    legend, *lines = err.splitlines()
    assert legend == terminal.LEGEND
    shown = []
    for line in lines:
        begins = re.fullmatch(r" *token (\d+) \|((?: +\d+:\d+ \d\.\d\d)+)", line)
        assert begins, line
        shown += [
            (int(begins[1]), int(depth), int(block), weight)
            for depth, block, weight in re.findall(r"(\d+):(\d+) (\S+)", begins[2])
        ]
    model, tokenizer = load_model(varied)
    ids = ids_written(model, tokenizer("library of layers router")["input_ids"])
    table = record_paths(model, [ids[:-1]])
    columns = table[["start", "depth", "expert", "weight"]].itertuples(index=False, name=None)
    assert sorted(shown) == sorted((start, depth, block, f"{weight:.2f}") for start, depth, block, weight in columns)
    assert [line[0] for line in shown] == sorted(line[0] for line in shown)
    assert len({block for _, _, block, _ in shown}) > 1


def test_path_lines_stand_alone_in_a_file_that_holds_both(
    varied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "--model", str(varied), *FLAGS, "--prompt", "library of layers router", "--show-path"]
    with (tmp_path / "both.txt").open("w") as both:
        monkeypatch.setattr(sys, "stdout", both)
        monkeypatch.setattr(sys, "stderr", both)
        assert cli.main(command) == 0
    lines = (tmp_path / "both.txt").read_text().split("\n")
    assert sum(line.lstrip().startswith("token ") for line in lines) > 3
    assert not [line for line in lines if " token " in line.lstrip()]


def test_path_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    windows = [Window(depth, 3, 1024, 1152, 30 + depth % 3, 0.5) for depth in range(22)]
    lines = terminal.path_lines(1024, windows, block_colors(33)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 4
    assert {line.index("|") for line in lines} == {12}
    cells = re.findall(r"\d+:\d+ 0\.50", " ".join(lines))
    assert cells == [f"{window.depth}:{window.expert} 0.50" for window in windows]


def test_blocks_have_their_colours_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, colors = [Window(0, 0, 0, 8, 2, 0.5)], block_colors(3)
    red, green, blue = (int(colors[2][place : place + 2], 16) for place in (1, 3, 5))
    for name, value in {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert f"38;2;{red};{green};{blue}" in terminal.path_lines(0, windows, colors)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "38;" not in terminal.path_lines(0, windows, colors)
    monkeypatch.delenv("FORCE_COLOR")
    assert terminal.path_lines(0, windows, colors) == "    token 0 | 0:2 0.50\n"


@pytest.mark.parametrize("command", [["--path", "0", "1"], ["--path", "0", "1", "2", "3"], ["--path", "frog"]])
def test_paths_that_do_not_fit(lol: Lol, varied: Path, command: list[str]) -> None:
    code, out, err = lol("generate", "--model", varied, "--prompt", "a", *command, "--show-path")
    assert (code, out) == (2, "")
    assert any(word in err for word in ("one block per depth", "blocks 0 to 2", "frog"))


# --- A conversation


def test_lines_continue_one_document(types, varied: Path) -> None:
    code, out, err = types(varied, "library of\n\n layers\\\nrouter\n")
    assert code == 0
    model, tokenizer = load_model(varied)
    ids, texts = [], []
    for text in ("library of", "", " layers\nrouter"):
        ids += tokenizer(text, add_special_tokens=not ids)["input_ids"]
        before = len(ids)
        ids = ids_written(model, ids)
        texts.append(tokenizer.decode(ids[before:]))
    # What was typed is on the terminal already.
    assert out == "".join(f"{text}\n" for text in texts)
    assert err.startswith("lol: type a beginning; /help")
    assert err.count("> ") == 4
    assert err.count(". ") == 1


def test_commands(types, varied: Path) -> None:
    typed = ["abc", "/path 2 2 2 2", "", "/path free", "/new", "abc", "/help"]
    code, out, err = types(varied, "\n".join(typed), "--show-path", "--max-new-tokens", "12")
    assert code == 0
    model, tokenizer = load_model(varied)
    free = ids_written(model, tokenizer("abc")["input_ids"], 12)
    lines = out.splitlines()
    # With the path, what was typed is shown in its windows.
    assert lines[0] == lines[2] == tokenizer.decode(free, skip_special_tokens=True)
    forced = re.findall(r"token (?:16|20|24) \|(.*)", err)
    assert len(forced) == 3
    assert set(re.findall(r"\d:(\d)", "".join(forced))) == {"2"}
    assert "/path free" in err


def test_mistakes_in_a_conversation_do_not_end_it(types, varied: Path) -> None:
    typed = ["/path 0 1", "/path 9 9 9 9", "/path", "/path frog", "/nwe", "/new x", "a\udcff", "abc"]
    code, out, err = types(varied, "\n".join(typed))
    assert code == 0
    complaints = [line.split("lol: ")[1] for line in err.splitlines() if "lol: " in line][1:]
    expected = ["path has 2 depths", "blocks 0 to 2", "/path free", "/path free", "no command /nwe", "no command /new"]
    for complaint, message in zip(complaints, [*expected, "UTF-8"], strict=True):
        assert message in complaint
    text = generate_text(*load_model(varied), "abc", max_new_tokens=NEW, temperature=0)
    assert out == text.removeprefix("abc") + "\n"


@pytest.mark.parametrize(("typed", "meant"), [("// a comment", "// a comment"), ("\\/new", "/new"), ("/a/b", "/a/b")])
def test_text_may_begin_like_a_command(types, varied: Path, typed: str, meant: str) -> None:
    text = generate_text(*load_model(varied), meant, max_new_tokens=NEW, temperature=0)
    assert types(varied, typed)[1] == text.removeprefix(meant) + "\n"


def test_after_its_end_a_document_is_followed_by_another(types, varied: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(varied)
    written = ids_written(model, tokenizer("abc")["input_ids"])[4:]
    model.generation_config.eos_token_id = written[3]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, out, err = types(tmp_path, "abc\nabc\n")
    first, second = out.splitlines()
    assert (code, first) == (0, second)
    assert err.count("the document has ended") == 2


def test_ctrl_c_at_the_prompt_leaves(lol: Lol, varied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Keyboard):
        def readline(self, _size: int = -1) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Impatient())
    code, out, err = lol("generate", "--model", varied)
    assert (code, out) == (130, "")
    assert err.endswith("> \n")


# --- On a real terminal


@pytest.mark.slow
def test_a_conversation_on_a_terminal(varied: Path) -> None:
    session = Session("generate", "--model", varied, "--max-new-tokens", "100000", "--show-path")
    session.wait_for("> ")
    session.type("router of\n")
    session.wait_for("token 16 ")
    # The interrupt character of the terminal reaches whoever it controls; here the program is told itself.
    session.child.send_signal(2)
    came = session.wait_for("> ")
    assert "stopped; Enter goes on" in came
    assert "token 0 " in session.seen
    assert "\x1b[1;38" in session.seen, "blocks have their colours"
    # A path line stands alone, whatever the text's last line was.
    for line in session.seen.replace("\r", "").split("\n"):
        assert " token " not in line or line.lstrip().startswith("token "), line
    assert session.leave("\x04") == 0
