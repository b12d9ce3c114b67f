"""The n-gram baselines against the formulas in plain Python, as probabilities, and on the language model's targets."""

import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lol.data.ngram import NGramBaselines
from lol.data.packing import held_out_rows, token_documents
from lol.errors import UserError

V = 7
DOCUMENTS = st.lists(st.lists(st.integers(0, V - 1), min_size=2, max_size=30), min_size=1, max_size=10)


def row_of(*documents: list[int]) -> dict:
    return {
        "input_ids": torch.tensor([token for document in documents for token in document]),
        "position_ids": torch.tensor([k for document in documents for k in range(len(document))]),
    }


def matrix(model: NGramBaselines) -> np.ndarray:
    before, after = np.divmod(np.arange(V * V), V)
    return model.bigram(before, after).reshape(V, V)


@given(DOCUMENTS)
def test_probabilities_are_positive_and_sum_to_one(documents):
    model = NGramBaselines.count(documents, V)
    assert model.unigram.sum() == pytest.approx(1)
    assert matrix(model).sum(axis=1) == pytest.approx(np.ones(V))
    assert matrix(model).min() > 0


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS)
def test_formulas(documents):
    """The docstring's formulas, with dictionaries."""
    pairs = Counter(pair for document in documents for pair in pairwise(document))
    words = Counter(token for document in documents for token in document[1:])
    model = NGramBaselines.count(documents, V)
    assert model.tokens == sum(words.values())
    of_count = Counter(pairs.values())
    share = of_count[1] / (of_count[1] + 2 * of_count[2]) if of_count[1] and of_count[2] else None

    def discount(count):
        k = min(count, 3)
        value = k - (k + 1) * share * of_count[k + 1] / of_count[k] if share is not None and of_count[k] else k / 2
        return value if 0 < value < k else k / 2

    for before in range(V):
        total = sum(count for (v, _), count in pairs.items() if v == before)
        left = sum(discount(count) for (v, _), count in pairs.items() if v == before)
        for after in range(V):
            assert model.unigram[after] == pytest.approx((words[after] + 1) / (sum(words.values()) + V))
            lower = (sum(1 for _, w in pairs if w == after) + 1) / (len(pairs) + V)
            expected = lower
            if total:
                count = pairs[before, after]
                expected = (count - (discount(count) if count else 0)) / total + left / total * lower
            assert matrix(model)[before, after] == pytest.approx(expected)


def test_losses_are_means_over_the_targets_inside_documents():
    model = NGramBaselines.count([[0, 1, 2, 3, 1], [0, 2, 2, 1]], V)
    rows = [row_of([0, 1, 3], [0, 2]), row_of([5], [4], [0, 6])]
    targets = [(0, 1), (1, 3), (0, 2), (0, 6)]
    assert model.unigram_loss(rows) == pytest.approx(-sum(math.log(model.unigram[w]) for _, w in targets) / 4)
    assert model.bigram_loss(rows) == pytest.approx(-sum(math.log(matrix(model)[v, w]) for v, w in targets) / 4)


def test_counting_in_chunks_is_counting_at_once(monkeypatch):
    draw = random.Random(0)
    documents = [[draw.randrange(V) for _ in range(draw.randrange(2, 20))] for _ in range(200)]
    whole = NGramBaselines.count(documents, V)
    monkeypatch.setattr("lol.data.ngram._CHUNK", 50)
    chunked = NGramBaselines.count(iter(documents), V)
    assert np.array_equal(matrix(whole), matrix(chunked))
    assert np.array_equal(whole.unigram, chunked.unigram)


def test_a_bigram_source_is_learned():
    """Where the next token follows from the last but for noise, the loss comes near to the noise's entropy."""
    draw = random.Random(1)
    document = [0]
    for _ in range(50_000):
        document.append((document[-1] + 1) % V if draw.random() < 0.9 else draw.randrange(V))
    model = NGramBaselines.count([document[:40_000]], V)
    sure = 0.9 + 0.1 / V
    entropy = -sure * math.log(sure) - (1 - sure) * math.log(0.1 / V)
    rows = [row_of(document[40_000:])]
    assert model.bigram_loss(rows) == pytest.approx(entropy, abs=0.03)
    assert model.unigram_loss(rows) == pytest.approx(math.log(V), abs=0.01)


def test_rows_of_a_corpus_are_scored(tokenizer, open_texts):
    documents = open_texts([f"the cat {k} sat on the mat" for k in range(50)])
    model = NGramBaselines.count(token_documents(documents, tokenizer), len(tokenizer))
    rows = held_out_rows(documents, tokenizer, 16, 100)
    assert 0 < model.bigram_loss(rows) < model.unigram_loss(rows) < math.log(len(tokenizer))


@pytest.mark.parametrize("token", [V, -1])
def test_token_outside_of_the_vocabulary(token):
    with pytest.raises(UserError, match=f"token id {token} is outside of the vocabulary of {V}"):
        NGramBaselines.count([[0, token]], V)
    with pytest.raises(UserError, match=f"token id {token} is outside"):
        NGramBaselines.count([[0, 1]], V).bigram_loss([row_of([0, token])])


@pytest.mark.parametrize("documents", [[], [[]], [[0], [1]]])
def test_nothing_to_count(documents):
    with pytest.raises(UserError, match="no tokens to count"):
        NGramBaselines.count(documents, V)


def test_rows_without_a_target():
    with pytest.raises(UserError, match="hold no target"):
        NGramBaselines.count([[0, 1]], V).unigram_loss([row_of([0], [0])])
