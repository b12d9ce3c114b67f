"""`lol experiment`: every pipeline from training to its section, and what the harness keeps, skips and refuses."""

import json
import random
import re
from pathlib import Path

import pytest

from lol.experiments.harness import RESULTS
from lol.experiments.registry import EXPERIMENTS
from small_run import Lol, write_corpus

LANGUAGES = {"de": "der die das und nicht ein ist mit wort satz", "fr": "le la les et pas une est avec mot phrase"}
LANGUAGES |= {"ru": "это не и слово окно путь блок текст дом свет"}


def write_data(folder: Path) -> Path:
    """Something for every experiment, named as `lol experiment all` looks for it."""
    draw = random.Random(0)

    def words(text: str, count: int) -> str:
        return " ".join(draw.choices(text.split(), k=count))

    (folder / "languages").mkdir(parents=True)
    for name, text in LANGUAGES.items():
        lines = [words(text, 9) for _ in range(2000)]
        (folder / "languages" / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    plain, rude = "this is a text of some plain words here and there", "you stupid damn idiot shit fuck off now go"
    posts = [
        {"text": words(rude if n % 3 else plain, 40), "label": "offensive" if n % 3 else "neither"} for n in range(400)
    ]
    write_rows(folder / "safety.jsonl", posts)
    math = folder / "math"
    math.mkdir()
    problems = [{"question": words(plain, 40), "answer": f"{words(plain, 20)}\n#### {n}"} for n in range(150)]
    write_rows(math / "gsm8k_train.jsonl", problems)
    write_rows(math / "gsm8k_test.jsonl", problems[:3])
    items = [{"query": f"Question: {words(plain, 6)}\n", "choices": plain.split()[:4], "gold": n % 4} for n in range(6)]
    write_rows(math / "arc_easy.jsonl", items)
    for name in ("huginn", "moe", "ablations"):
        write_corpus(folder / f"{name}.txt", documents=600)
    return folder


def write_rows(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_pipeline_runs_from_end_to_end(lol: Lol, tmp_path: Path):
    command = ["experiment", "all", "--fast", "--seeds", "0", "--runs", tmp_path / "runs", "--out", tmp_path / "out"]
    data = write_data(tmp_path / "data")
    code, out, _ = lol(*command, "--data", data)
    assert code == 0
    for name in EXPERIMENTS:
        folder = tmp_path / "out" / name
        record = json.loads((folder / RESULTS).read_text())
        assert record["command"].startswith(f"lol experiment {name} --scale tiny --fast --seeds 0")
        assert str(tmp_path) not in (folder / RESULTS).read_text(), "a result names no folder of its machine"
        section = (folder / "section.md").read_text()
        assert "nan" not in section.lower()
        assert record["published"] in section
        assert len(list(folder.glob("utilisation-*.svg"))) == 1
        assert len(list(folder.glob("*.svg"))) > 1
        assert f"written: {folder}" in out
    assert f"done before: {tmp_path / 'out' / 'moe'}" in lol(*command, "--data", data)[1]


def test_the_list_names_every_experiment(lol: Lol):
    code, out, _ = lol("experiment", "list")
    assert code == 0
    for name, one in EXPERIMENTS.items():
        assert re.search(rf"^{name}  ", out, re.MULTILINE)
        assert one.data is None or one.data.split()[0] in out
