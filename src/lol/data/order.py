"""Which documents a process reads, and in which order.

**Order.** The order of an epoch is a function of (seed, epoch): the order of the shards, and inside it blocks of
`shuffle_buffer` documents, each block in an order of its own. A block is read, shuffled and used up before the next
one is read, so a place in the order is a few integers and what `datasets` keeps about the shard that is open, where a
buffer refilled one by one would have to be saved with its texts.

**Parts.** The S shards of an epoch, in its order, are an axis of length S; document i of the k-th lies at
k + (i mod P)/P. The axis is cut into P equal pieces, one for each of the P processes that read (ranks × workers). So
every document is in exactly one part whatever S and P, and a part opens at most ⌈S/P⌉ + 1 shards. Where P divides S a
part is whole shards. Elsewhere a cut may go through a shard; the parts beside it each read that shard and leave out
what is the others'. Each part goes through its own documents epoch after epoch and waits for no other, so
parts that differ in tokens differ in how many epochs they have seen after the same number of rows.
(Source: decided here. `datasets.distributed.split_dataset_by_node` has every node read every shard unless the number
of nodes divides that of the shards.)
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from datasets import IterableDataset

from lol.errors import UserError

# Documents per read of the source.
READ_BATCH = 64
# A part may be without a document in one epoch and have some in the next, where the cuts lie elsewhere.
_EMPTY_EPOCHS = 64


class Document(NamedTuple):
    """A document's text, and what only the router may read of it (None where the source has no such column)."""

    text: str
    router_only: str | None

    @classmethod
    def all_of(cls, batch: dict[str, list[str]]) -> list["Document"]:
        """The documents of a batch as `datasets` reads it."""
        hidden = batch.get("router_only", itertools.repeat(None))
        return [cls(*pair) for pair in zip(batch["text"], hidden, strict=False)]


@dataclasses.dataclass(frozen=True)
class Part:
    """The share of one of `parts` processes."""

    index: int = 0
    parts: int = 1

    def shards(self, number: int) -> range:
        """The places in the shards' order that this part reads, of `number`."""
        return range(self.index * number // self.parts, ((self.index + 1) * number - 1) // self.parts + 1)

    def owns(self, number: int, shard: int, document: int) -> bool:
        """Whether the document of that index, in the shard at that place in the order, belongs to this part."""
        return (shard * self.parts + document % self.parts) // number == self.index


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a block starts.

    epoch: from 0. shard: its place in the epoch's order of the shards. document: index in that shard of the block's
    first document. read: index of the first document of the read that brings it. source: `state_dict` of the shard's
    stream before that read; None at the shard's start.
    """

    epoch: int = 0
    shard: int = 0
    document: int = 0
    read: int = 0
    source: dict[str, Any] | None = None


class DocumentOrder:
    """The documents of one part, block after block and epoch after epoch, from any place on.

    Args:
        documents: with a column `text`, and `router_only` if it has that.
        name: of the source, for messages.
        seed: decides the order, together with the epoch.
        shuffle_buffer: documents per block, held in memory as text.
    """

    def __init__(self, documents: IterableDataset, name: str, seed: int, shuffle_buffer: int) -> None:
        self.documents = documents
        self.name = name
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer

    def blocks(self, part: Part, start: Place) -> Iterator[tuple[Place, list[Document]]]:
        """The part's blocks of at most `shuffle_buffer` documents in reading order, from the one at `start` on.

        Raises:
            UserError: the part has no document in several epochs in a row.
        """
        empty = 0
        for epoch in itertools.count(start.epoch):
            found = False
            for block in self._epoch(part, start if epoch == start.epoch else Place(epoch)):
                found = True
                yield block
            # The rest of the first epoch may be empty for being a rest.
            empty = 0 if found or epoch == start.epoch else empty + 1
            if empty == _EMPTY_EPOCHS:
                raise UserError(
                    f"{self.name}: no document for reader {part.index} of {part.parts} (ranks times workers); use"
                    " fewer workers or ranks, or give more documents"
                )

    def permutation(self, part: Part, block: Place, length: int) -> list[int]:
        """The order in which a block's documents are used."""
        return permutation(length, self.seed, block.epoch, block.shard, block.document, part.index, part.parts)

    def _epoch(self, part: Part, start: Place) -> Iterator[tuple[Place, list[Document]]]:
        block, documents = start, []
        for place, document in self._read(part, start):
            if not documents:
                block = place
            documents.append(document)
            if len(documents) == self.shuffle_buffer:
                yield block, documents
                documents = []
        if documents:
            yield block, documents

    def _read(self, part: Part, start: Place) -> Iterator[tuple[Place, Document]]:
        """The part's documents of one epoch from `start` on, each with its place."""
        number = self.documents.num_shards
        order = permutation(number, self.seed, start.epoch)
        for shard in part.shards(number):
            if shard < start.shard:
                continue
            first = start if shard == start.shard else Place(start.epoch, shard)
            stream = self.documents.shard(number, order[shard], contiguous=False)
            if first.source is not None:
                stream.load_state_dict(first.source)
            read, source = first.read, first.source
            # `iter` is what datasets does not split among a DataLoader's workers on its own.
            for batch in stream.iter(READ_BATCH):
                for index, document in enumerate(Document.all_of(batch), start=read):
                    if index >= first.document and part.owns(number, shard, index):
                        yield Place(start.epoch, shard, index, read, source), document
                read, source = read + len(batch["text"]), stream.state_dict()


def permutation(length: int, *key: int) -> list[int]:
    """A random order of range(length), a function of the integers in `key`."""
    return torch.randperm(length, generator=generator_of(*key)).tolist()


def generator_of(*key: int) -> torch.Generator:
    """A generator whose numbers are a function of the integers in `key`."""
    return generator_named(repr(key))


def generator_named(name: str) -> torch.Generator:
    """A generator whose numbers are a function of a name."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
