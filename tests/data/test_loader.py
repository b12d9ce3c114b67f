"""The loader: batches, its saved place without workers and with two, and two workers that share the corpus."""

import json
import multiprocessing
from collections import Counter
from itertools import islice, pairwise, takewhile

import pytest
import torch

from lol.data.loader import make_loader
from lol.data.order import DocumentOrder, Part, Place
from lol.data.packing import PackedDocuments
from lol.data.tokenizer import encode_documents
from lol.errors import UserError

TEXTS = [f"{k}: " + "the cat sat on the mat " * (k % 4) for k in range(40)]


def equal(batches, others) -> bool:
    return len(batches) == len(others) and all(
        torch.equal(batch[key], other[key]) for batch, other in zip(batches, others, strict=True) for key in batch
    )


def documents_of(ids: list[int]) -> list[tuple[int, ...]]:
    """The whole documents in a stream of token ids that begins with one; the last, which may be cut, is left out."""
    starts = [k for k, token in enumerate(ids) if token == 0]  # BOS
    return [tuple(ids[a:b]) for a, b in pairwise(starts)]


def documents_in_part(documents, part: Part) -> int:
    """How many documents of the first epoch a part has."""
    blocks = DocumentOrder(documents, "", seed=0, shuffle_buffer=10**6).blocks(part, Place())
    return sum(len(texts) for _, texts in takewhile(lambda block: block[0].epoch == 0, blocks))


def test_batches_are_the_rows_in_order(tokenizer, open_texts):
    documents = open_texts(TEXTS)
    batches = list(islice(make_loader(PackedDocuments(documents, tokenizer, 16), 4), 3))
    rows = list(islice(PackedDocuments(documents, tokenizer, 16), 12))
    for key in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([batch[key] for batch in batches]), torch.stack([row[key] for row in rows]))
    assert batches[0]["input_ids"].shape == (4, 16)


def test_global_generator_is_left_alone(tokenizer, open_texts):
    before = torch.get_rng_state()
    next(iter(make_loader(PackedDocuments(open_texts(TEXTS), tokenizer, 16), 4)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("number", [0, 1, 5, 60])
def test_saved_place_without_workers(tokenizer, open_texts, number):
    documents = open_texts(TEXTS, 2)

    def fresh():
        return make_loader(PackedDocuments(documents, tokenizer, 16, shuffle_buffer=6), 3)

    loader = fresh()
    batches = iter(loader)
    for _ in range(number):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = list(islice(batches, 20))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert equal(list(islice(resumed, 20)), expected)


def test_epoch_without_workers(tokenizer, open_texts):
    loader = make_loader(PackedDocuments(open_texts(TEXTS), tokenizer, 64), 64)
    batches = iter(loader)
    next(batches)
    assert loader.epoch == loader.dataset.epoch >= 2


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_two_workers_read_the_corpus_once_and_can_be_resumed(tokenizer, open_texts, shards):
    documents = open_texts(TEXTS, shards)

    def fresh():
        return make_loader(PackedDocuments(documents, tokenizer, 16, shuffle_buffer=6), 2, num_workers=2)

    loader = fresh()
    batches = iter(loader)
    given = [next(batches) for _ in range(7)]
    state = json.loads(json.dumps(loader.state_dict()))
    while loader.epoch < 1:
        given.append(next(batches))
    # batches come from the workers in turn; each worker's rows are its own stream of documents
    first_epochs: list[tuple[int, ...]] = []
    for worker in range(2):
        ids = torch.cat([batch["input_ids"].flatten() for batch in given[worker::2]]).tolist()
        first_epochs += documents_of(ids)[: documents_in_part(documents, Part(worker, 2))]
    assert Counter(first_epochs) == Counter(tuple(ids) for ids in encode_documents(tokenizer, TEXTS))
    del batches
    resumed = fresh()
    resumed.load_state_dict(state)
    assert equal(list(islice(resumed, 10)), given[7:17])


@pytest.mark.slow
def test_a_worker_without_documents_says_so(tokenizer, open_texts):
    loader = make_loader(PackedDocuments(open_texts(["only one"]), tokenizer, 4), 1, num_workers=2)
    with pytest.raises(UserError, match=r"^data: no document for reader 1 of 2 .*; use fewer workers") as caught:
        list(islice(loader, 4))
    # The worker that had no document may have ended by itself; the other one waits.
    assert multiprocessing.active_children()
    del loader, caught
    assert not multiprocessing.active_children(), "the workers wait for the garbage collector"


def test_state_is_for_the_same_workers_and_batch_size(tokenizer, open_texts):
    documents = open_texts(TEXTS)
    state = make_loader(PackedDocuments(documents, tokenizer, 16), 4).state_dict()
    with pytest.raises(UserError, match="num_workers 0, this run has 2; resume with num_workers 0"):
        make_loader(PackedDocuments(documents, tokenizer, 16), 4, num_workers=2).load_state_dict(state)
    with pytest.raises(UserError, match="batch_size 4, this run has 5"):
        make_loader(PackedDocuments(documents, tokenizer, 16), 5).load_state_dict(state)


def test_state_of_another_stream_is_refused(tokenizer, open_texts):
    documents = open_texts(TEXTS)
    state = make_loader(PackedDocuments(documents, tokenizer, 16), 4).state_dict()
    other = make_loader(PackedDocuments(documents, tokenizer, 16, seed=9), 4)
    other.load_state_dict(state)  # torchdata looks into it when the iterator is made
    with pytest.raises(UserError, match="made with seed 0, this run has 9"):
        iter(other)


@pytest.mark.parametrize(("batch_size", "workers"), [(0, 0), (1, -1)])
def test_impossible_loader(tokenizer, open_texts, batch_size, workers):
    with pytest.raises(UserError, match="at least 1 and 0 are needed"):
        make_loader(PackedDocuments(open_texts(TEXTS), tokenizer, 16), batch_size, workers)
