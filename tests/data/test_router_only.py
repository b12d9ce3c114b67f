"""Documents with a column that only the router reads: reading it, packing it, resuming, mixing, holding out."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lol.data.loader import make_loader
from lol.data.mixture import MixedRows, mixed_texts, open_sources
from lol.data.ngram import NGramBaselines
from lol.data.packing import PackedDocuments, Row, held_out_rows, token_documents
from lol.data.text import open_documents
from lol.data.tokenizer import encode_documents, encode_texts
from lol.errors import UserError
from lol.model.lm import count_targets

STRATEGIES = ("cat", "the dog", "")
ROWS = [{"text": f"{k}: " + "the cat sat " * (k % 5), "strategy": STRATEGIES[k % 3]} for k in range(40)]


def write(folder: Path, kind: str, rows: list[dict] = ROWS) -> str:
    """The rows in two files of a folder; the source that names it."""
    folder = folder / kind.removeprefix("hf:")
    folder.mkdir(exist_ok=True)
    for part in range(2):
        some = rows[part::2]
        if kind.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), folder / f"train-{part}.parquet")
        else:
            (folder / f"train-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return f"hf:{folder}" if kind.startswith("hf:") else str(folder)


@pytest.fixture
def documents(tmp_path):
    return open_documents(write(tmp_path, "jsonl"), router_only_column="strategy")


def parts_of(rows: list[Row]) -> list[tuple[list[int], list[int]]]:
    """Every part of a document in the rows: its tokens, and its router-only tokens; the places are checked."""
    parts = []
    for row in rows:
        ids, positions, hidden = (row[name].tolist() for name in ("input_ids", "position_ids", "router_only_ids"))
        starts = [place for place, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert positions[start:end] == list(range(end - start))
            number = sum(token >= 0 for token in hidden[start:end])
            assert hidden[start] == -1
            assert min(hidden[start + 1 : start + 1 + number], default=0) >= 0
            # 0 is BOS: who reads the ids alone is told nothing.
            assert set(ids[start + 1 : start + 1 + number]) <= {0}
            text = [ids[start], *ids[start + 1 + number : end]]
            parts.append((text, hidden[start + 1 : start + 1 + number]))
    return parts


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf:jsonl", "hf:parquet"])
def test_every_source_of_rows_brings_the_column(tmp_path, kind):
    found = list(open_documents(write(tmp_path, kind), router_only_column="strategy"))
    assert Counter((row["text"], row["router_only"]) for row in found) == Counter(
        (row["text"], row["strategy"]) for row in ROWS
    )
    assert "router_only" not in next(iter(open_documents(write(tmp_path, kind))))


@pytest.mark.parametrize("length", [5, 16, 200])
def test_each_part_of_a_document_has_its_router_only_tokens_behind_its_first(tokenizer, documents, length):
    strategy = {
        tuple(ids): hidden
        for ids, hidden in zip(
            encode_documents(tokenizer, [row["text"] for row in ROWS]),
            encode_texts(tokenizer, [row["strategy"] for row in ROWS]),
            strict=True,
        )
    }
    total = sum(map(len, strategy))
    packed = PackedDocuments(documents, tokenizer, length, shuffle_buffer=7)
    rows = []
    for row in packed:
        rows.append(row)
        if packed.epoch > 1:
            break
    document: list[int] = []
    found = Counter()
    for ids, hidden in parts_of(rows):
        document += ids
        candidates = [own for whole, own in strategy.items() if list(whole[: len(document)]) == document]
        # cut short only where the row ends
        assert any(hidden == own or (len(ids) == 1 and hidden == own[: len(hidden)]) for own in candidates)
        if ids[-1] == 1:  # EOS
            found[tuple(document)] += 1
            document = []
    assert sum(len(ids) for ids, _ in parts_of(rows)) > total
    assert found.keys() == strategy.keys()
    assert set(found.values()) <= {1, 2, 3}


def test_targets_are_those_of_rows_without_the_column(tokenizer, tmp_path):
    """Where every document is whole in its row."""
    source = write(tmp_path, "jsonl")
    plain, hidden = (open_documents(source, router_only_column=column) for column in (None, "strategy"))
    rows = [held_out_rows(documents, tokenizer, length, 1)[0] for documents, length in ((plain, 300), (hidden, 300))]
    model = NGramBaselines.count(token_documents(hidden, tokenizer), len(tokenizer))
    assert model.tokens == NGramBaselines.count(token_documents(plain, tokenizer), len(tokenizer)).tokens
    before, after = model._targets(rows[1:])
    number = len(after)
    assert number == count_targets(rows[1]) < count_targets(rows[0])
    for own, expected in zip((before, after), model._targets(rows[:1]), strict=True):
        assert own.tolist() == expected[:number].tolist()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(0, 90), length=st.sampled_from([5, 9, 24]), ranks=st.sampled_from([1, 2]))
def test_a_saved_place_goes_on_with_the_next_row(tokenizer, documents, number, length, ranks):
    def fresh():
        return PackedDocuments(documents, tokenizer, length, shuffle_buffer=6, rank=ranks - 1, world_size=ranks)

    packed = fresh()
    rows = iter(packed)
    for _ in range(number):
        next(rows)
    state = json.loads(json.dumps(packed.state_dict()))
    expected = list(islice(rows, 30))
    resumed = fresh()
    resumed.load_state_dict(state)
    for row, wanted in zip(resumed, expected, strict=False):
        assert all(torch.equal(row[name], wanted[name]) for name in ("input_ids", "position_ids", "router_only_ids"))


@pytest.mark.slow
def test_workers_and_a_mixture_bring_it_too(tokenizer, tmp_path):
    sources = [write(tmp_path, kind) for kind in ("jsonl", "hf:parquet")]
    mixed = MixedRows(open_sources(sources, router_only_column="strategy"), tokenizer, 24)
    batches = list(islice(make_loader(mixed, 3, num_workers=2), 8))
    rows = [{name: batch[name][k] for name in batch} for batch in batches for k in range(3)]
    told = {tuple(hidden) for _, hidden in parts_of(rows)}
    assert told >= {tuple(ids) for ids in encode_texts(tokenizer, STRATEGIES)}


def test_a_tokenizer_learns_the_words_of_the_column(tmp_path):
    (source,) = open_sources(write(tmp_path, "jsonl"), router_only_column="strategy")
    texts = list(mixed_texts([source]))
    assert Counter(texts) == Counter(
        [row["text"] for row in ROWS] + [row["strategy"] for row in ROWS if row["strategy"]]
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf:jsonl", "hf:parquet"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no column 'strategy'; name the one that holds what only the router reads, of: text"),
        ({"text": "a", "strategy": 3}, "'strategy' holds int, not text; write \"\" where"),
        ({"text": "a", "strategy": None}, "'strategy' holds null, not text; write \"\" where"),
    ],
)
def test_rows_without_a_text_for_the_router_are_refused(tmp_path, kind, row, message):
    source = write(tmp_path, kind, [row, row])
    with pytest.raises(UserError, match=message):
        open_documents(source, router_only_column="strategy")


def test_a_later_row_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "strategy": "b"}\n{"text": "a", "strategy": ["b"]}\n')
    documents = open_documents(str(tmp_path / "a.jsonl"), router_only_column="strategy")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: the column 'strategy' holds list, not text"):
        list(documents)


def test_files_of_text_have_no_columns(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for source in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(UserError, match=r"a\.txt: a text file has no column 'strategy'"):
            open_documents(str(source), router_only_column="strategy")
    with pytest.raises(UserError, match="'text' is the column of the text, which everything reads"):
        open_documents(str(tmp_path), router_only_column="text")


def test_a_row_must_hold_more_than_what_the_router_reads(tokenizer, tmp_path):
    source = write(tmp_path, "jsonl", [{"text": "the cat", "strategy": "a b c d e f g h"}] * 2)
    documents = open_documents(source, router_only_column="strategy")
    with pytest.raises(UserError, match=r"^de: a document has \d+ router-only tokens.*row of 9; shorten them"):
        next(iter(PackedDocuments(documents, tokenizer, 9, name="de")))
    with pytest.raises(UserError, match=r"^the held-out documents: "):
        held_out_rows(documents, tokenizer, 9, 1)
