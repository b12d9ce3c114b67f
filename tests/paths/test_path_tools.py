"""The path tools as a user has them: a model folder, labelled text, a table, numbers and figures."""

import json
import random
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from lol.data.tokenizer import train_tokenizer
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.paths.force import TIED
from lol.paths.tools.read import TOOLS
from pages import blocks_of
from small_run import Lol

WORDS = {"de": "der die das und ist nicht haus", "fr": "le la les et est pas maison", "tr": "bir ve bu ev çok ne"}
UNITS = {"window": ("one-hot path", "probabilities", "tokens", "tokens so far")}
UNITS["sequence"] = UNITS["window"][:3]


def write_lines(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, one whose router alone reads a column, and two data sets."""
    folder = tmp_path_factory.mktemp("tools")
    draw = random.Random(0)
    texts = [
        {"text": " ".join(draw.choices(words.split(), k=draw.randint(8, 40))), "lang": name}
        for _ in range(12)
        for name, words in WORDS.items()
    ]
    write_lines(folder / "texts.jsonl", texts)
    for name in WORDS:
        own = [{"text": row["text"]} for row in texts if row["lang"] == name]
        write_lines(folder / f"{name}.jsonl", own)
    letters = [draw.sample("abcd", k=3) for _ in range(4)]
    sorted_ = [
        {"text": f"{' '.join(some)} = {' '.join(sorted(some, reverse=way == 'down'))}", "way": way}
        for some in letters
        for way in ("up", "down")
    ]
    # Both ways write the same here.
    sorted_ += [{"text": "a a a = a a a", "way": way} for way in ("up", "down")]
    write_lines(folder / "sorted.jsonl", sorted_)
    tokenizer = train_tokenizer([row["text"] for row in texts + sorted_], 290)
    for name in ("model", "hides"):
        torch.manual_seed(0)
        model = LoLForCausalLM(
            LoLConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=32,
                num_attention_heads=2,
                num_prelude_layers=1,
                num_coda_layers=1,
                num_experts=5,
                num_routed_depths=4,
                window_size=16,
                window_stride=8,
                max_position_embeddings=64,
                router_only_tokens=name == "hides",
            )
        )
        model.model.router.weight.data.mul_(300)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def texts(folder: Path) -> list[object]:
    return ["--model", folder / "model", "--data", folder / "texts.jsonl", "--label-column", "lang"]


def read(folder: Path, name: str) -> dict:
    assert (folder / f"{name}.svg").read_text().startswith("<?xml")
    return json.loads((folder / f"{name}.json").read_text())


def test_utilisation(lol: Lol, folder: Path, tmp_path: Path) -> None:
    data = ["--model", folder / "model", "--data", folder / "texts.jsonl"]
    code, out, err = lol("paths", "utilisation", *data, "--against", folder / "model", "--out", tmp_path / "new")
    assert (code, err) == (0, "")
    numbers = read(tmp_path / "new", "utilisation")
    shares = np.array(numbers["shares"])
    assert shares.shape == (4, 5)
    assert np.allclose(shares.sum(1), 1)
    assert numbers["documents"] == 36
    assert f"{shares[3, 2]:.0%}" in out.splitlines()[4]
    # A model agrees with itself, block by block.
    assert numbers["against"]["share"] == 1
    assert numbers["against"]["by_chance"] < 0.7
    assert "100% of the windows run the matching block" in out
    assert lol("paths", "utilisation", *data, "--rows", 2)[0] == 0
    code, _, err = lol("paths", "utilisation", *data, "--out", tmp_path / "new")
    assert code == 2
    assert "utilisation.json exists already: name another folder as --out, or give --overwrite" in err
    assert lol("paths", "utilisation", *data, "--rows", 2, "--out", tmp_path / "new", "--overwrite")[0] == 0
    assert read(tmp_path / "new", "utilisation")["documents"] == 2


def test_map_and_mode(lol: Lol, folder: Path, texts: list[object], tmp_path: Path) -> None:
    code, out, err = lol("paths", "map", *texts, "--out", tmp_path)
    assert (code, err) == (0, "")
    numbers = read(tmp_path, "map")
    assert numbers["labels"] == ["de", "fr", "tr"]
    assert np.allclose(np.diag(numbers["distances"]), 0)
    assert all(name in (tmp_path / "distances.svg").read_text() for name in WORDS)
    assert out.splitlines()[1].split()[:2] == ["de", str(sum(point[2] == "de" for point in numbers["points"]))]
    code, out, err = lol("paths", "mode", *texts, "--out", tmp_path)
    assert (code, err) == (0, "")
    modes = read(tmp_path, "mode")
    assert [modes[name]["num_examples"] for name in WORDS] == [12, 12, 12]
    # The same documents in three files, whose names are the labels.
    sources = [folder / f"{name}.jsonl" for name in WORDS]
    assert lol("paths", "mode", "--model", folder / "model", "--data", *sources) == (
        0,
        "\n".join(out.splitlines()[:-1]) + "\n",
        "",
    )


def test_probe(lol: Lol, texts: list[object], tmp_path: Path) -> None:
    code, out, err = lol("paths", "probe", *texts, "--folds", 2, "--seeds", 1, "--out", tmp_path)
    assert (code, err) == (0, "")
    numbers = read(tmp_path, "probe")
    for unit, names in UNITS.items():
        assert tuple(numbers[unit]) == names
        for name in names:
            probe = numbers[unit][name]
            assert np.shape(probe["auroc"]["values"]) == (1, 2)
            assert probe["num_groups"] == 36
            assert f"{unit}: {name}" in out
            assert f"{probe['auroc']['mean']:.3f}" in out
    # The languages share few words.
    assert numbers["sequence"]["tokens"]["accuracy"]["mean"] > 0.9
    assert numbers["window"]["tokens"]["num_rows"] > numbers["sequence"]["tokens"]["num_rows"] == 36


@pytest.mark.slow
def test_force(lol: Lol, folder: Path, tmp_path: Path) -> None:
    flags = ["--model", folder / "hides", "--data", folder / "sorted.jsonl", "--label-column", "way"]
    flags += ["--router-only-column", "way", "--prompt-until", " =", "--weight", "mode"]
    code, out, err = lol("paths", "force", *flags, "--out", tmp_path)
    assert (code, err) == (0, "")
    numbers = read(tmp_path, "force")
    assert (numbers["prompts"], numbers["left_out"]) == (2, 1)
    assert list(numbers["conditions"]) == ["forced", "label told, not forced", "not told, not forced"]
    for found in numbers["conditions"].values():
        assert found["labels"] == ["down", "up"]
        assert (np.sum(found["counts"], axis=1) + found["tied"] + found["unattributed"]).tolist() == [2, 2]
    assert "left out, as two labels answer them alike: 1" in out
    # Untold and unforced, both labels ask the same and get the same.
    counts = numbers["conditions"]["not told, not forced"]["counts"]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_the_page_runs(lol: Lol, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/path-tools.md, in a folder where what it names lies."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(trained)
    draw = random.Random(0)
    posts = [{"text": " ".join(draw.choices(WORDS[k].split(), k=9)), "label": k} for _ in range(5) for k in WORDS]
    write_lines(tmp_path / "posts.jsonl", posts)
    mazes = [{"text": f"{k} path: {k}{way}", "strategy": way} for k in range(2) for way in ("bfs", "dfs")]
    write_lines(tmp_path / "mazes.jsonl", mazes)
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(Path(__file__).parents[2] / "docs" / "path-tools.md")
    commands = [line for language, code in blocks if language == "bash" for line in code.splitlines()]
    assert {command.split()[2] for command in commands} == set(TOOLS)
    for command in commands:
        # Fifteen folds of everything would take most of the time.
        fewer = ["--seeds", "1", "--folds", "2"] if "probe" in command else []
        assert lol(*shlex.split(command)[1:], *fewer)[::2] == (0, "")
    assert {file.name for file in (tmp_path / "paths").glob("*.json")} == {f"{name}.json" for name in TOOLS}
    names: dict = {}
    for language, code in blocks:
        if language == "python":
            exec(code, names)
    assert names["found"].label in ("prose", "code", TIED)


@pytest.mark.parametrize(
    ("verb", "changes", "message"),
    [
        ("map", {"--label-column": None}, "has no labels: name their column as --label-column"),
        ("map", {"--label-column": "tongue"}, "no column 'tongue'; name the one that holds the label, of: text, lang"),
        ("probe", {"--folds": "13"}, "label 'de' has 12 examples, fewer than the 13 folds"),
        ("probe", {"--data": "one.jsonl"}, "all rows have the label 'de': a probe needs two classes"),
        ("probe", {"--rows": "0"}, "--rows must be at least 1"),
        ("mode", {"--model": "fixed"}, "has no router"),
        ("mode", {"--model": "hides"}, "name their column as --router-only-column"),
        ("mode", {"--router-only-column": "lang"}, "leave it out"),
        ("force", {"--prompt-until": "="}, "'=' does not stand in"),
        ("force", {"--prompt-until": " "}, "prompts have an answer of every label (de, fr, tr)"),
    ],
)
def test_mistakes_name_their_fix(lol: Lol, folder: Path, verb: str, changes: dict, message: str) -> None:
    if not (folder / "one.jsonl").exists():
        write_lines(folder / "one.jsonl", [{"text": f"der haus {k}", "lang": "de"} for k in range(12)])
        fixed = LoLForCausalLM.from_pretrained(folder / "model")
        settings = fixed.config.to_dict() | {"routing": "fixed", "fixed_path": [0, 1, 2, 3]}
        LoLForCausalLM(LoLConfig(**settings)).save_pretrained(folder / "fixed")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / "fixed" / name).write_text((folder / "model" / name).read_text())
    flags = {"--model": "model", "--data": "texts.jsonl", "--label-column": "lang"} | changes
    places = {name: folder / flags[name] for name in ("--model", "--data")}
    words = [word for pair in (flags | places).items() if pair[1] is not None for word in pair]
    code, _, err = lol("paths", verb, *words)
    assert code == 2
    assert message in err
