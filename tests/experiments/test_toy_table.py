"""The toy's tables and figures from records of real, short runs, and from records made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lol.cli import main
from lol.experiments.toy.config import MODELS
from lol.experiments.toy.discovery import runs as discovery_runs
from lol.experiments.toy.discovery.figures import _rows
from lol.experiments.toy.orderings import ORDERINGS, compare, orderings_section
from lol.experiments.toy.records import Record, by_function
from lol.experiments.toy.runs import ToyRun, toy_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models of each section, one of them with two seeds, and a discovery."""
    for name in ("given", "learned", "given-distinct", "given-torch-block"):
        small = replace(MODELS[name], train_steps=2, batch_size=8, hidden_size=16, intermediate_size=16)
        monkeypatch.setitem(MODELS, name, small)
        toy_run(ToyRun(name, out=tmp_path / "runs"))
    record = json.loads((tmp_path / "runs" / "given.programs-0.seed-0.json").read_text())
    record |= {"seed": 1, "held_out": record["held_out"] | {"accuracy": 40.0}}
    (tmp_path / "runs" / "given.programs-0.seed-1.json").write_text(json.dumps(record))
    config = discovery_runs.DISCOVERIES["mix"]
    toy = replace(config.toy, hidden_size=16, intermediate_size=16, batch_size=8)
    monkeypatch.setitem(discovery_runs.DISCOVERIES, "mix", replace(config, toy=toy, explore_steps=3, settle_steps=1))
    assert main(["toy", "discover", "mix", "--out", str(tmp_path / "discovery")]) == 0
    return tmp_path


def test_the_table_has_every_seed_and_the_articles_numbers(folder: Path, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    flags = ["--runs", str(folder / "runs"), "--discovery", str(folder / "discovery"), "--out", str(folder / "out")]
    assert main(["toy", "table", *flags]) == 0
    said = capsys.readouterr().out
    assert said.strip() == (folder / "out" / "table.md").read_text().strip()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")]
    by_name = {row[0]: row for row in rows}
    # Two steps teach nothing: 0 % and the 40 % written by hand.
    assert by_name["given"][1:4] == ["**20.0**", "0.0, 40.0", "38.4 (29.8-49.0; round one 44.0)"]
    assert by_name["given"][4:6] == ["0.0", "0.0, 0.0"]
    assert by_name["given"][7] == "1.00"
    assert by_name["learned"][9] == "0.0"
    assert by_name["mix"][1:4] == ["programs 0", "**0.0**", "0.0"]
    assert [line for line in said.splitlines() if line.startswith("## ")] == [
        "## The article's primitives, any programs held out (split 0)",
        "## Primitives whose programs all differ, any programs held out (split 0)",
        "## The article's orderings",
        "## What the article leaves unsaid (split programs 0)",
        "## Routers that look for the primitives",
    ]
    assert by_name["given-distinct"][3] == "–"
    assert by_name["ours"][1:] == ["–", "**20.0** (0.0, 40.0); 0.0, 0.0", "**0.0** (0.0); 0.0"]
    assert "init0.09" not in by_name
    assert by_name["torch-block"][1:] == ["–", "**0.0** (0.0); 0.0", "–"]
    names = sorted(file.name for file in (folder / "out").iterdir())
    assert names == ["forming.svg", "held-out.svg", "routing.svg", "separation.svg", "table.md", "unsaid.svg"]
    before = {name: (folder / "out" / name).read_bytes() for name in names}
    assert main(["toy", "table", *flags]) == 0
    assert before == {name: (folder / "out" / name).read_bytes() for name in names}


def test_the_table_names_the_record_that_it_cannot_read(folder: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--runs", str(folder / "runs"), "--discovery", str(folder / "discovery"), "--out", str(folder / "out")]
    own = json.loads((folder / "runs" / "given.programs-0.seed-0.json").read_text())
    # In the folder's order the last.
    bad = folder / "runs" / "learnt.json"
    without = {name: value for name, value in own.items() if name != "trained"}
    complaints = {
        "{": "is no record",
        json.dumps(without): "it has no trained",
        json.dumps(own | {"model": "mine"}): "is of mine, which has no row here",
        json.dumps(own): "is a second record of `lol toy run given --seed 0`",
    }
    for record, complaint in complaints.items():
        bad.write_text(record)
        capsys.readouterr()
        assert main(["toy", "table", *flags]) == 2
        said = capsys.readouterr().err
        assert f"{bad} " in said
        assert complaint in said
    assert not (folder / "out").exists()


def test_known_and_new_functions_are_told_apart() -> None:
    """inc and rev commute; inc inc is no other program."""
    config = {"primitives": ["inc", "rev"], "steps": 2}
    trained, held_out = {"01": 100.0, "11": 0.0}, {"10": 80.0, "00": 3.0}
    record = {"config": config, "trained": {"by_program": trained}, "held_out": {"by_program": held_out}}
    assert by_function(record) == {"known": 80.0, "new": 3.0}
    assert by_function(record | {"held_out": {"by_program": {"10": 80.0}}}) == {"known": 80.0}


def test_without_records_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["toy", "table", "--runs", str(tmp_path)]) == 2
    assert "lol toy all" in capsys.readouterr().err


def test_mix_is_shown_as_each_step_reads_its_own_instruction() -> None:
    scores = [[[[float(step), float(instruction)]] for instruction in range(2)] for step in range(2)]
    assert _rows({"scores": scores}, "mix") == [[0.0, 0.0], [1.0, 1.0]]
    assert _rows({"scores": scores[1]}, "ord") == [[1.0, 0.0], [1.0, 1.0]]


def by_hand(model: str, *held_out: float) -> list[Record]:
    return [
        {
            "model": model,
            "seed": seed,
            "config": {"routing": "learned" if model.startswith("learned") else "fixed"},
            "held_out": {"accuracy": accuracy},
            "trained": {"separation": 0.3 + 0.1 * seed},
        }
        for seed, accuracy in enumerate(held_out)
    ]


def test_orderings_are_counted_seed_by_seed() -> None:
    records = by_hand("dense", 10.0, 30.0, 99.0) + by_hand("given", 40.0, 25.0) + by_hand("learned", 9.0, 31.0)
    by_models = {ordering[:2]: ordering for ordering in ORDERINGS}
    outcome = compare(by_models["dense", "given"], records)
    # 30 and -5; the third seed of dense has no partner.
    assert outcome == (1, 2, 12.5)
    assert outcome.words == "on average (1 of 2 seeds, +12.5)"
    assert compare(by_models["learned", "dense"], records).words == "**does not hold** (1 of 2 seeds, +0.0)"
    assert compare(by_models["looped", "dense"], records) is None
    distinct = by_hand("dense-distinct", 5.0) + by_hand("given-distinct", 6.0)
    text = orderings_section({"first": records, "second": distinct})
    row = next(line for line in text.splitlines() if line.startswith("| dense < given "))
    assert row.split("|")[3:5] == [" on average (1 of 2 seeds, +12.5) ", " holds (1 of 1 seeds, +1.0) "]
    assert "- first: of 2 orderings 1 hold on average, 0 of them in every seed. Separation of the learned" in text
    assert "0.30-0.40 (article 0.34-0.51)" in text
    assert "- second: of 1 orderings 1 hold on average, 1 of them in every seed." in text
