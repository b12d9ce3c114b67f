"""Packing: what is in the rows, the order, exact resuming, the held-out rows, and that held-out tokens stay out."""

import json
from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lol.data.packing import PackedDocuments, held_out_rows, token_documents
from lol.data.text import open_documents, split_documents
from lol.data.tokenizer import encode_documents, train_tokenizer
from lol.errors import UserError

TEXTS = [f"{k}: " + "the cat sat on the mat " * (k % 4) for k in range(23)]
REUSE_FOLDER = [HealthCheck.function_scoped_fixture]


def take(packed, number: int) -> list[dict]:
    return list(islice(iter(packed), number))


def equal(rows, others) -> bool:
    return len(rows) == len(others) and all(
        torch.equal(row[key], other[key]) for row, other in zip(rows, others, strict=True) for key in row
    )


def documents_in(rows) -> list[tuple[int, ...]]:
    """The documents of a stream of rows, put together again from their parts; the last may be incomplete."""
    ids = torch.cat([row["input_ids"] for row in rows]).tolist()
    documents: list[list[int]] = []
    for token in ids:
        if token == 0:  # BOS
            documents.append([])
        documents[-1].append(token)
    return [tuple(document) for document in documents]


@pytest.fixture
def encoded(tokenizer) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in encode_documents(tokenizer, TEXTS)]


# What is in the rows


@pytest.mark.parametrize("length", [2, 7, 64, 1000])
@pytest.mark.parametrize("shuffle_buffer", [1, 5, 100])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_document_is_in_the_rows_once_per_epoch(tokenizer, open_texts, encoded, length, shuffle_buffer, shards):
    packed = PackedDocuments(open_texts(TEXTS, shards), tokenizer, length, shuffle_buffer=shuffle_buffer)
    total = sum(map(len, encoded))
    rows = take(packed, 3 * total // length + 1)
    found = documents_in(rows)
    for epoch in range(3):
        part = found[len(TEXTS) * epoch : len(TEXTS) * (epoch + 1)]
        if epoch == 2 and len(found) == 3 * len(TEXTS) and 3 * total % length:
            part = part[:-1]  # the last of three epochs may end in a row that is not there yet
            assert not Counter(part) - Counter(encoded)
        else:
            assert Counter(part) == Counter(encoded)


def test_rows_are_long_tensors_of_the_context_length(tokenizer, open_texts):
    for row in take(PackedDocuments(open_texts(TEXTS), tokenizer, 33), 20):
        assert row.keys() == {"input_ids", "position_ids"}
        for tensor in row.values():
            assert tensor.shape == (33,)
            assert tensor.dtype == torch.int64


@pytest.mark.parametrize("length", [2, 7, 64])
def test_positions_count_from_every_document_and_row_start(tokenizer, open_texts, length):
    for row in take(PackedDocuments(open_texts(TEXTS), tokenizer, length), 60):
        expected, position = [], 0
        for index, token in enumerate(row["input_ids"].tolist()):
            position = 0 if index == 0 or token == 0 else position + 1  # 0 is BOS
            expected.append(position)
        assert row["position_ids"].tolist() == expected


def test_a_row_that_an_epoch_leaves_is_filled_by_the_next(tokenizer, open_texts, encoded):
    total = sum(map(len, encoded))
    length = total - 3
    packed = PackedDocuments(open_texts(TEXTS), tokenizer, length)
    assert total % length == 3
    first, second = take(packed, 2)
    assert sum(map(len, documents_in([first, second])[: len(TEXTS)])) == total
    assert documents_in([first, second])[len(TEXTS)][0] == 0


def test_epoch_counts_passes(tokenizer, open_texts, encoded):
    total = sum(map(len, encoded))
    packed = PackedDocuments(open_texts(TEXTS), tokenizer, total // 2)
    epochs = []
    for _ in zip(packed, range(7), strict=False):
        epochs.append(packed.epoch)
    assert epochs[0] == 0
    assert epochs == sorted(epochs)
    assert epochs[6] in (2, 3)


# The order


def order_of(packed) -> list[tuple[int, ...]]:
    total = sum(len(ids) for ids in encode_documents(packed.tokenizer, TEXTS))
    return documents_in(take(packed, total // packed.context_length + 1))[: len(TEXTS)]


def test_order_is_a_function_of_seed_and_epoch(tokenizer, open_texts):
    documents = open_texts(TEXTS, 3)

    def order(seed):
        return order_of(PackedDocuments(documents, tokenizer, 5, seed=seed, shuffle_buffer=6))

    assert order(0) == order(0)
    assert order(0) != order(1)


@pytest.mark.parametrize(("shards", "shuffle_buffer"), [(1, 100), (len(TEXTS), 1)])
def test_epochs_have_different_orders(tokenizer, open_texts, encoded, shards, shuffle_buffer):
    """Once the order inside a block does it, once the order of the shards."""
    packed = PackedDocuments(open_texts(TEXTS, shards), tokenizer, 5, shuffle_buffer=shuffle_buffer)
    found = documents_in(take(packed, 2 * sum(map(len, encoded)) // 5))
    assert found[:20] != found[len(TEXTS) : len(TEXTS) + 20]


def test_order_leaves_the_global_generators_alone_and_ignores_them(tokenizer, open_texts):
    documents = open_texts(TEXTS)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = order_of(PackedDocuments(documents, tokenizer, 5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert order_of(PackedDocuments(documents, tokenizer, 5)) == first


def test_a_buffer_of_one_keeps_the_order_and_a_larger_one_does_not(tokenizer, open_texts, encoded):
    documents = open_texts(TEXTS)
    assert order_of(PackedDocuments(documents, tokenizer, 5, shuffle_buffer=1)) == encoded
    shuffled = order_of(PackedDocuments(documents, tokenizer, 5, shuffle_buffer=4))
    assert shuffled != encoded
    # a document moves within its block of four only
    for block in range(0, len(TEXTS), 4):
        assert set(shuffled[block : block + 4]) == set(encoded[block : block + 4])


def test_shards_are_in_random_order(tokenizer, open_texts, encoded):
    documents = open_texts(TEXTS, 23)
    orders = [order_of(PackedDocuments(documents, tokenizer, 5, seed=seed, shuffle_buffer=1)) for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert orders[0] != encoded


# Resuming


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=REUSE_FOLDER)
@given(data=st.data())
def test_resuming_goes_on_with_exactly_the_next_row(tokenizer, open_texts, data):
    shards = data.draw(st.sampled_from([1, 2, 5]))
    length = data.draw(st.sampled_from([2, 5, 16, 400]))
    buffer = data.draw(st.sampled_from([1, 4, 23, 50]))
    documents = open_texts(TEXTS, shards)
    total = sum(len(ids) for ids in encode_documents(tokenizer, TEXTS))
    number = data.draw(st.integers(0, 3 * total // length + 1))

    def fresh():
        return PackedDocuments(documents, tokenizer, length, seed=3, shuffle_buffer=buffer)

    packed = fresh()
    rows = iter(packed)
    for _ in range(number):
        next(rows)
    state = json.loads(json.dumps(packed.state_dict()))
    expected = list(islice(rows, 2 * total // length))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert equal(take(resumed, len(expected)), expected)


def test_a_new_iterator_goes_on(tokenizer, open_texts):
    documents = open_texts(TEXTS)
    packed = PackedDocuments(documents, tokenizer, 16)
    rows = take(packed, 3) + take(packed, 4)
    assert equal(rows, take(PackedDocuments(documents, tokenizer, 16), 7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "made with seed 0, this run has 1"),
        ({"context_length": 9}, "made with context_length 8, this run has 9"),
        ({"shuffle_buffer": 3}, "made with shuffle_buffer 2048, this run has 3"),
    ],
)
def test_a_place_in_another_stream_is_refused(tokenizer, open_texts, change, message):
    documents = open_texts(TEXTS)
    state = PackedDocuments(documents, tokenizer, 8).state_dict()
    other = PackedDocuments(documents, tokenizer, **({"context_length": 8} | change))
    with pytest.raises(UserError, match=message):
        other.load_state_dict(state)


def test_a_place_in_other_data_or_of_another_tokenizer_is_refused(tokenizer, open_texts):
    state = PackedDocuments(open_texts(TEXTS), tokenizer, 8).state_dict()
    with pytest.raises(UserError, match="shards 1, this run has 2"):
        PackedDocuments(open_texts(TEXTS, 2), tokenizer, 8).load_state_dict(state)
    with pytest.raises(UserError, match="vocabulary_size"):
        PackedDocuments(open_texts(TEXTS), train_tokenizer(["a"], 259), 8).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_length": 1}, "context length is 1; a row needs at least 2"),
        ({"context_length": 8, "shuffle_buffer": 0}, "at least 1 document"),
    ],
)
def test_impossible_settings(tokenizer, open_texts, settings, message):
    with pytest.raises(UserError, match=message):
        PackedDocuments(open_texts(TEXTS), tokenizer, **settings)


def test_documents_that_are_gone_are_an_error_and_no_endless_loop(tokenizer, open_texts):
    documents = open_texts(TEXTS).filter(lambda text: text == "gone", input_columns=["text"])
    with pytest.raises(UserError, match="data: no document for reader 0 of 1"):
        next(iter(PackedDocuments(documents, tokenizer, 8)))


# Held-out rows


def test_held_out_rows_are_the_documents_in_reading_order(tokenizer, open_texts, encoded):
    rows = held_out_rows(open_texts(TEXTS), tokenizer, 16, 10**6)
    stream = [token for document in encoded for token in document]
    assert [token for row in rows for token in row["input_ids"].tolist()] == stream[: len(stream) // 16 * 16]
    assert len(rows) == len(stream) // 16
    assert rows[0]["position_ids"].tolist()[:3] == [0, 1, 2]


def test_held_out_rows_are_at_most_as_many_as_asked_for_and_spread(tokenizer, open_texts):
    documents = open_texts(TEXTS)
    every = held_out_rows(documents, tokenizer, 16, 10**6)
    some = held_out_rows(documents, tokenizer, 16, 5)
    assert equal(some, held_out_rows(documents, tokenizer, 16, 5))
    places = [next(k for k, row in enumerate(every) if equal([row], [one])) for one in some]
    assert places == [k * len(every) // 5 for k in range(5)]


def test_held_out_rows_read_a_bounded_part(tokenizer, open_texts):
    read = []
    documents = open_texts(TEXTS * 40).map(lambda row: read.append(1) or row)
    assert len(held_out_rows(documents, tokenizer, 16, 1)) == 1
    assert len(read) < len(TEXTS) * 20


@pytest.mark.parametrize(
    ("length", "number", "message"), [(10**6, 5, "do not fill one row of 1000000"), (8, 0, "at least 1 is needed")]
)
def test_no_held_out_row(tokenizer, open_texts, length, number, message):
    with pytest.raises(UserError, match=message):
        held_out_rows(open_texts(TEXTS), tokenizer, length, number)


def test_token_documents_are_all_documents_once(tokenizer, open_texts, encoded):
    assert [tuple(ids) for ids in token_documents(open_texts(TEXTS, 1), tokenizer)] == encoded


def test_no_token_of_a_held_out_document_is_trained_on(tmp_path, tokenizer):
    """End to end from a text file: each document is marked with a word of its own."""
    marks = [f"mark{k:04}x" for k in range(120)]
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{mark} the cat sat {mark}\n\n" for mark in marks))
    documents = open_documents(str(path), document_chars=20)
    train, held_out = split_documents(documents, 0.2)
    number = sum(len(ids) for ids in token_documents(train, tokenizer)) // 32 + 2
    trained = "".join(tokenizer.decode(row["input_ids"]) for row in take(PackedDocuments(train, tokenizer, 32), number))
    scored = "".join(tokenizer.decode(row["input_ids"]) for row in held_out_rows(held_out, tokenizer, 32, 10**6))
    seen_in_training = {mark for mark in marks if mark in trained}
    seen_in_scoring = {mark for mark in marks if mark in scored}
    assert len(seen_in_training) > 60
    assert len(seen_in_scoring) > 10
    assert not seen_in_training & seen_in_scoring
    assert len(seen_in_training | seen_in_scoring) > 115
