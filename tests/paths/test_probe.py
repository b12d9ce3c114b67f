"""The probe reads what is there, nothing on shuffled labels, and never learns from what it is tested on."""

import sys

import numpy as np
import pytest
import scipy.sparse
from sklearn.metrics import roc_auc_score

from lol import UserError
from lol.paths.probe import _auroc, ridge_probe

DRAW = np.random.default_rng(0)
LABELS = np.repeat(["a", "b", "c"], 40)
GROUPS = np.repeat(np.arange(30), 4)


def blocks(right: float) -> np.ndarray:
    """One-hot rows of three that are the label's with this probability."""
    own = np.repeat([0, 1, 2], 40)
    return np.eye(3)[np.where(DRAW.random(120) < right, own, DRAW.integers(0, 3, 120))]


def test_a_label_that_is_there_is_read():
    result = ridge_probe(blocks(1.0), LABELS, groups=GROUPS)
    assert (result.classes, result.num_rows, result.num_groups) == (("a", "b", "c"), 120, 30)
    assert result.chance == pytest.approx(1 / 3)
    assert np.shape(result.accuracy.values) == (3, 5)
    assert result.accuracy.mean == result.auroc.mean == result.accuracy.low == 1
    assert result.shuffled_accuracy is not None
    assert result.shuffled_auroc is not None
    # Ten groups of each label are dealt anew: what is left is luck, less than would say anything.
    assert result.shuffled_accuracy.mean < 0.55
    assert abs(result.shuffled_auroc.mean - 0.5) < 0.2


def test_noise_says_nothing():
    noise = np.random.default_rng(1).normal(size=(600, 8))
    result = ridge_probe(noise, np.arange(600) % 2, seeds=(0,), shuffled=False)
    assert result.shuffled_auroc is None
    assert result.auroc.low < 0.5 < result.auroc.high
    assert abs(result.auroc.mean - 0.5) < 0.06


def test_auroc_is_that_of_scikit_learn():
    draw = np.random.default_rng(4)
    target, decided = draw.integers(0, 3, 50), draw.integers(0, 6, (50, 3)).astype(float)
    each = [roc_auc_score(target == own, decided[:, own]) for own in range(3)]
    assert _auroc(decided, target, np.arange(3)) == pytest.approx(np.mean(each))
    binary = target == 1
    assert _auroc(decided[:, 0], binary, np.array([False, True])) == pytest.approx(roc_auc_score(binary, decided[:, 0]))
    # A class that no row has says nothing.
    assert _auroc(decided, np.zeros(50), np.arange(3)) == 0.5


def test_groups_are_not_on_both_sides():
    """A feature that names the group tells the label of its other rows, and nothing of other groups."""
    labels = np.random.default_rng(2).permutation(np.repeat(["a", "b"], 20))
    names, own = np.eye(40).repeat(4, axis=0), labels.repeat(4)
    apart = ridge_probe(names, own, groups=np.arange(40).repeat(4), seeds=(0,), shuffled=False)
    assert ridge_probe(names, own, seeds=(0,), shuffled=False).accuracy.mean > 0.95
    assert apart.accuracy.mean < 0.6


def test_sparse_and_dense_rows_and_the_same_numbers_again():
    counts = np.random.default_rng(3).poisson(0.3, size=(120, 50)) + 2 * np.eye(50)[np.repeat([0, 1, 2], 40)]
    sparse = ridge_probe(scipy.sparse.csr_matrix(counts), LABELS, groups=GROUPS, seeds=(0,), shuffled=False)
    assert sparse.accuracy.mean > 0.9
    assert sparse == ridge_probe(scipy.sparse.csr_matrix(counts), LABELS, groups=GROUPS, seeds=(0,), shuffled=False)


def test_the_interval_by_hand():
    result = ridge_probe(blocks(0.5), LABELS, groups=GROUPS, seeds=(0, 1), shuffled=False)
    values = np.array(result.accuracy.values)
    # 2.262 is Student's t at 97.5 % with 9 degrees of freedom; each fold tests on a quarter of what it learns from.
    reach = 2.262157 * np.sqrt((1 / 10 + 1 / 4) * values.var(ddof=1))
    assert result.accuracy.high - result.accuracy.mean == pytest.approx(reach, rel=1e-4)
    assert result.accuracy.mean == pytest.approx(values.mean())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ["a"] * 120}, "a probe needs two classes"),
        ({"folds": 11}, "label 'a' has 10 examples, fewer than the 11 folds"),
        ({"folds": 1}, "at least 2"),
        ({"groups": [1, 2]}, "one of each per row"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(UserError, match=message):
        ridge_probe(blocks(1.0), **{"labels": LABELS, "groups": GROUPS} | changes)


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.model_selection", None)
    with pytest.raises(UserError, match=r"library-of-layers\[experiments\]"):
        ridge_probe(blocks(1.0), LABELS, groups=GROUPS)
