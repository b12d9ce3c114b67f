"""Documents → rows of token ids, packed without padding, from a place that can be saved.

The stream is every document (BOS + tokens + EOS), epoch after epoch, cut into rows of n tokens. `position_ids` count
from 0 in each document; a document that runs over a row's end goes on in the next row and counts from 0 again there,
for no state crosses rows. A row that an epoch's last document does not fill is filled by the next epoch's first: each
token is in exactly one row per epoch. `lol.data.order` says which documents come when.

**Router-only tokens.** Where the documents have a column `router_only`, rows have `router_only_ids` too, -1 at ordinary
tokens. The column's tokens stand behind the first token of their document, and behind the first of each part of one
that is cut at a row's end, for the rest is a document to the model, whose router knows of nothing before it. So the
targets are those of rows without them. `input_ids` has BOS at these places: whoever reads it alone learns nothing.
(Decided here.)

**What is scored.** With `scored_after`, a word that is one token, only what follows it in its document is a target:
rows have `labels` too, which are the ids there and -100 elsewhere. Of a document that is cut at a row's end, a later
part has no such word, and none of it is a target. (Decided here.)
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from datasets import IterableDataset
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerFast

from lol.data.order import READ_BATCH, Document, DocumentOrder, Part, Place
from lol.data.tokenizer import encode_documents, encode_texts
from lol.errors import UserError
from lol.model.lm import IGNORED_LABEL

# `input_ids`, `position_ids` and, of sources that have some, `router_only_ids` as the model takes them, and `labels`
# where not every token is one: (n,) for a row, (batch, n) for a batch of rows.
Row = dict[str, Int64[Tensor, "..."]]
Mark = TypeVar("Mark")
# Documents per call of the tokenizer.
_BATCH = 64
# Of how many times as many rows as asked for the held-out rows are taken, evenly spread.
_SPREAD = 16


class _Encoded(NamedTuple):
    """A document as token ids (BOS + tokens + EOS), and what only the router reads of it (None without the column)."""

    ids: list[int]
    router_only: list[int] | None


@dataclasses.dataclass(frozen=True)
class _Cursor:
    """A place in the stream.

    block: where its block starts. used: documents of the shuffled block that are in rows as a whole. offset: tokens of
    the next that are in rows, router-only ones not counted.
    """

    block: Place = dataclasses.field(default_factory=Place)
    used: int = 0
    offset: int = 0


class PackedDocuments(TorchIterableDataset):
    """An endless stream of rows; saving `state_dict()` after a row and loading it goes on with the next row exactly.

    Iterating goes on from the current place, a new iterator too; `epoch` is the one that the next token comes from.
    Where several processes read, each gives the rows of its own part of the documents, of parts that are disjoint and
    together everything: in worker w of k of rank r of R, part r·k + w of R·k. The state is JSON and is for the same
    ranks and workers.

    Args:
        documents: with a column `text`, and `router_only` if it has that, as `open_documents` and `split_documents`
            return them.
        tokenizer: see `lol.data.tokenizer` for what becomes of the ends of a document.
        context_length: n, tokens per row.
        seed: decides the order, together with the epoch.
        shuffle_buffer: documents per block, held in memory as text; 1 leaves the order inside a shard as it is.
        scored_after: the word behind which targets begin; None: everything is one.
        name: of the source, for messages and logs.
        rank: this process among those that train together, from 0.
        world_size: how many those are.
    """

    def __init__(
        self,
        documents: IterableDataset,
        tokenizer: PreTrainedTokenizerFast,
        context_length: int,
        *,
        seed: int = 0,
        shuffle_buffer: int = 2048,
        scored_after: str | None = None,
        name: str = "data",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if context_length < 2:
            raise UserError(f"the context length is {context_length}; a row needs at least 2 tokens to predict one")
        if shuffle_buffer < 1:
            raise UserError(f"the shuffle buffer is {shuffle_buffer}; it must hold at least 1 document")
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank} of {world_size}: ranks count from 0 to {world_size - 1}")
        self.documents = documents
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer
        self.marker = _marker(tokenizer, scored_after)
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self._order = DocumentOrder(documents, name, seed, shuffle_buffer)
        self._cursor = _Cursor()

    @property
    def epoch(self) -> int:
        """Passes over this process's documents that are complete."""
        return self._cursor.block.epoch

    @property
    def part(self) -> Part:
        """Which part of the documents this process reads; it is another one in a DataLoader's worker."""
        worker, workers = worker_of()
        return Part(self.rank * workers + worker, self.world_size * workers)

    def __iter__(self) -> Iterator[Row]:
        start = self._cursor
        for row, cursor, offset in _pack(self._encoded(start), self.context_length, self.name, start.offset):
            self._cursor = dataclasses.replace(cursor, offset=offset)
            yield _score_after(self.marker, row)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last row, and what must be the same for it to mean anything."""
        return {"made_with": self._made_with(), "cursor": dataclasses.asdict(self._cursor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            UserError: the stream was another one (names what differs).
        """
        for name, value in self._made_with().items():
            if state["made_with"][name] != value:
                raise UserError(
                    f"the saved place in the data was made with {name} {state['made_with'][name]}, this run has"
                    f" {value}; resume with the same, or start a new run"
                )
        cursor = state["cursor"]
        self._cursor = _Cursor(**cursor | {"block": Place(**cursor["block"])})

    def _made_with(self) -> dict[str, int | str]:
        worker, workers = worker_of()
        return {
            "source": self.name,
            "seed": self.seed,
            "context_length": self.context_length,
            "shuffle_buffer": self.shuffle_buffer,
            "vocabulary_size": len(self.tokenizer),
            "shards": self.documents.num_shards,
            "ranks": self.world_size,
            "rank": self.rank,
            "workers": workers,
            "worker": worker,
        }

    def _encoded(self, start: _Cursor) -> Iterator[tuple[_Cursor, _Encoded]]:
        """Every document from `start` on, with the cursor that names it."""
        used, part = start.used, self.part
        for block, documents in self._order.blocks(part, start.block):
            order = self._order.permutation(part, block, len(documents))
            for first in range(used, len(documents), _BATCH):
                batch = [documents[index] for index in order[first : first + _BATCH]]
                for index, encoded in enumerate(_encode(self.tokenizer, batch), start=first):
                    yield _Cursor(block, index), encoded
            used = 0


def held_out_rows(
    documents: IterableDataset,
    tokenizer: PreTrainedTokenizerFast,
    context_length: int,
    max_rows: int,
    scored_after: str | None = None,
) -> list[Row]:
    """At most `max_rows` rows to evaluate on, the same ones every time: packed in reading order, without shuffling.

    Where there are more, they are taken evenly spread from the first 16·max_rows, so that they do not all come from
    the first documents. The last, incomplete row is left out. `scored_after` as in `PackedDocuments`.

    Raises:
        UserError: the documents do not fill one row, or `max_rows` is below 1.
    """
    if max_rows < 1:
        raise UserError(f"held-out rows: {max_rows} asked for; at least 1 is needed")
    encoded = ((None, document) for document in _read_all(documents, tokenizer))
    packed = _pack(encoded, context_length, "the held-out documents")
    marker = _marker(tokenizer, scored_after)
    rows = [_score_after(marker, row) for row, _, _ in itertools.islice(packed, _SPREAD * max_rows)]
    if not rows:
        raise UserError(
            f"the held-out documents do not fill one row of {context_length} tokens; raise the held-out fraction,"
            " give more text, or shorten the context"
        )
    if len(rows) <= max_rows:
        return rows
    return [rows[index * len(rows) // max_rows] for index in range(max_rows)]


def token_documents(documents: IterableDataset, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Every document once, in reading order, as token ids (BOS + tokens + EOS), without router-only ones."""
    for document in _read_all(documents, tokenizer):
        yield document.ids


def _read_all(documents: IterableDataset, tokenizer: PreTrainedTokenizerFast) -> Iterator[_Encoded]:
    for batch in documents.iter(READ_BATCH):
        yield from _encode(tokenizer, Document.all_of(batch))


def worker_of() -> tuple[int, int]:
    """(this worker, number of workers); (0, 1) outside of a DataLoader's worker."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> list[_Encoded]:
    """Documents as token ids; a source has router-only texts for all of them or for none."""
    ids = encode_documents(tokenizer, [document.text for document in documents])
    given = [document.router_only for document in documents if document.router_only is not None]
    hidden: list[list[int]] | list[None] = encode_texts(tokenizer, given) if given else [None] * len(documents)
    return [_Encoded(*pair) for pair in zip(ids, hidden, strict=True)]


def _pack(
    documents: Iterable[tuple[Mark, _Encoded]], length: int, name: str, offset: int = 0
) -> Iterator[tuple[Row, Mark, int]]:
    """Rows of `length`, each with the document that filled it and how many of its tokens are used by then.

    `offset` tokens of the first document are left out.

    Raises:
        UserError: router-only tokens that leave no target in a row; it begins with `name`.
    """
    row = _OpenRow(length)
    for place, document in documents:
        ids = np.asarray(document.ids, dtype=np.int64)
        hidden = np.asarray(document.router_only or [], dtype=np.int64)
        if len(hidden) > length - 2:
            raise UserError(
                f"{name}: a document has {len(hidden)} router-only tokens, which leave nothing to predict in a row of"
                f" {length}; shorten them, or raise the context length"
            )
        while offset < len(ids):
            offset += row.add(ids[offset : offset + length], hidden, filler=document.ids[0])
            if row.filled == length:
                yield row.close(document.router_only is not None), place, offset
                row = _OpenRow(length)
        offset = 0


def _marker(tokenizer: PreTrainedTokenizerFast, word: str | None) -> int | None:
    if word is None:
        return None
    [ids] = encode_texts(tokenizer, [word])
    if len(ids) != 1 or ids == [tokenizer.unk_token_id]:
        raise UserError(f"scored_after={word!r} is no single token of this tokenizer: name a word that is one")
    return ids[0]


def _score_after(marker: int | None, row: Row) -> Row:
    """The row with labels for what stands behind the marker in its document; as it is without a marker."""
    if marker is None:
        return row
    ids, places = row["input_ids"], torch.arange(len(row["input_ids"]))
    begins = torch.where(row["position_ids"] == 0, places, 0).cummax(0).values
    before = (ids == marker).cumsum(0) - (ids == marker).long()
    labels = ids.masked_fill(before == before[begins], IGNORED_LABEL)
    if "router_only_ids" in row:
        labels = labels.masked_fill(row["router_only_ids"] >= 0, IGNORED_LABEL)
    return row | {"labels": labels}


class _OpenRow:
    """A row that is being filled with documents; `filled` of its places are taken."""

    def __init__(self, length: int) -> None:
        self.ids = np.empty(length, dtype=np.int64)
        self.positions = np.empty(length, dtype=np.int64)
        self.router_only = np.full(length, -1, dtype=np.int64)
        self.filled = 0

    def add(self, ids: Int64[np.ndarray, "tokens"], hidden: Int64[np.ndarray, "hidden"], filler: int) -> int:
        """Take in the beginning of what is left of a document, and behind its first token what only the router reads;
        returns how many of `ids` had room."""
        start, room = self.filled, len(self.ids) - self.filled
        behind = min(len(hidden), room - 1)
        taken = min(len(ids), room - behind)
        rest = start + 1 + behind
        self.ids[start], self.ids[start + 1 : rest] = ids[0], filler
        self.router_only[start + 1 : rest] = hidden[:behind]
        self.filled = rest + taken - 1
        self.ids[rest : self.filled] = ids[1:taken]
        self.positions[start : self.filled] = np.arange(self.filled - start)
        return taken

    def close(self, with_router_only: bool) -> Row:
        row = {"input_ids": torch.from_numpy(self.ids), "position_ids": torch.from_numpy(self.positions)}
        return row | ({"router_only_ids": torch.from_numpy(self.router_only)} if with_router_only else {})
