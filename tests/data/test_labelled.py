"""Labelled documents from every kind of source, and rows of them that are what training packs."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lol.data.labelled import encode_row, read_labelled
from lol.data.packing import PackedDocuments
from lol.data.text import open_documents
from lol.data.tokenizer import train_tokenizer
from lol.errors import UserError

ROWS = [{"text": f"text {k} of the cat", "mood": ("sad", "glad")[k % 2], "told": f"w{k % 3}"} for k in range(8)]


def lines(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_labels_of_rows(tmp_path, kind):
    if kind == "jsonl":
        source = lines(tmp_path / "rows.jsonl", ROWS)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
        source = str(tmp_path / "rows.parquet") if kind == "parquet" else f"hf:{tmp_path}"
    read = read_labelled([source], label_column="mood", router_only_column="told")
    assert [(one.text, one.label, one.router_only) for one in read] == [
        (row["text"], row["mood"], row["told"]) for row in ROWS
    ]
    assert len({one.group for one in read}) == 8
    some = read_labelled([source], label_column="mood", most=3)
    assert [one.text for one in some] == [row["text"] for row in ROWS[:6]]
    assert {one.router_only for one in some} == {""}
    # What the router reads may be the label.
    assert [one.router_only for one in read_labelled([source], label_column="mood", router_only_column="mood")] == [
        row["mood"] for row in ROWS
    ]


def test_labels_by_source_and_numbers_as_labels(tmp_path):
    sources = [lines(tmp_path / f"{name}.jsonl", ROWS[:4]) for name in ("de", "fr")]
    read = read_labelled(sources, most=2)
    assert [one.label for one in read] == ["de", "de", "fr", "fr"]
    # Equal texts belong together, whatever their label.
    assert len({one.group for one in read}) == 2
    assert [one.label for one in read_labelled(sources[:1])] == [None] * 4
    with pytest.raises(UserError, match="two sources are named 'de'"):
        read_labelled(sources[:1] * 2)
    numbered = lines(tmp_path / "numbers.jsonl", [{"text": "a", "y": 3}, {"text": "b", "y": True}])
    assert [one.label for one in read_labelled([numbered], label_column="y")] == ["3", "True"]


@pytest.mark.parametrize(("label", "named"), [(None, "nothing"), ("", "nothing"), (0.5, "float"), ([1], "list")])
def test_a_row_without_a_label_is_named(tmp_path, label, named):
    source = lines(tmp_path / "rows.jsonl", [{"text": "a", "y": 1}, {"text": "b", "y": label}])
    with pytest.raises(UserError, match=f"line 2: the column 'y' holds {named}, not a text"):
        read_labelled([source], label_column="y")
    with pytest.raises(UserError, match="no column 'z'; name the one that holds the label, of: text, y"):
        read_labelled([source], label_column="z")
    (tmp_path / "plain.txt").write_text("a text")
    with pytest.raises(UserError, match="a text file has no column 'y'"):
        read_labelled([str(tmp_path / "plain.txt")], label_column="y")


def test_a_row_is_what_training_packs(tmp_path):
    source = lines(tmp_path / "rows.jsonl", ROWS[:1])
    tokenizer = train_tokenizer([f"{row['text']} {row['told']}" for row in ROWS], 270)
    row = encode_row(tokenizer, ROWS[0]["text"], ROWS[0]["told"])
    length = len(row["input_ids"])
    packed = next(
        iter(PackedDocuments(open_documents(source, router_only_column="told"), tokenizer, length + 1, seed=0))
    )
    assert row["input_ids"] == packed["input_ids"][:-1].tolist()
    assert row["router_only_ids"] == packed["router_only_ids"][:-1].tolist()
    assert max(row["router_only_ids"]) >= 0
    cut = encode_row(tokenizer, ROWS[0]["text"], ROWS[0]["told"], 4)
    assert cut == {name: ids[:4] for name, ids in row.items()}
    assert "router_only_ids" not in encode_row(tokenizer, "a")
