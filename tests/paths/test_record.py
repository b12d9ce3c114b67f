"""The table of paths says what the model did."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset

import lol
from lol import UserError, record_paths
from lol.paths.record import COLUMNS, path_of, path_statistics, stretches, token_paths, token_texts, utilisation

LENGTHS = (70, 1, 16, 33)


def random_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 257, (length,), generator=torch.Generator().manual_seed(seed + length))


def values(table: pd.DataFrame) -> pd.DataFrame:
    """What a table says of its documents, without the numbers that depend on the rows they lie in."""
    return table.drop(columns=["row", "document", "window"]).reset_index(drop=True)


@pytest.mark.parametrize(
    "changes", [{}, {"window_stride": 0}, {"window_size": 7, "window_stride": 5}, {"core_attention": "full"}]
)
def test_windows_cover_every_token_once_per_depth(make_model, changes):
    rows = [random_ids(length) for length in LENGTHS]
    table = record_paths(make_model(**changes), rows, batch_size=3)
    assert sorted(table["document"].unique()) == [0, 1, 2, 3]
    for (document, depth), windows in table.groupby(["document", "depth"]):
        spans = zip(windows["start"], windows["end"], strict=True)
        covered = np.concatenate([np.arange(start, end) for start, end in spans])
        assert covered.tolist() == list(range(LENGTHS[document])), (document, depth)


def test_borders_follow_the_formula(make_model):
    """Position i lies in window floor((i + l S mod W) / W)."""
    table = record_paths(make_model(window_size=7, window_stride=5), [random_ids(40)])
    for line in table.itertuples():
        shift = line.depth * 5 % 7
        assert {(i + shift) // 7 for i in range(line.start, line.end)} == {line.window}


def test_the_table_is_the_routing(model):
    rows = [random_ids(length) for length in LENGTHS]
    table = record_paths(model, rows, batch_size=2)
    assert table["expert"].nunique() > 2
    assert table["row"].tolist() == table["document"].tolist()
    for number, row in enumerate(rows):
        output = model(row[None], output_router_logits=True)
        for line in table[table["document"] == number].itertuples():
            assert line.expert == output.routing.experts[0, line.depth, line.window]
            assert line.weight == pytest.approx(float(output.routing.weights[0, line.depth, line.window]), abs=1e-5)
            probabilities = output.router_logits[line.depth][0, line.window].softmax(-1).tolist()
            assert line.probabilities == pytest.approx(probabilities, abs=1e-5)
        count = int((output.routing.experts >= 0).sum())
        assert (table["document"] == number).sum() == count


def test_packed_documents_are_the_documents_alone(model):
    documents = [random_ids(length) for length in LENGTHS]
    packed = {
        "input_ids": torch.cat(documents).tolist(),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS]).tolist(),
    }
    together = record_paths(model, Dataset.from_list([packed]))
    alone = record_paths(model, documents, batch_size=1)
    pd.testing.assert_frame_equal(
        values(together)[["start", "end", "expert"]], values(alone)[["start", "end", "expert"]]
    )
    assert np.allclose(together["weight"], alone["weight"], atol=1e-5)
    assert together["row"].unique().tolist() == [0]
    assert together["document"].tolist() == alone["document"].tolist()
    routing = model(torch.tensor([packed["input_ids"]]), position_ids=torch.tensor([packed["position_ids"]])).routing
    for line in together.itertuples():
        assert routing.documents[0, line.depth, line.window] == line.document
        assert routing.experts[0, line.depth, line.window] == line.expert


def test_padding_is_dropped_wherever_it_stands(model):
    ids = random_ids(33)
    padded = [
        {"input_ids": [0] * 5 + ids.tolist(), "attention_mask": [0] * 5 + [1] * 33},
        {"input_ids": ids.tolist() + [0] * 9, "attention_mask": [1] * 33 + [0] * 9},
    ]
    table = record_paths(model, padded)
    alone = record_paths(model, [ids])
    for document in (0, 1):
        part = values(table[table["document"] == document])
        pd.testing.assert_frame_equal(part, values(alone), rtol=1e-4)


def test_rows_of_text_are_read_with_the_tokenizer(model, tokenizer):
    table = record_paths(model, ["naïve café"], tokenizer)
    assert table["end"].max() == len("naïve café".encode())
    with pytest.raises(UserError, match="tokenizer"):
        record_paths(model, ["text"])


def test_fewer_depths_can_be_recorded(model):
    assert record_paths(model, [random_ids(20)], num_depths=2)["depth"].max() == 1


def test_a_model_in_training_stays_in_training(model):
    model.train()
    first, second = (record_paths(model, [random_ids(70)]) for _ in range(2))
    assert model.model.training
    pd.testing.assert_frame_equal(first, second)


def test_a_fixed_path_is_recorded_as_certain(make_model):
    model = make_model(routing="fixed", fixed_path=[4, 3, 2, 1, 0, 0])
    table = record_paths(model, [random_ids(20)])
    assert path_of(table, 0, 19) == (4, 3, 2, 1, 0, 0)
    assert table["probabilities"][0] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("rows", "message"), [([], "at least one row"), ([[]], "at least one token"), ([[[1], [2]]], "at least one token")]
)
def test_rows_that_cannot_be_run(model, rows, message):
    with pytest.raises(UserError, match=message):
        record_paths(model, rows)


def test_a_model_that_diverged_is_named(model):
    model.model.router.bias.data[0] = float("nan")
    with pytest.raises(UserError, match="diverged"):
        record_paths(model, [[1, 2]])


def test_other_models_are_refused():
    with pytest.raises(UserError, match="holds no LoLModel"):
        record_paths(torch.nn.Linear(2, 2), [[1]])


def test_the_path_of_a_token_is_what_its_windows_ran(model):
    table = record_paths(model, [random_ids(length) for length in LENGTHS])
    for document, length in enumerate(LENGTHS):
        paths = token_paths(table, document)
        assert paths.shape == (length, 6)
        for line in table[table["document"] == document].itertuples():
            assert (paths[line.start : line.end, line.depth] == line.expert).all()
        for piece in stretches(table, document):
            lines = table.iloc[list(piece.lines)]
            assert lines["expert"].tolist() == list(piece.path)
            assert (lines["start"] <= piece.start).all()
            assert (lines["end"] >= piece.end).all()
    with pytest.raises(UserError, match="tokens 0 to 69"):
        path_of(table, 0, 70)
    with pytest.raises(UserError, match="document 4"):
        path_of(table, 4, 0)


def test_statistics_by_hand():
    lines = [(0, 0, 0, 8, 1), (0, 1, 8, 12, 1), (1, 0, 0, 4, 0), (1, 1, 4, 12, 2)]
    table = pd.DataFrame(lines, columns=["depth", "window", "start", "end", "expert"]).assign(document=0)
    assert utilisation(table, 3).tolist() == [[0, 1, 0], [0.5, 0, 0.5]]
    statistics = path_statistics(table, 3)
    assert statistics.entropy == (0, 1)
    assert statistics.tokens_of_path == {(1, 2): 8, (1, 0): 4}
    assert list(statistics.tokens_of_path) == [(1, 2), (1, 0)]
    assert (statistics.num_paths, statistics.busiest_block, statistics.busiest_share) == (2, 1, 0.5)


def test_entropy_of_even_use():
    table = pd.DataFrame({"document": 0, "depth": 0, "start": range(4), "end": range(1, 5), "expert": range(4)})
    assert path_statistics(table, 5).entropy[0] == pytest.approx(math.log2(4))


def test_token_texts_add_up_to_the_text(tokenizer):
    text = "naïve 日本語 🙂 = <|eos|>"
    ids = tokenizer(text)["input_ids"]
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert pieces[:4] == ["n", "a", "", "ï"]
    broken = token_texts(tokenizer, ids[:3])
    assert broken == ["n", "a", "\ufffd"]


def test_one_text_is_one_row(model, tokenizer):
    table = record_paths(model, "a text, not letters", tokenizer)
    assert table["row"].unique().tolist() == [0]
    assert table.equals(record_paths(model, ["a text, not letters"], tokenizer))


TEXTS = ["naïve café, and more than a window of it", "b"]


@pytest.mark.parametrize("column", ["text", "body"])
def test_a_data_set_of_texts(model, tokenizer, column):
    rows = Dataset.from_dict({"label": [0, 1], column: TEXTS})
    wanted = record_paths(model, TEXTS, tokenizer)
    named = {} if column == "text" else {"text_column": column}
    assert record_paths(model, rows, tokenizer, **named).equals(wanted)
    assert record_paths(model, rows.to_iterable_dataset(), tokenizer, **named).equals(wanted)
    with pytest.raises(UserError, match="tokenizer"):
        record_paths(model, rows, **named)
    with pytest.raises(UserError, match=f"row 0 has label, {column}, but neither.*text_column"):
        record_paths(model, rows, tokenizer, text_column="frog")
    with pytest.raises(UserError, match="text_column"):
        record_paths(model, rows, tokenizer, text_column="label")


def test_a_data_set_of_ids(model, tokenizer):
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    wanted = record_paths(model, ids)
    assert record_paths(model, Dataset.from_dict({"input_ids": ids})).equals(wanted)
    tensors = Dataset.from_dict({"input_ids": ids}).with_format("torch")
    assert record_paths(model, tensors).equals(wanted)


def test_the_table_survives_parquet(model, tmp_path):
    table = record_paths(model, [random_ids(length) for length in LENGTHS])
    assert tuple(table.columns) == COLUMNS
    table.to_parquet(tmp_path / "paths.parquet", index=False)
    read = pd.read_parquet(tmp_path / "paths.parquet")
    assert read.drop(columns="probabilities").equals(table.drop(columns="probabilities"))
    assert read.dtypes.drop("probabilities").equals(table.dtypes.drop("probabilities"))
    wanted = np.stack(table["probabilities"].to_list())
    assert wanted.shape == (len(table), 5)
    assert np.array_equal(np.stack(read["probabilities"].to_list()), wanted)
    # As other readers see it: a column of lists.
    stored = pyarrow.parquet.read_table(tmp_path / "paths.parquet")
    assert pyarrow.types.is_list(stored.schema.field("probabilities").type)
    assert stored.column("probabilities")[3].as_py() == table["probabilities"][3]
    assert path_statistics(read, 5) == path_statistics(table, 5)


def test_where_a_user_looks_for_it():
    assert lol.record_paths is lol.paths.record_paths is record_paths
    assert lol.force_path is lol.paths.force_path


def test_the_worked_example_runs(trained, tmp_path, monkeypatch, capsys):
    """docs/paths.md, in a folder where the run that it names lies."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(trained)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "paths.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert pd.read_parquet("paths.parquet").shape == names["table"].shape
    assert f"written: {len(names['table'])} windows" in capsys.readouterr().out
    assert set(COLUMNS) == set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE))
