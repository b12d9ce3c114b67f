"""Streaming: hub data sets of many Parquet files, a bounded part in memory, and resuming in the middle of a file."""

import json
from collections import Counter
from itertools import islice, takewhile

import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets import IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from lol.data.loader import make_loader
from lol.data.order import READ_BATCH, DocumentOrder, Part, Place
from lol.data.packing import PackedDocuments
from lol.data.text import open_documents, split_documents

FILES, ROWS = 5, 150


@pytest.fixture(scope="module")
def hub_documents(tmp_path_factory) -> IterableDataset:
    """Training documents of a local hub data set: five files, row groups of 40, an empty row here and there."""
    folder = tmp_path_factory.mktemp("hub")
    for file in range(FILES):
        texts = ["" if row % 17 == 5 else f"{file}-{row} " + "the cat " * (row % 5) for row in range(ROWS)]
        table = pyarrow.table({"text": texts, "number": range(ROWS)})
        pyarrow.parquet.write_table(table, folder / f"train-{file:05}-of-{FILES:05}.parquet", row_group_size=40)
    return split_documents(open_documents(f"hf:{folder}"), 0.1)[0]


def test_files_are_shards(hub_documents):
    assert hub_documents.num_shards == FILES


@pytest.mark.parametrize("parts", [3, 5])
def test_ranks_and_workers_share_a_hub_data_set_without_overlap_or_loss(hub_documents, parts):
    """Whether or not they divide its files, in every epoch, each in an order of its own."""
    every = Counter(row["text"] for row in hub_documents)
    orders = []
    for epoch in (0, 1):
        found: list[str] = []
        for index in range(parts):
            blocks = DocumentOrder(hub_documents, "", seed=0, shuffle_buffer=50).blocks(
                Part(index, parts), Place(epoch)
            )
            for _, documents in takewhile(lambda block: block[0].epoch == epoch, blocks):  # noqa: B023
                found += [document.text for document in documents]
        assert Counter(found) == every
        orders.append(found)
    assert orders[0] != orders[1] != list(every)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_resuming_a_hub_stream_goes_on_with_exactly_the_next_row(tokenizer, hub_documents, data):
    world = data.draw(st.sampled_from([1, 2, 3]))
    buffer = data.draw(st.sampled_from([1, 50, 90, 10_000]))
    rank = data.draw(st.integers(0, world - 1))
    number = data.draw(st.integers(0, 900 // world))

    def fresh():
        return PackedDocuments(hub_documents, tokenizer, 16, seed=3, shuffle_buffer=buffer, rank=rank, world_size=world)

    packed = fresh()
    rows = iter(packed)
    for _ in range(number):
        next(rows)
    state = json.loads(json.dumps(packed.state_dict()))
    expected = list(islice(rows, 150))
    resumed = fresh()
    resumed.load_state_dict(state)
    found = list(islice(resumed, 150))
    for key in ("input_ids", "position_ids"):
        assert torch.equal(torch.stack([row[key] for row in found]), torch.stack([row[key] for row in expected]))


@pytest.mark.slow
def test_resuming_a_hub_stream_with_two_workers_of_the_second_rank(tokenizer, hub_documents):
    """Five files for four readers, the place in the middle of the first epoch."""

    def fresh():
        packed = PackedDocuments(hub_documents, tokenizer, 16, shuffle_buffer=30, rank=1, world_size=2)
        return make_loader(packed, 3, num_workers=2)

    loader = fresh()
    batches = iter(loader)
    for _ in range(17):
        next(batches)
    assert loader.epochs == {"data": 0}
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [next(batches)["input_ids"] for _ in range(60)]
    assert loader.epochs["data"] > 0
    del batches
    resumed = fresh()
    resumed.load_state_dict(state)
    for batch, wanted in zip(resumed, expected, strict=False):
        assert torch.equal(batch["input_ids"], wanted)


class Counted:
    """A source of four shards of 1,000 documents that counts what is read of each."""

    def __init__(self) -> None:
        self.read = dict.fromkeys(range(4), 0)
        self.seen = 0
        documents = IterableDataset.from_generator(self._generate, gen_kwargs={"shards": list(range(4))})
        self.documents = documents.map(self._see)

    def _generate(self, shards: list[int]):
        for shard in shards:
            for document in range(1000):
                self.read[shard] += 1
                yield {"text": f"{shard}-{document}"}

    def _see(self, row: dict) -> dict:
        self.seen += 1
        return row


def test_only_a_block_is_read_ahead(tokenizer):
    """Memory holds the block that is in use, whatever the length of the source."""
    source = Counted()
    packed = PackedDocuments(source.documents, tokenizer, 32, shuffle_buffer=100)
    for used, _row in enumerate(islice(packed, 1500), start=1):
        # a document has at least five tokens
        assert sum(source.read.values()) <= used * 32 / 5 + 100 + READ_BATCH
    assert sum(source.read.values()) > 2000


def test_resuming_opens_no_earlier_shard_and_processes_no_earlier_document(tokenizer):
    source = Counted()
    packed = PackedDocuments(source.documents, tokenizer, 32, shuffle_buffer=100)
    rows = iter(packed)
    while packed.state_dict()["cursor"]["block"] | {"source": None} != {
        "epoch": 0, "shard": 2, "document": 700, "read": 640, "source": None,
    }:  # fmt: skip
        next(rows)
    state = packed.state_dict()
    again = Counted()
    resumed = PackedDocuments(again.documents, tokenizer, 32, shuffle_buffer=100)
    resumed.load_state_dict(state)
    assert torch.equal(next(iter(resumed))["input_ids"], next(rows)["input_ids"])
    assert sorted(again.read.values())[:3] == [0, 0, 0]
    assert again.seen <= 100 + 2 * READ_BATCH
