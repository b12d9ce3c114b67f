"""Packed rows as batches for whoever does not make the labels itself, such as transformers' `Trainer`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lol.data.packing import Row
from lol.model.lm import IGNORED_LABEL


def collate_packed(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Batch rows (`input_ids` and `position_ids`, each (n,), and what else all have) and add `labels`; all (batch, n).

    The first token of a document is no target, nor is a router-only token, so their label is -100. The model leaves
    them out of the loss anyway; the `Trainer` divides by the number of labels, and would count them. Rows that have
    labels keep theirs where they have one.
    """
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    no_target = batch["position_ids"] == 0
    if "router_only_ids" in batch:
        no_target |= batch["router_only_ids"] >= 0
    labels = batch.get("labels", batch["input_ids"])
    return batch | {"labels": labels.masked_fill(no_target, IGNORED_LABEL)}
