"""A linear probe of paths: what label can be read from them, beside the same probe on shuffled labels.

The probe is scikit-learn's ridge classifier. Its cross-validation never puts two rows of one group, such as the windows
of a sequence, on both sides; shuffled labels are shuffled from group to group, so that a sequence's windows keep one
label as they do in truth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lol.errors import UserError
from lol.paths.extra import need
from lol.paths.features import bag_of_tokens

__all__ = ["ProbeResult", "Score", "bag_of_tokens", "ridge_probe"]

STRENGTHS = (1.0, 30.0, 1000.0)
"""Ridge penalties that are tried."""


@dataclass(frozen=True)
class Score:
    """A score over seeds and folds."""

    values: tuple[tuple[float, ...], ...]
    """[seed][fold]."""
    mean: float
    low: float
    high: float
    """95 % interval of the mean, with the correction for folds that share training rows (Nadeau and Bengio, 2003)."""


@dataclass(frozen=True)
class ProbeResult:
    """What a probe read."""

    classes: tuple[str, ...]
    num_rows: int
    num_groups: int
    chance: float
    """Accuracy of naming the most common class."""
    accuracy: Score
    auroc: Score
    """Of one class against the rest, mean over classes; with two classes, the usual one."""
    shuffled_accuracy: Score | None
    shuffled_auroc: Score | None
    """The same with labels shuffled between groups; `None` where that was not asked for."""


def ridge_probe(
    features: Any,
    labels: Sequence[Any],
    *,
    groups: Sequence[Any] | None = None,
    folds: int = 5,
    seeds: Sequence[int] = (0, 1, 2),
    shuffled: bool = True,
    strengths: Sequence[float] = STRENGTHS,
) -> ProbeResult:
    """Cross-validate a ridge classifier of labels on features.

    Args:
        features: (R, F), dense or `scipy.sparse`. Dense columns are brought to mean 0 and variance 1 of the training
            rows.
        labels: R labels, two classes or more.
        groups: The group of each row; a group is never on both sides of a split. Default: each row its own.
        folds: Parts of the cross-validation, with the classes in equal shares as far as groups allow.
        seeds: A split of its own for each.
        shuffled: Whether the control is run too.
        strengths: Ridge penalties; where there are several, the one with the best AUROC on a part of the training
            groups is taken, in each fold anew.

    Raises:
        UserError: scikit-learn is not installed, one class only, fewer groups of a class than folds, or numbers of rows
            that differ.
    """
    names, target = np.unique([str(label) for label in labels], return_inverse=True)
    group = np.arange(len(target)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    _check(features, names, target, group, folds)
    scored = [_cross_validate(features, target, group, folds, seed, strengths) for seed in seeds]
    control = None
    if shuffled:
        mixed = [_shuffle(target, group, seed) for seed in seeds]
        control = [
            _cross_validate(features, own, group, folds, seed, strengths)
            for own, seed in zip(mixed, seeds, strict=True)
        ]
    return ProbeResult(
        classes=tuple(names.tolist()),
        num_rows=len(target),
        num_groups=len(np.unique(group)),
        chance=float(np.bincount(target).max() / len(target)),
        accuracy=_summarise([[a for a, _ in fold] for fold in scored], folds),
        auroc=_summarise([[b for _, b in fold] for fold in scored], folds),
        shuffled_accuracy=None if control is None else _summarise([[a for a, _ in fold] for fold in control], folds),
        shuffled_auroc=None if control is None else _summarise([[b for _, b in fold] for fold in control], folds),
    )


def _check(features: Any, names: np.ndarray, target: np.ndarray, group: np.ndarray, folds: int) -> None:
    if not features.shape[0] == len(target) == len(group):
        raise UserError(
            f"{features.shape[0]} rows of features, {len(target)} labels, {len(group)} groups: give one of each per row"
        )
    if len(names) < 2:
        raise UserError(f"all rows have the label {', '.join(names)!r}: a probe needs two classes or more")
    if folds < 2:
        raise UserError(f"folds={folds}: a probe needs at least 2, one to learn from and one to be tested on")
    for number, name in enumerate(names):
        own = len(np.unique(group[target == number]))
        if own < folds:
            raise UserError(
                f"label {name!r} has {own} examples, fewer than the {folds} folds: give more, or fewer folds"
            )


def _shuffle(target: np.ndarray, group: np.ndarray, seed: int) -> np.ndarray:
    """Labels dealt to other groups where each group has one label, else to other rows."""
    draw = np.random.default_rng(seed)
    _, first, of_group = np.unique(group, return_index=True, return_inverse=True)
    if (target[first][of_group] == target).all():
        return draw.permutation(target[first])[of_group]
    return draw.permutation(target)


def _cross_validate(
    features: Any, target: np.ndarray, group: np.ndarray, folds: int, seed: int, strengths: Sequence[float]
) -> list[tuple[float, float]]:
    """(accuracy, AUROC) of each fold."""
    split = need("sklearn.model_selection").StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    scores = []
    for train, test in split.split(np.zeros(len(target)), target, group):
        strength = strengths[0]
        if len(strengths) > 1:
            inner = need("sklearn.model_selection").StratifiedGroupKFold(max(folds, 2), shuffle=True, random_state=seed)
            fit, held = next(inner.split(np.zeros(len(train)), target[train], group[train]))
            tried = [_score(features, target, train[fit], train[held], own)[1] for own in strengths]
            strength = strengths[int(np.argmax(tried))]
        scores.append(_score(features, target, train, test, strength))
    return scores


def _score(
    features: Any, target: np.ndarray, train: np.ndarray, test: np.ndarray, strength: float
) -> tuple[float, float]:
    steps = [need("sklearn.linear_model").RidgeClassifier(alpha=strength)]
    if isinstance(features, np.ndarray):
        steps.insert(0, need("sklearn.preprocessing").StandardScaler())
    model = need("sklearn.pipeline").make_pipeline(*steps).fit(features[train], target[train])
    decided = model.decision_function(features[test])
    right = float((model.predict(features[test]) == target[test]).mean())
    return right, _auroc(decided, target[test], model.classes_)


def _auroc(decided: np.ndarray, target: np.ndarray, classes: np.ndarray) -> float:
    """Mean over the classes that are in the target and not all of it; ½ where there is none."""
    roc = need("sklearn.metrics").roc_auc_score
    if decided.ndim == 1:
        decided, classes = decided[:, None], classes[1:]
    scores = [
        float(roc(target == own, decided[:, place]))
        for place, own in enumerate(classes)
        if 0 < (target == own).sum() < len(target)
    ]
    return float(np.mean(scores)) if scores else 0.5


def _summarise(values: list[list[float]], folds: int) -> Score:
    flat = np.array(values)
    mean = float(flat.mean())
    spread = flat.var(ddof=1) * (1 / flat.size + 1 / (folds - 1))
    reach = float(need("scipy.stats").t.ppf(0.975, flat.size - 1) * np.sqrt(spread))
    return Score(tuple(tuple(seed) for seed in values), mean, max(0.0, mean - reach), min(1.0, mean + reach))
