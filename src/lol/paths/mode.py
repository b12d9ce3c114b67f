"""The mode path of a label: at each depth the block that the router finds most probable over the label's examples.

(Article, "What the paths encode, and forcing them".)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import nn

from lol.errors import UserError
from lol.paths.agreement import mode_path
from lol.paths.features import path_features
from lol.paths.record import record_paths


@dataclass(frozen=True)
class ModePath:
    """The mode path of a label."""

    blocks: tuple[int, ...]
    """One per depth."""
    probabilities: tuple[float, ...]
    """The mean probability of each of them: what their update usually weighs."""
    num_examples: int


def mode_paths(
    model: nn.Module, examples: Mapping[str, Iterable[Any]], tokenizer: Any = None, *, batch_size: int = 8
) -> dict[str, ModePath]:
    """The mode path of each label, from examples of it.

    Args:
        model: As for `record_paths`.
        examples: Per label, rows as `record_paths` takes them, with the label's `router_only_ids` where the model was
            trained with some. Take examples that nothing else is measured on.
        tokenizer: For rows of text.
        batch_size: Rows run at once.

    Raises:
        UserError: a label without examples, or what `record_paths` refuses.
    """
    found = {}
    for label, rows in examples.items():
        try:
            table = record_paths(model, rows, tokenizer, batch_size=batch_size)
        except UserError as error:
            raise UserError(f"label {label!r}: {error}") from error
        found |= mode_paths_of(table, {int(number): label for number in np.unique(table["document"])})
    return found


def mode_paths_of(table: pd.DataFrame, labels: Mapping[int, str] | Sequence[str]) -> dict[str, ModePath]:
    """The same, from a table of `record_paths`.

    Args:
        table: What `record_paths` returned.
        labels: The label of each document, by its number in the table.
    """
    means, counts = mean_probabilities(table, labels)
    # (D, P, L), as uses are counted: the most probable block is found as the most common one is.
    blocks = mode_path(torch.from_numpy(np.stack(list(means.values()), axis=1)))
    return {
        label: ModePath(
            tuple(blocks[:, place].tolist()),
            tuple(float(p) for p in mean[np.arange(len(mean)), blocks[:, place].numpy()]),
            counts[label],
        )
        for place, (label, mean) in enumerate(means.items())
    }


def mean_probabilities(
    table: pd.DataFrame, labels: Mapping[int, str] | Sequence[str]
) -> tuple[dict[str, Float[np.ndarray, "D L"]], dict[str, int]]:
    """Per label, in order of its name, the mean of its documents' router probabilities, and how many there are.

    A document is the mean over its windows, so that each counts once however long it is.
    """
    features, keys = path_features(table, "probability", "sequence")
    num_experts = len(table["probabilities"].iloc[0])
    own = np.array([labels[number] for number in keys["document"]])
    means = {
        str(label): features[own == label].mean(0, dtype=np.float64).reshape(-1, num_experts)
        for label in np.unique(own)
    }
    return means, {label: int((own == label).sum()) for label in means}
