"""Mixing: shares of tokens whatever the documents' lengths, exhausted sources, exact resuming, one split per source."""

import json
from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lol.data.loader import make_loader
from lol.data.mixture import (
    MixedRows,
    Source,
    held_out_rows_by_source,
    mixed_texts,
    open_sources,
    parse_shares,
    split_sources,
)
from lol.data.packing import PackedDocuments, held_out_rows
from lol.data.text import open_documents, split_documents
from lol.errors import UserError

REUSE_FOLDER = [HealthCheck.function_scoped_fixture]
# Words that tell the sources apart, and how many make a document; the last source has two documents only.
KINDS = {"cat": (3, 60), "dog": (40, 60), "mat": (300, 60), "the": (5, 2)}


@pytest.fixture
def files(write_rows) -> list[str]:
    """A source for each kind: documents of very different lengths."""
    return [
        str(write_rows(f"{word}.jsonl", [f" {word}" * words + f" {number}" for number in range(documents)]))
        for word, (words, documents) in KINDS.items()
    ]


def kind_of(tokenizer, row) -> str:
    """The one kind that the row's text is of."""
    text = tokenizer.decode(row["input_ids"], skip_special_tokens=True)
    kinds = Counter(letter for letter in text if letter in "cdmh")
    assert len(kinds) == 1, text
    return {"c": "cat", "d": "dog", "m": "mat", "h": "the"}[next(iter(kinds))]


def equal(rows, others) -> bool:
    return len(rows) == len(others) and all(
        torch.equal(row[key], other[key]) for row, other in zip(rows, others, strict=True) for key in row
    )


# The shares


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(5, 3, 1.5, 0.5), (1, 1, 1, 1)])
def test_weights_are_shares_of_tokens(tokenizer, files, weights):
    """Within 1 % of each share after 2,000 rows, and within three rows at any time."""
    given = [f"{file}={weight}" for file, weight in zip(files, weights, strict=True)]
    rows = MixedRows(open_sources(given), tokenizer, 24)
    counts = Counter()
    for number, row in enumerate(islice(rows, 2000), start=1):
        counts[kind_of(tokenizer, row)] += len(row["input_ids"])
        for word, weight in zip(KINDS, weights, strict=True):
            assert abs(counts[word] / 24 - number * weight / sum(weights)) < 3
    for word, weight in zip(KINDS, weights, strict=True):
        assert counts[word] / sum(counts.values()) == pytest.approx(weight / sum(weights), rel=0.01)
    assert list(rows.given.values()) == [counts[word] // 24 for word in KINDS]


def test_ten_sources_without_weights_are_equal(tokenizer, write_rows):
    files = [str(write_rows(f"{k}.jsonl", ["the cat " * (k + 1)] * 9)) for k in range(10)]
    rows = MixedRows(open_sources(files), tokenizer, 8)
    for _ in islice(rows, 500):
        pass
    assert set(rows.given.values()) <= {49, 50, 51}


def test_an_exhausted_source_begins_again_and_the_loader_counts_its_epochs(tokenizer, files):
    loader = make_loader(MixedRows(open_sources(files), tokenizer, 24), 4)
    for _ in islice(iter(loader), 60):
        pass
    epochs = loader.epochs
    assert list(epochs) == files
    assert epochs[files[3]] > 20
    assert epochs[files[2]] == 0
    assert loader.epoch == 0


def test_mixing_leaves_a_sources_own_rows_as_they_are(tokenizer, files):
    mixed = MixedRows(open_sources(files), tokenizer, 24, seed=5, shuffle_buffer=7)
    rows = [row for row in islice(mixed, 200) if kind_of(tokenizer, row) == "cat"]
    alone = PackedDocuments(open_documents(files[0]), tokenizer, 24, seed=5, shuffle_buffer=7)
    assert len(rows) > 40
    assert equal(rows, list(islice(alone, len(rows))))


def test_sources_of_equally_many_documents_are_not_in_one_order(tokenizer, write_rows):
    """Translations of one corpus, line by line: drawn alike, a text and its translation would come together."""
    files = [str(write_rows(f"{word}.jsonl", [f"{word} {k:02}" for k in range(50)])) for word in ("cat", "dog")]
    mixed = MixedRows(open_sources(files), tokenizer, 8)
    rows = list(islice(mixed, 60))
    text = {word: [] for word in ("cat", "dog")}
    for row in rows:
        decoded = tokenizer.decode(row["input_ids"], skip_special_tokens=True)
        text["cat" if "c" in decoded else "dog"].append("".join(letter for letter in decoded if letter.isdigit()))
    first, second = ("".join(parts)[:40] for parts in text.values())
    assert first != second


def test_the_order_is_a_function_of_the_seed_and_ranks_begin_apart(tokenizer, files):
    def kinds(**settings):
        return [kind_of(tokenizer, row) for row in islice(MixedRows(sources, tokenizer, 24, **settings), 40)]

    sources = open_sources(files[:3])
    assert kinds(seed=1) == kinds(seed=1) != kinds(seed=2)
    ranks = [kinds(rank=rank, world_size=8) for rank in range(8)]
    assert len({rank[0] for rank in ranks}) > 1


# Resuming


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=REUSE_FOLDER)
@given(number=st.integers(0, 150), world=st.sampled_from([1, 2]), buffer=st.sampled_from([1, 7, 100]))
def test_resuming_goes_on_with_exactly_the_next_row(tokenizer, files, number, world, buffer):
    sources = open_sources([f"{file}={weight}" for file, weight in zip(files, (5, 3, 1, 1), strict=True)])

    def fresh():
        return MixedRows(sources, tokenizer, 24, seed=3, shuffle_buffer=buffer, rank=world - 1, world_size=world)

    mixed = fresh()
    rows = iter(mixed)
    for _ in range(number):
        next(rows)
    state = json.loads(json.dumps(mixed.state_dict()))
    expected = list(islice(rows, 60))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert equal(list(islice(resumed, 60)), expected)


@pytest.mark.slow
def test_resuming_with_two_workers_gives_the_same_batches(tokenizer, files):
    sources = open_sources([f"{file}={weight}" for file, weight in zip(files, (5, 3, 1, 1), strict=True)])

    def fresh():
        return make_loader(MixedRows(sources, tokenizer, 24, shuffle_buffer=7), 3, num_workers=2)

    loader = fresh()
    batches = iter(loader)
    for _ in range(11):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    expected, epochs = list(islice(batches, 12)), loader.epochs
    del batches
    resumed = fresh()
    resumed.load_state_dict(state)
    assert equal(list(islice(resumed, 12)), expected)
    assert epochs[files[3]] > 0 == epochs[files[2]]


def test_another_mixture_is_refused(tokenizer, files):
    state = MixedRows(open_sources(files[:2]), tokenizer, 24).state_dict()
    for others in (files[:3], files[1::-1], [f"{files[0]}=1", f"{files[1]}=2"]):
        with pytest.raises(UserError, match=r"made with the sources .*cat\.jsonl=0\.5 .*this run has"):
            MixedRows(open_sources(others), tokenizer, 24).load_state_dict(state)


def test_a_place_of_an_earlier_version_is_refused(tokenizer, files):
    with pytest.raises(UserError, match="another version of lol"):
        MixedRows(open_sources(files[0]), tokenizer, 24).load_state_dict({"made_with": {}, "cursor": {}})


def test_a_new_iterator_goes_on(tokenizer, files):
    sources = open_sources(files)
    mixed = MixedRows(sources, tokenizer, 24)
    rows = list(islice(mixed, 7)) + list(islice(mixed, 9))
    assert equal(rows, list(islice(MixedRows(sources, tokenizer, 24), 16)))


# Held out


def test_every_source_is_split_by_itself(files):
    train, held_out = split_sources(open_sources(files[:3]), 0.3)
    for file, kept, out in zip(files, train, held_out, strict=False):
        alone = split_documents(open_documents(file), 0.3)
        assert (kept.name, out.name, kept.share) == (file, file, pytest.approx(1 / 3))
        for side, documents in zip((kept, out), alone, strict=True):
            assert [row["text"] for row in side.documents] == [row["text"] for row in documents]


def test_a_source_that_cannot_be_split_is_named(files):
    with pytest.raises(UserError, match=r"the\.jsonl: no held-out document is left"):
        split_sources(open_sources(files), 0.05)


def test_held_out_rows_are_shared_among_the_sources(tokenizer, files):
    sources = open_sources([f"{files[1]}=3", f"{files[2]}=1", f"{files[0]}=0.01"])
    rows = held_out_rows_by_source(sources, tokenizer, 24, 8)
    assert {name: len(some) for name, some in rows.items()} == {files[1]: 6, files[2]: 2, files[0]: 1}
    for file, word in ((files[1], "dog"), (files[2], "mat"), (files[0], "cat")):
        assert {kind_of(tokenizer, row) for row in rows[file]} == {word}
    alone = held_out_rows_by_source(open_sources(files[1]), tokenizer, 24, 8)
    assert equal(alone[files[1]], held_out_rows(open_documents(files[1]), tokenizer, 24, 8))
    with pytest.raises(UserError, match=r"the\.jsonl: the held-out documents do not fill one row"):
        held_out_rows_by_source(open_sources(files), tokenizer, 400, 8)


def test_texts_are_mixed_by_characters_and_each_comes_once(write_rows):
    lengths = {"a": 10, "b": 30, "c": 90}
    files = {
        word: str(write_rows(f"{word}.jsonl", [word * length + str(k) for k in range(100)]))
        for word, length in lengths.items()
    }
    sources = open_sources([f"{files['a']}=1", f"{files['b']}=3", f"{files['c']}=1"])
    texts = list(mixed_texts(sources))
    assert Counter(texts) == Counter(row["text"] for source in sources for row in source.documents)
    # as long as no source has ended, none is further from its share than by one of the longest texts
    given = Counter()
    for text in texts[:100]:
        given[text[0]] += len(text)
        for word, share in (("a", 0.2), ("b", 0.6), ("c", 0.2)):
            assert abs(given[word] - share * given.total()) <= 92
    assert given.total() > 1000


# What is written


@pytest.mark.parametrize(
    ("written", "shares"),
    [
        ("de.txt", {"de.txt": 1.0}),
        ("a=3", {"a=3": 1.0}),
        (("de.txt", "en.txt"), {"de.txt": 0.5, "en.txt": 0.5}),
        (["hf:a:b:c=1", "x=y=3"], {"hf:a:b:c": 0.25, "x=y": 0.75}),
        (("a=b.txt", "stdlib"), {"a=b.txt": 0.5, "stdlib": 0.5}),
        (("de.txt=0.5",), {"de.txt": 1.0}),
    ],
)
def test_sources_and_weights_are_read(written, shares):
    assert parse_shares(written) == shares


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ((), "no source of text is given"),
        (("a=1", "b=0"), "b=0: a weight is a number above 0; leave out"),
        (("a=1", "b=-2"), "b=-2: a weight"),
        (("a=nan", "b=1"), "a=nan: a weight"),
        (("a=1", "b=inf"), "b=inf: a weight"),
        (("a=1", "b"), "b has no weight and others have; write b=WEIGHT"),
        (("a", "b", "a"), "a is given 2 times"),
        (("a=1", "a=2"), "a is given 2 times"),
    ],
)
def test_mixtures_that_mean_nothing(written, message):
    with pytest.raises(UserError, match=message):
        parse_shares(written)


def test_the_second_source_is_looked_for_too(files):
    with pytest.raises(UserError, match=r"no/where: no such file"):
        open_sources([files[0], "no/where"])


def test_a_source_keeps_its_documents(files):
    (source,) = open_sources(files[0])
    assert isinstance(source, Source)
    assert [row["text"] for row in source.documents] == [row["text"] for row in open_documents(files[0])]
