"""Packed rows as batches for whoever does not make the labels itself, such as transformers' `Trainer`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lol.data.packing import Row
from lol.model.lm import IGNORED_LABEL


def collate_packed(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Batch rows (`input_ids` and `position_ids`, each (n,)) and add `labels`; all (batch, n).

    The first token of a document is no target, so its label is -100. The model leaves it out of the loss anyway; the
    `Trainer` divides by the number of labels, and would count it.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    return batch | {"labels": batch["input_ids"].masked_fill(batch["position_ids"] == 0, IGNORED_LABEL)}
