"""Documents → rows of token ids, packed without padding, and the loader whose place in the stream can be saved.

The stream is every document (BOS + tokens + EOS), epoch after epoch, cut into rows of n tokens. `position_ids` count
from 0 in each document; a document that runs over a row's end goes on in the next row and counts from 0 again there,
for no state crosses rows. A row that an epoch's last document does not fill is filled by the next epoch's first: each
token is in exactly one row per epoch.

The order is a function of (seed, epoch): the order of the shards, and inside it blocks of `shuffle_buffer` documents,
each block in an order of its own. A block is read, shuffled and used up before the next one is read. So the place in
the stream is five integers, where a buffer that is refilled one by one would have to be saved with its texts.
Resuming reads the current shard up to the block's start again, which costs reading but no tokenizing.
"""

import dataclasses
import hashlib
import itertools
import multiprocessing
import signal
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import IterableDataset
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast

from lol.data.tokenizer import encode_documents
from lol.errors import UserError

# `input_ids` and `position_ids` as the model takes them: (n,) for a row, (batch, n) for a batch of rows.
Row = dict[str, Int64[Tensor, "..."]]
Place = TypeVar("Place")
# Documents per call of the tokenizer and per read of the source.
_BATCH = 64
# Of how many times as many rows as asked for the held-out rows are taken, evenly spread.
_SPREAD = 16


@dataclasses.dataclass(frozen=True)
class _Cursor:
    """A place in the stream: where its block starts, and what of the block is used.

    epoch: from 0. shard: index in the epoch's shard order. document: index in that shard of the block's first document.
    used: documents of the shuffled block that are in rows as a whole. offset: tokens of the next that are in rows.
    """

    epoch: int = 0
    shard: int = 0
    document: int = 0
    used: int = 0
    offset: int = 0


class PackedDocuments(TorchIterableDataset):
    """An endless stream of rows; saving `state_dict()` after a row and loading it goes on with the next row exactly.

    Iterating goes on from the current place, a new iterator too; `epoch` is the one that the next token comes from.
    In a DataLoader's worker w of k it gives w's part: every k-th shard where k divides their number, else every k-th
    document. The state is JSON.

    Args:
        documents: with a column `text`, as `open_documents` and `split_documents` return them.
        tokenizer: see `lol.data.tokenizer` for what becomes of the ends of a document.
        context_length: n, tokens per row.
        seed: decides the order, together with the epoch.
        shuffle_buffer: documents per block, held in memory as text; 1 leaves the order inside a shard as it is.
    """

    def __init__(
        self,
        documents: IterableDataset,
        tokenizer: PreTrainedTokenizerFast,
        context_length: int,
        *,
        seed: int = 0,
        shuffle_buffer: int = 2048,
    ) -> None:
        if context_length < 2:
            raise UserError(f"the context length is {context_length}; a row needs at least 2 tokens to predict one")
        if shuffle_buffer < 1:
            raise UserError(f"the shuffle buffer is {shuffle_buffer}; it must hold at least 1 document")
        self.documents = documents
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer
        self._cursor = _Cursor()

    @property
    def epoch(self) -> int:
        """Passes over the documents that are complete."""
        return self._cursor.epoch

    def __iter__(self) -> Iterator[Row]:
        start = self._cursor
        for row, cursor, offset in _pack(self._encoded(start), self.context_length, start.offset):
            self._cursor = dataclasses.replace(cursor, offset=offset)
            yield row

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
        self._cursor = _Cursor(**state["cursor"])

    def _made_with(self) -> dict[str, int]:
        worker, workers = _part()
        return {
            "seed": self.seed,
            "context_length": self.context_length,
            "shuffle_buffer": self.shuffle_buffer,
            "vocabulary_size": len(self.tokenizer),
            "shards": self.documents.num_shards,
            "workers": workers,
            "worker": worker,
        }

    def _encoded(self, start: _Cursor) -> Iterator[tuple[_Cursor, list[int]]]:
        """Every document from `start` on, with the cursor that names it."""
        used = start.used
        for block, texts in self._blocks(start):
            order = _permutation(len(texts), self.seed, block.epoch, block.shard, block.document, *_part())
            for first in range(used, len(texts), _BATCH):
                batch = order[first : first + _BATCH]
                for index, ids in enumerate(encode_documents(self.tokenizer, [texts[i] for i in batch]), start=first):
                    yield dataclasses.replace(block, used=index), ids
            used = 0

    def _blocks(self, start: _Cursor) -> Iterator[tuple[_Cursor, list[str]]]:
        """Blocks of at most `shuffle_buffer` texts in reading order, from the one at `start` on."""
        for epoch in itertools.count(start.epoch):
            block = start if epoch == start.epoch else _Cursor(epoch)
            texts: list[str] = []
            found = 0
            for shard, document, text in self._read(block):
                if not texts:
                    block = _Cursor(epoch, shard, document)
                texts.append(text)
                found += 1
                if len(texts) == self.shuffle_buffer:
                    yield block, texts
                    texts = []
            if texts:
                yield block, texts
            if not found and epoch > start.epoch:
                worker, workers = _part()
                raise UserError(
                    f"no document for worker {worker} of {workers}; use fewer workers, or a source with more documents"
                )

    def _read(self, start: _Cursor) -> Iterator[tuple[int, int, str]]:
        """This worker's texts of one epoch, with the shard's place in the order and the text's in the shard."""
        worker, workers = _part()
        shards = self.documents.num_shards
        order = _permutation(shards, self.seed, start.epoch)
        by_shard = shards % workers == 0
        if by_shard:
            order = order[worker::workers]
        for shard in range(start.shard, len(order)):
            skipped = start.document if shard == start.shard else 0
            stream = self.documents.shard(shards, order[shard], contiguous=False).skip(skipped)
            # `iter` is what datasets does not split among a DataLoader's workers on its own.
            texts = itertools.chain.from_iterable(batch["text"] for batch in stream.iter(_BATCH))
            for document, text in enumerate(texts, start=skipped):
                if by_shard or (document + shard) % workers == worker:
                    yield shard, document, text


class PackedLoader(StatefulDataLoader):
    """Batches of rows, each entry (batch, n); its state is JSON and holds for the same number of workers only."""

    @property
    def epoch(self) -> int:
        """Passes over the documents that every worker has completed."""
        place = super().state_dict()
        parts = [place] if self.num_workers == 0 else place["_snapshot"]["_worker_snapshots"].values()
        return min(part["dataset_state"]["cursor"]["epoch"] for part in parts)

    def __iter__(self) -> Any:  # an Iterator[Row], which torch types as a class of its own
        batches = super().__iter__()
        return _with_clear_errors(batches) if self.num_workers else batches

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was given out."""
        return {"num_workers": self.num_workers, "batch_size": self.batch_size, "loader": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved place with the next iterator.

        Raises:
            UserError: the number of workers or the batch size differs, or what `PackedDocuments` checks.
        """
        for name, value in (("num_workers", self.num_workers), ("batch_size", self.batch_size)):
            if state_dict[name] != value:
                raise UserError(
                    f"the saved place in the data was made with {name} {state_dict[name]}, this run has {value};"
                    f" resume with {name} {state_dict[name]}"
                )
        super().load_state_dict(state_dict["loader"])


def make_loader(packed: PackedDocuments, batch_size: int, num_workers: int = 0) -> PackedLoader:
    """A loader over the packed documents: an endless iterator of batches, to be taken once per run.

    With workers, each reads and packs its own part of the documents; a script that asks for them needs the usual
    `if __name__ == "__main__":`. The loader draws from a generator of its own and leaves the global one as it is.

    Raises:
        UserError: the batch size is below 1 or the number of workers below 0.
    """
    if batch_size < 1 or num_workers < 0:
        raise UserError(f"the batch size is {batch_size} and the workers {num_workers}; at least 1 and 0 are needed")
    with warnings.catch_warnings():
        # torchdata 0.11 sets a torch "vital" that torch 2.13 calls deprecated; nothing here can keep it from that.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return PackedLoader(
            packed,
            batch_size=batch_size,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(packed.seed),
            multiprocessing_context=_worker_context() if num_workers else None,
            worker_init_fn=_leave_ctrl_c_to_the_parent,
        )


def held_out_rows(
    documents: IterableDataset, tokenizer: PreTrainedTokenizerFast, context_length: int, max_rows: int
) -> list[Row]:
    """At most `max_rows` rows to evaluate on, the same ones every time: packed in reading order, without shuffling.

    Where there are more, they are taken evenly spread from the first 16·max_rows, so that they do not all come from
    the first documents. The last, incomplete row is left out.

    Raises:
        UserError: the documents do not fill one row, or `max_rows` is below 1.
    """
    if max_rows < 1:
        raise UserError(f"held-out rows: {max_rows} asked for; at least 1 is needed")
    encoded = ((None, ids) for ids in token_documents(documents, tokenizer))
    rows = [row for row, _, _ in itertools.islice(_pack(encoded, context_length), _SPREAD * max_rows)]
    if not rows:
        raise UserError(
            f"the held-out documents do not fill one row of {context_length} tokens; raise the held-out fraction,"
            " give more text, or shorten the context"
        )
    if len(rows) <= max_rows:
        return rows
    return [rows[index * len(rows) // max_rows] for index in range(max_rows)]


def token_documents(documents: IterableDataset, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Every document once, in reading order, as token ids (BOS + tokens + EOS)."""
    for batch in documents.iter(_BATCH):
        yield from encode_documents(tokenizer, batch["text"])


def _with_clear_errors(batches: Iterator[Row]) -> Iterator[Row]:
    """The batches; a worker's UserError, which arrives as a traceback in one string, is raised as its message."""
    try:
        yield from batches
        return
    except UserError as error:
        message = str(error).rsplit(f"{UserError.__module__}.{UserError.__qualname__}: ", 1)[-1]
        # The traceback refers to itself and holds the workers: found by the garbage collector only, they are not told
        # to stop, and 5 seconds go by for each.
        error.__traceback__ = None
    raise UserError(message.strip())


def _worker_context() -> BaseContext:
    """Workers come from a fork server that has imported this module once.

    A plain fork would lose the threads that torch and the tokenizer hold by then, and every spawned worker would
    spend seconds on the imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _leave_ctrl_c_to_the_parent(_worker: int) -> None:
    """The terminal sends Ctrl-C to workers too; one that died of it would end the run before its last checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _part() -> tuple[int, int]:
    """(this worker, number of workers); (0, 1) outside of a DataLoader's worker."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _permutation(length: int, *key: int) -> list[int]:
    """A random order of range(length), a function of the integers in `key`."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.randperm(length, generator=generator).tolist()


def _pack(
    documents: Iterable[tuple[Place, list[int]]], length: int, offset: int = 0
) -> Iterator[tuple[Row, Place, int]]:
    """Rows of `length`, each with the document that filled it and how many of its tokens are used by then.

    `offset` tokens of the first document are left out.
    """
    tokens, positions, filled = _new_row(length)
    for place, ids in documents:
        document = np.asarray(ids, dtype=np.int64)
        while offset < len(document):
            taken = min(length - filled, len(document) - offset)
            tokens[filled : filled + taken] = document[offset : offset + taken]
            positions[filled : filled + taken] = np.arange(taken)
            offset += taken
            filled += taken
            if filled == length:
                yield (
                    {"input_ids": torch.from_numpy(tokens), "position_ids": torch.from_numpy(positions)},
                    place,
                    offset,
                )
                tokens, positions, filled = _new_row(length)
        offset = 0


def _new_row(length: int) -> tuple[np.ndarray, np.ndarray, int]:
    return np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64), 0
