"""Several sources mixed by weights, which are shares of tokens.

A row holds tokens of one source only. Rows are equally long, so shares of rows are shares of tokens, however long the
documents of a source are, and every source keeps the packing, the order and the saved place of `lol.data.packing`. The
next row is taken from the source that is furthest behind its share: the rows given differ from the shares by a few at
any time, where drawing sources at random would leave 3 % after ten thousand rows of ten sources. (Decided here.)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerFast

from lol.data.order import generator_of
from lol.data.packing import PackedDocuments, Row, held_out_rows
from lol.data.text import open_documents, split_documents
from lol.errors import UserError

# Further apart than any two seeds, so that the sources of one run and of the next have orders of their own.
_SEED_STEP = 2**32


@dataclass(frozen=True, eq=False)
class Source:
    """One of the sources of a mixture: what it is called, its share of the tokens, its documents."""

    name: str
    share: float
    documents: IterableDataset


def parse_shares(sources: str | Sequence[str]) -> dict[str, float]:
    """Names of sources → their shares, which sum to 1.

    Args:
        sources: one source as it is; or several, each written SOURCE or SOURCE=WEIGHT, with weights for all or none
            (then they are equal). A path that itself ends in "=" and a number needs a weight behind it.

    Raises:
        UserError: no source, one given twice, a weight that is not above 0, weights for some only.
    """
    if isinstance(sources, str):
        return {sources: 1.0}
    if not sources:
        raise UserError("no source of text is given; name at least one: --data SOURCE")
    split = [_split_weight(source) for source in sources]
    names = [name for name, _ in split]
    for name, weight in split:
        if names.count(name) > 1:
            raise UserError(f"{name} is given {names.count(name)} times; give each source once, with a larger weight")
        if weight is not None and not 0 < weight < math.inf:
            raise UserError(f"{name}={weight:g}: a weight is a number above 0; leave out a source that has none")
    given = [weight for _, weight in split if weight is not None]
    if given and len(given) < len(split):
        missing = next(name for name, weight in split if weight is None)
        raise UserError(f"{missing} has no weight and others have; write {missing}=WEIGHT, or give weights to none")
    weights = given or [1.0] * len(split)
    return {name: weight / math.fsum(weights) for name, weight in zip(names, weights, strict=True)}


def open_sources(
    sources: str | Sequence[str],
    *,
    text_column: str = "text",
    document_chars: int = 2000,
    router_only_column: str | None = None,
) -> tuple[Source, ...]:
    """Open one source or a mixture, as `parse_shares` and `open_documents` read them, and raise what they raise."""
    return tuple(
        Source(
            name,
            share,
            open_documents(
                name,
                text_column=text_column,
                document_chars=document_chars,
                router_only_column=router_only_column,
            ),
        )
        for name, share in parse_shares(sources).items()
    )


def split_sources(sources: Sequence[Source], held_out_fraction: float) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """Split every source by itself into (training, held out), as `split_documents` does; the error names the source."""
    sides: tuple[list[Source], list[Source]] = ([], [])
    for source in sources:
        try:
            split = split_documents(source.documents, held_out_fraction)
        except UserError as error:
            raise UserError(f"{source.name}: {error}") from error
        for side, documents in zip(sides, split, strict=True):
            side.append(Source(source.name, source.share, documents))
    return tuple(sides[0]), tuple(sides[1])


def mixed_texts(sources: Sequence[Source]) -> Iterator[str]:
    """Every text once; as long as no source has ended, each has given its share of the characters.

    What only the router reads of a document comes in front of its text, so that a tokenizer learns the words in it.
    """
    open_ones = {source: iter(source.documents) for source in sources}
    given = dict.fromkeys(sources, 0)
    while open_ones:
        source = min(open_ones, key=lambda one: given[one] / one.share)
        document = next(open_ones[source], None)
        if document is None:
            del open_ones[source]
            continue
        given[source] += len(document["text"])
        if document.get("router_only"):
            yield document["router_only"]
        yield document["text"]


def held_out_rows_by_source(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerFast,
    context_length: int,
    max_rows: int,
    scored_after: str | None = None,
) -> dict[str, list[Row]]:
    """Held-out rows of each source by its name: at most its share of `max_rows`, at least one. See `held_out_rows`.

    Raises:
        UserError: as `held_out_rows`; of several sources it names the one.
    """
    rows = {}
    for source in sources:
        number = max_rows if len(sources) == 1 else max(1, round(max_rows * source.share))
        try:
            rows[source.name] = held_out_rows(source.documents, tokenizer, context_length, number, scored_after)
        except UserError as error:
            raise UserError(str(error) if len(sources) == 1 else f"{source.name}: {error}") from error
    return rows


class MixedRows(TorchIterableDataset):
    """An endless stream of rows of several sources by their shares; each source begins again when it ends.

    State, parts and errors are as those of `PackedDocuments`, of which it has one for each source. Every reading
    process keeps the shares by itself. Which source it begins with is a function of the seed and of its part, so that
    not all processes are at the same source at the same time.

    Args:
        sources: training documents with their shares.
        tokenizer, context_length, seed, shuffle_buffer, scored_after, rank, world_size: see `PackedDocuments`; the
            buffer is one of each source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerFast,
        context_length: int,
        *,
        seed: int = 0,
        shuffle_buffer: int = 2048,
        scored_after: str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.seed = seed
        self.shares = {source.name: source.share for source in sources}
        self.streams = [
            PackedDocuments(
                source.documents,
                tokenizer,
                context_length,
                seed=seed + _SEED_STEP * index,
                shuffle_buffer=shuffle_buffer,
                scored_after=scored_after,
                name=source.name,
                rank=rank,
                world_size=world_size,
            )
            for index, source in enumerate(sources)
        ]
        self._given = [0] * len(self.streams)

    @property
    def given(self) -> dict[str, int]:
        """Rows given so far, by source."""
        return dict(zip(self.shares, self._given, strict=True))

    def __iter__(self) -> Iterator[Row]:
        shares = list(self.shares.values())
        part = self.streams[0].part
        generator = generator_of(self.seed, part.index, part.parts)
        leads = torch.rand(len(shares), generator=generator, dtype=torch.float64).tolist()
        rows = [iter(stream) for stream in self.streams]
        while True:
            number = sum(self._given) + 1
            behind = [
                share * number + lead - given for share, lead, given in zip(shares, leads, self._given, strict=True)
            ]
            chosen = behind.index(max(behind))
            row = next(rows[chosen])
            self._given[chosen] += 1
            yield row

    def state_dict(self) -> dict[str, Any]:
        """The places in all sources after the last row, the shares, and the rows given."""
        return {
            "shares": self.shares,
            "given": list(self._given),
            "sources": [stream.state_dict() for stream in self.streams],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            UserError: the mixture was another one (names what differs).
        """
        if "shares" not in state:
            raise UserError(
                "the saved place in the data is of another version of lol; resume with the lol that wrote it, or start"
                " a new run"
            )
        # In order: the k-th source has the k-th seed.
        if list(state["shares"].items()) != list(self.shares.items()):
            raise UserError(
                f"the saved place in the data was made with the sources {_written(state['shares'])}, this run has"
                f" {_written(self.shares)}; resume with the same, or start a new run"
            )
        for stream, saved in zip(self.streams, state["sources"], strict=True):
            stream.load_state_dict(saved)
        self._given = list(state["given"])


def _split_weight(source: str) -> tuple[str, float | None]:
    name, _, weight = source.rpartition("=")
    try:
        return (name, float(weight)) if name else (source, None)
    except ValueError:
        return source, None


def _written(shares: Mapping[str, float]) -> str:
    return " ".join(f"{name}={share:g}" for name, share in shares.items())
