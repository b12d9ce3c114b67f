"""Does a path carry a label? Force the mode path of each label, let the model write, and see whose text comes out.

The label's own tokens are replaced: where only the router read them, the network sees the same filler as in training,
and the router is told nothing. What comes out is compared with what each label would have written. (Article, "What the
paths encode, and forcing them".)
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lol.errors import UserError
from lol.model.lm import LoLForCausalLM
from lol.paths.mode import ModePath
from lol.paths.record import find_model
from lol.paths.steer import force_path

TIED = "(tied)"
"""Stands for the label of a text to which two labels are equally near."""


@contextmanager
def force_mode(
    model: nn.Module, mode: ModePath | Sequence[int], weight: Literal["router", "mode"] | float = "router"
) -> Iterator[None]:
    """`force_path` with a mode path.

    Args:
        model: As for `force_path`.
        mode: Of `mode_paths`, or its blocks.
        weight: Weight of a forced block's update: `"router"`, the router's own probability of it; `"mode"`, its mean
            probability over the label's examples, depth by depth; or a number.

    Raises:
        UserError: `"mode"` with blocks alone, or what `force_path` refuses.
    """
    blocks = mode.blocks if isinstance(mode, ModePath) else tuple(mode)
    with ExitStack() as stack:
        if weight != "mode":
            stack.enter_context(force_path(model, blocks, weight=weight))
        elif isinstance(mode, ModePath):
            for depth, (block, probability) in enumerate(zip(blocks, mode.probabilities, strict=True)):
                stack.enter_context(force_path(model, [block], depths=[depth], weight=probability))
        else:
            raise UserError("weight='mode' needs what mode_paths returned, not its blocks alone: give that")
        yield


@torch.no_grad()
def generate_rows(
    model: LoLForCausalLM,
    rows: Sequence[Mapping[str, Sequence[int]]],
    *,
    told: bool = True,
    max_new_tokens: int,
    end: int,
    batch_size: int = 32,
) -> list[list[int]]:
    """Continue prompts greedily, many at once; what forces the model while this runs holds.

    Args:
        model: In any mode; it is run in eval mode.
        rows: Prompts: `input_ids` and, of models whose router is told something, `router_only_ids` (-1 where there is
            none), as `record_paths` takes them.
        told: Whether the router reads the router-only tokens. If not, the network still sees the filler in their
            places, and the router is told nothing.
        max_new_tokens: Write at most so many.
        end: The token that ends a text.
        batch_size: Prompts at once; texts do not depend on it.

    Returns:
        What was written for each row, without prompt and end.

    Raises:
        UserError: no prompts, or what the model refuses.
    """
    if not rows:
        raise UserError("there is nothing to continue: give at least one prompt")
    written: list[list[int]] = []
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(rows), batch_size):
            given = _pad_left(model, rows[start : start + batch_size], told)
            width = given["attention_mask"].shape[1]
            output: Any = model.generate(
                **given, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, eos_token_id=end, pad_token_id=end
            )
            for ids in output[:, width:].tolist():
                written.append(ids[: ids.index(end)] if end in ids else ids)
    finally:
        model.train(was_training)
    return written


def _pad_left(model: LoLForCausalLM, rows: Sequence[Mapping[str, Sequence[int]]], told: bool) -> dict[str, Tensor]:
    base = find_model(model)
    width = max(len(row["input_ids"]) for row in rows)
    ids, mask, hidden = np.zeros((3, len(rows), width), dtype=np.int64)
    hidden -= 1
    for place, row in enumerate(rows):
        begin = width - len(row["input_ids"])
        ids[place, begin:], mask[place, begin:] = row["input_ids"], 1
        hidden[place, begin:] = row.get("router_only_ids", -1)
    device = base.embed_tokens.weight.device
    tensors = [torch.from_numpy(grid).to(device) for grid in (ids, mask, hidden)]
    given = {"input_ids": tensors[0], "attention_mask": tensors[1]}
    if not bool((tensors[2] >= 0).any()):
        return given
    if told:
        return given | {"router_only_ids": tensors[2]}
    if base.filler_embedding is None:
        raise UserError("router_only_ids needs a model with router_only_tokens=True in its config")
    embeds = base.embed_tokens(tensors[0])
    return given | {"inputs_embeds": torch.where(tensors[2][..., None] >= 0, base.filler_embedding, embeds)}


@dataclass(frozen=True)
class Attribution:
    """Whose text one is."""

    label: str
    """The label whose own text is nearest; `TIED` where two are."""
    distance: int
    """Its edit distance from there; 0 is that very text."""


def attribute(produced: Sequence[Hashable], own: Mapping[str, Sequence[Hashable]]) -> Attribution:
    """The label whose own text a produced one is, else the nearest by edit distance (insert, delete, replace).

    Args:
        produced: Its tokens or words.
        own: What each label writes for the same prompt, all different.
    """
    distances = {label: edit_distance(produced, text) for label, text in own.items()}
    least = min(distances.values())
    nearest = [label for label, distance in distances.items() if distance == least]
    return Attribution(nearest[0] if len(nearest) == 1 else TIED, least)


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Fewest insertions, deletions and replacements of single items that make one sequence the other (Levenshtein)."""
    number = {item: place for place, item in enumerate(dict.fromkeys([*one, *other]))}
    text = np.array([number[item] for item in other], dtype=np.int64)
    steps = np.arange(len(text) + 1)
    row = steps
    for count, item in enumerate(one, start=1):
        replaced_or_deleted = np.minimum(row[:-1] + (text != number[item]), row[1:] + 1)
        # An insertion adds 1 to its left neighbour, so a place is the least of all to its left plus their distance.
        row = np.minimum.accumulate(np.concatenate([[count], replaced_or_deleted]) - steps) + steps
    return int(row[-1])


@dataclass(frozen=True)
class Confusion:
    """Forced against produced, in numbers of texts."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """[forced][produced]."""
    tied: tuple[int, ...]
    """[forced]: texts equally near to two labels."""
    unattributed: tuple[int, ...]
    """[forced]: texts of no label."""

    @property
    def totals(self) -> tuple[int, ...]:
        """[forced]: all texts."""
        return tuple(sum(row) + t + u for row, t, u in zip(self.counts, self.tied, self.unattributed, strict=True))

    @property
    def diagonal(self) -> tuple[float, ...]:
        """[forced]: the share of all its texts, ties and unattributed ones included, that are the forced label's."""
        return tuple(self.counts[k][k] / total if total else float("nan") for k, total in enumerate(self.totals))


def confusion(forced: Sequence[str], produced: Sequence[str | None], labels: Sequence[str]) -> Confusion:
    """Count what came out by what was forced.

    Args:
        forced: The label whose path was forced, of each text.
        produced: The label of each text, `TIED`, or `None` for no label.
        labels: In the order of the matrix.

    Raises:
        UserError: numbers of texts that differ, or a label that is not among `labels`.
    """
    if len(forced) != len(produced):
        raise UserError(f"{len(forced)} forced labels, {len(produced)} produced ones: give one of each per text")
    place = {label: number for number, label in enumerate(labels)}
    unknown = sorted({*forced, *(p for p in produced if p is not None and p != TIED)} - set(place))
    if unknown:
        raise UserError(f"{unknown[0]!r} is not among the labels {', '.join(labels)}: name it there")
    counts = np.zeros((len(labels), len(labels) + 2), dtype=np.int64)
    for own, came in zip(forced, produced, strict=True):
        column = len(labels) + 1 if came is None else len(labels) if came == TIED else place[came]
        counts[place[own], column] += 1
    return Confusion(
        tuple(labels),
        tuple(tuple(row) for row in counts[:, : len(labels)].tolist()),
        tuple(counts[:, -2].tolist()),
        tuple(counts[:, -1].tolist()),
    )
