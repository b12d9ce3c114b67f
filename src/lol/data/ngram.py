"""Unigram and bigram models counted on the training tokens: what a language model has to beat to be worth its weights.

Both are scored on exactly the targets of the language model: every token of a row whose predecessor is in the same row
and the same document. The first token of a document (or of its part in a row) is never a target, and the counts leave
it out alike.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float64, Int64

from lol.data.packing import Row
from lol.errors import UserError

# Pairs counted at a time: bounds the memory, and sorting them stays fast.
_CHUNK = 2_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class NGramBaselines:
    """A unigram and an interpolated bigram model; V tokens, P different pairs seen.

    Unigram, add-one: p(w) = (c(w) + 1) / (N + V).

    Bigram, interpolated Kneser-Ney with three discounts (Chen & Goodman 1999, "An empirical study of smoothing
    techniques for language modeling", section 4.1.6):

        p(w | v) = max(c(vw) − D(c(vw)), 0) / c(v·) + g(v) · q(w)
        g(v) = Σ_w D(c(vw)) / c(v·)          q(w) = (N₊(·w) + 1) / (N₊(··) + V)

    with N₊(·w) the number of different tokens seen before w. D is 0, D₁, D₂, D₃₊ for a count of 0, 1, 2, 3 and more,
    D_k = k − (k+1) · Y · n_{k+1}/n_k, Y = n₁/(n₁ + 2 n₂), n_k the number of pairs seen k times. A token that was never
    a predecessor leaves q(w). The add-one in q, and D_k = ½k where a count of counts is 0 or D_k would leave (0, k),
    are decided here.
    """

    vocab_size: int
    tokens: int
    unigram: Float64[np.ndarray, "V"]
    continuation: Float64[np.ndarray, "V"]
    pairs: Int64[np.ndarray, "P"]
    discounted: Float64[np.ndarray, "P"]
    left_over: Float64[np.ndarray, "V"]

    @classmethod
    def count(cls, token_documents: Iterable[Sequence[int]], vocab_size: int) -> "NGramBaselines":
        """Count documents of token ids (BOS + tokens + EOS); `tokens` is how many targets they hold.

        Raises:
            UserError: a token id is outside of the vocabulary, or there is no target at all.
        """
        pairs, counts = _count_pairs(token_documents, vocab_size)
        tokens = int(counts.sum())
        if tokens == 0:
            raise UserError("there are no tokens to count n-grams on; give a source that holds text")
        before, after = pairs // vocab_size, pairs % vocab_size
        unigram = (np.bincount(after, counts, vocab_size) + 1) / (tokens + vocab_size)
        continuation = (np.bincount(after, minlength=vocab_size) + 1) / (len(pairs) + vocab_size)
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        totals = np.bincount(before, counts, vocab_size)
        left_over = np.bincount(before, discounts, vocab_size) / np.maximum(totals, 1)
        left_over[totals == 0] = 1.0
        discounted = (counts - discounts) / totals[before]
        return cls(vocab_size, tokens, unigram, continuation, pairs, discounted, left_over)

    def unigram_loss(self, rows: Sequence[Row]) -> float:
        """Mean loss over the rows' targets, in nats per token."""
        _, after = self._targets(rows)
        return float(-np.log(self.unigram[after]).mean())

    def bigram_loss(self, rows: Sequence[Row]) -> float:
        """Mean loss over the rows' targets, in nats per token."""
        return float(-np.log(self.bigram(*self._targets(rows))).mean())

    def bigram(
        self, before: Int64[np.ndarray, "pairs"], after: Int64[np.ndarray, "pairs"]
    ) -> Float64[np.ndarray, "pairs"]:
        """p(after | before) for pairs of token ids."""
        wanted = before * self.vocab_size + after
        found = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        seen = np.where(self.pairs[found] == wanted, self.discounted[found], 0.0)
        return seen + self.left_over[before] * self.continuation[after]

    def _targets(self, rows: Sequence[Row]) -> tuple[Int64[np.ndarray, "pairs"], Int64[np.ndarray, "pairs"]]:
        """The predecessors and the targets of all rows."""
        before, after = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for row in rows:
            # A router-only token is neither a target nor a predecessor: what stands at its place is no text.
            text = row["router_only_ids"].numpy() < 0 if "router_only_ids" in row else slice(None)
            ids = row["input_ids"].numpy()[text]
            inside = row["position_ids"].numpy()[text][1:] > 0
            before.append(ids[:-1][inside])
            after.append(ids[1:][inside])
        pair = np.concatenate(before), np.concatenate(after)
        if pair[1].size == 0:
            raise UserError("the rows hold no target: no token has a predecessor in its row; use longer rows")
        _check_ids(np.concatenate(pair), self.vocab_size)
        return pair


def _count_pairs(
    documents: Iterable[Sequence[int]], vocab_size: int
) -> tuple[Int64[np.ndarray, "P"], Int64[np.ndarray, "P"]]:
    """The different pairs of neighbours inside documents, as before · V + after in rising order, and their counts."""
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    waiting: list[np.ndarray] = []
    size = 0
    for document in documents:
        ids = np.asarray(document, dtype=np.int64)
        _check_ids(ids, vocab_size)
        waiting.append(ids[:-1] * vocab_size + ids[1:])
        size += len(waiting[-1])
        if size >= _CHUNK:
            pairs, counts = _merge(pairs, counts, waiting)
            waiting, size = [], 0
    return _merge(pairs, counts, waiting) if waiting else (pairs, counts)


def _merge(
    pairs: Int64[np.ndarray, "P"], counts: Int64[np.ndarray, "P"], waiting: list[np.ndarray]
) -> tuple[Int64[np.ndarray, "Q"], Int64[np.ndarray, "Q"]]:
    new_pairs, new_counts = np.unique(np.concatenate(waiting), return_counts=True)
    merged, place = np.unique(np.concatenate([pairs, new_pairs]), return_inverse=True)
    total = np.zeros(len(merged), np.int64)
    np.add.at(total, place, np.concatenate([counts, new_counts]))
    return merged, total


def _discounts(counts: Int64[np.ndarray, "P"]) -> Float64[np.ndarray, "4"]:
    """D for a count of 0, 1, 2 and 3 or more."""
    times = [int((counts == k).sum()) for k in range(5)]
    discounts = np.array([0.0, 0.5, 1.0, 1.5])
    if times[1] and times[2]:
        share = times[1] / (times[1] + 2 * times[2])
        for k in (1, 2, 3):
            discount = k - (k + 1) * share * times[k + 1] / times[k] if times[k] else 0.0
            if 0 < discount < k:
                discounts[k] = discount
    return discounts


def _check_ids(ids: Int64[np.ndarray, "tokens"], vocab_size: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise UserError(
            f"token id {int(ids.max() if ids.max() >= vocab_size else ids.min())} is outside of the vocabulary of"
            f" {vocab_size}; use the tokenizer that the model was made for"
        )
