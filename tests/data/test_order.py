"""Parts: ranks and workers together read every document once, whatever the numbers; and none is left without rows."""

from collections import Counter
from itertools import islice, pairwise, takewhile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lol.data.loader import make_loader
from lol.data.order import DocumentOrder, Part, Place
from lol.data.packing import PackedDocuments
from lol.data.tokenizer import encode_documents
from lol.errors import UserError

TEXTS = [f"{k}: " + "the cat sat on the mat " * (k % 4) for k in range(37)]
REUSE_FOLDER = [HealthCheck.function_scoped_fixture]


def texts_of(documents, part: Part, epoch: int, *, shuffle_buffer: int = 5) -> list[str]:
    """A part's texts of one epoch."""
    blocks = DocumentOrder(documents, "", seed=0, shuffle_buffer=shuffle_buffer).blocks(part, Place(epoch))
    first = takewhile(lambda block: block[0].epoch == epoch, blocks)
    return [document.text for _, documents in first for document in documents]


# The cut, by itself


@settings(max_examples=40, deadline=None)
@given(number=st.integers(1, 12), parts=st.integers(1, 12), documents=st.integers(0, 30))
def test_every_document_belongs_to_exactly_one_part_which_opens_its_shard(number, parts, documents):
    every = [Part(index, parts) for index in range(parts)]
    for shard in range(number):
        for document in range(documents):
            owners = [part for part in every if part.owns(number, shard, document)]
            assert len(owners) == 1
            assert shard in owners[0].shards(number)


@given(number=st.integers(1, 60), parts=st.integers(1, 60))
def test_a_part_opens_few_shards_and_whole_ones_where_their_number_allows(number, parts):
    opened = [Part(index, parts).shards(number) for index in range(parts)]
    assert max(map(len, opened)) <= -(-number // parts) + 1
    if number % parts == 0:
        assert [shard for shards in opened for shard in shards] == list(range(number))


@settings(max_examples=40, deadline=None)
@given(number=st.integers(1, 9), parts=st.integers(1, 9), times=st.integers(1, 3))
def test_equal_shards_give_equal_parts(number, parts, times):
    places = [(shard, document) for shard in range(number) for document in range(times * parts)]
    sizes = {sum(Part(index, parts).owns(number, *place) for place in places) for index in range(parts)}
    assert sizes == {times * number}


# Real documents


@settings(max_examples=15, deadline=None, suppress_health_check=REUSE_FOLDER)
@given(shards=st.sampled_from([1, 2, 3, 7]), parts=st.integers(1, 9), buffer=st.sampled_from([1, 4, 100]))
def test_in_every_epoch_the_parts_are_the_data_set_once(open_texts, shards, parts, buffer):
    documents = open_texts(TEXTS, shards)
    for epoch in (0, 1):
        found = [
            text
            for index in range(parts)
            for text in texts_of(documents, Part(index, parts), epoch, shuffle_buffer=buffer)
        ]
        assert Counter(found) == Counter(TEXTS)


def test_the_cuts_lie_elsewhere_in_the_next_epoch(open_texts):
    documents = open_texts(TEXTS, 7)
    assert set(texts_of(documents, Part(0, 2), 0)) != set(texts_of(documents, Part(0, 2), 1))


def test_a_part_reads_its_own_shards_only(open_texts):
    read = []
    documents = open_texts(TEXTS, 7).map(lambda row: read.append(row["text"]) or row)
    assert documents.num_shards == 7
    next(DocumentOrder(documents, "", seed=0, shuffle_buffer=5).blocks(Part(2, 7), Place()))
    assert 0 < len(read) <= -(-len(TEXTS) // 7)


@pytest.mark.slow
def test_two_ranks_of_two_workers_give_every_document_once(tokenizer, open_texts):
    """Through the loader, whose workers find their part by themselves; five shards for four readers."""
    documents = open_texts(TEXTS, 5)
    found: list[tuple[int, ...]] = []
    for rank in range(2):
        packed = PackedDocuments(documents, tokenizer, 16, shuffle_buffer=6, rank=rank, world_size=2)
        loader = make_loader(packed, 2, num_workers=2)
        batches = iter(loader)
        given = [next(batches)["input_ids"].flatten()]
        while loader.epoch < 1:
            given.append(next(batches)["input_ids"].flatten())
        for worker in range(2):
            ids = torch.cat(given[worker::2]).tolist()
            number = len(texts_of(documents, Part(2 * rank + worker, 4), 0))
            starts = [k for k, token in enumerate(ids) if token == 0][: number + 1]  # BOS
            found += [tuple(ids[a:b]) for a, b in pairwise(starts)]
    assert Counter(found) == Counter(tuple(ids) for ids in encode_documents(tokenizer, TEXTS))


# Ranks that have more and ranks that have less


def test_a_rank_with_fewer_tokens_begins_again_and_waits_for_nobody(tokenizer, open_texts):
    """Two files, one of long texts: each rank has one of them in an epoch."""
    texts = ["the cat", "the cat sat on the mat " * 20] * 6
    ranks = [PackedDocuments(open_texts(texts, 2), tokenizer, 16, rank=rank, world_size=2) for rank in range(2)]
    epochs = []
    for _ in zip(*ranks, range(60), strict=False):
        epochs.append([rank.epoch for rank in ranks])
    assert epochs[-1][0] != epochs[-1][1]
    assert min(epochs[-1]) > 0


def test_a_rank_without_documents_in_one_epoch_takes_them_from_the_next(tokenizer, open_texts):
    """The second file is held out as a whole, so the rank that has it has nothing."""
    texts = [f"{'in' if k % 2 == 0 else 'out'} {k}" for k in range(8)]
    documents = open_texts(texts, 2).filter(lambda text: text.startswith("in"), input_columns=["text"])
    assert [bool(texts_of(documents, Part(0, 2), epoch)) for epoch in range(8)].count(False) > 0
    for rank in range(2):
        rows = islice(PackedDocuments(documents, tokenizer, 16, rank=rank, world_size=2), 100)
        assert sum(1 for _ in rows) == 100


def test_fewer_documents_than_ranks_names_the_source_and_the_fix(tokenizer, open_texts):
    packed = PackedDocuments(open_texts(["only one"]), tokenizer, 4, name="de.txt", rank=1, world_size=3)
    with pytest.raises(UserError, match=r"^de\.txt: no document for reader 1 of 3 .*fewer workers or ranks"):
        next(iter(packed))


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_ranks(tokenizer, open_texts, rank, world_size):
    with pytest.raises(UserError, match="ranks count from 0"):
        PackedDocuments(open_texts(TEXTS), tokenizer, 8, rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("change", "message"), [({"rank": 0}, "rank 1, this run has 0"), ({"world_size": 3}, "ranks 2, this run has 3")]
)
def test_a_place_of_another_rank_or_world_is_refused(tokenizer, open_texts, change, message):
    documents = open_texts(TEXTS)
    ranks = {"rank": 1, "world_size": 2}
    state = PackedDocuments(documents, tokenizer, 8, **ranks).state_dict()
    with pytest.raises(UserError, match=message):
        PackedDocuments(documents, tokenizer, 8, **ranks | change).load_state_dict(state)
