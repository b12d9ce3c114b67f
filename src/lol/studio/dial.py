"""From looped to sparse: what a model costs as its library grows, at a width and a number of depths."""

import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.cost import cache_bytes, count_flops, count_parameters
from lol.studio.limits import MAX_COUNTED_WINDOWS
from lol.train.budget import checkpoint_bytes
from lol.train.config import MODEL_FIELDS
from lol.train.published import PUBLISHED
from lol.train.recipes import recipe

_BASE = "demo"


@dataclass(frozen=True)
class Point:
    """What a model of so many blocks costs."""

    num_experts: int
    stored: int
    """Parameters without embedding and head."""
    active: int
    """Of these, what a token meets on its way; a block counts as often as it runs."""
    total: int
    """All parameters."""
    flops_per_token: float
    """Of training, forward and backward, at the context length."""
    forward_flops_per_token: float
    cache_bytes: int
    """Of one text as long as the context."""
    checkpoint_bytes: int
    """With AdamW's moments."""


@dataclass(frozen=True)
class Mark:
    """A published setting."""

    name: str
    num_experts: int
    num_routed_depths: int
    hidden_size: int
    stored: int
    active: int


@dataclass(frozen=True)
class DialRecipe:
    """The chosen model, to be trained."""

    command: str
    config: dict[str, Any]
    """A config.json: the type, and fields of `LoLConfig` that differ from its defaults."""


@dataclass(frozen=True)
class Dial:
    points: list[Point]
    """One for each number of blocks up to the depths, or up to the chosen number."""
    chosen: Point
    marks: list[Mark]
    recipe: DialRecipe


def turn_dial(fields: dict[str, Any], context: int, dtype: torch.dtype) -> Dial:
    """The costs of a model and of its neighbours with fewer and more blocks.

    Args:
        fields: Of `LoLConfig`, `num_experts` and `num_routed_depths` among them.
        context: Tokens of a text.
        dtype: Of the cache.

    Raises:
        UserError: fields that do not fit together.
    """
    if context // fields["window_size"] > MAX_COUNTED_WINDOWS:
        raise UserError(
            f"a context of {context:,} tokens has more than {MAX_COUNTED_WINDOWS:,} windows of "
            f"{fields['window_size']}: choose larger windows or a shorter context"
        )
    chosen = LoLConfig(**fields)
    numbers = range(1, max(chosen.num_routed_depths, chosen.num_experts) + 1)
    neighbours: list[dict[str, Any]] = [fields | {"num_experts": number} for number in numbers]
    configs = [LoLConfig(**own) for own in neighbours]
    flops = _flops(configs, context)
    points = [_point(config, *own, context, dtype) for config, own in zip(configs, flops, strict=True)]
    return Dial(points, points[chosen.num_experts - 1], list(published_marks()), _recipe(chosen, context))


def _flops(configs: list[LoLConfig], context: int) -> list[tuple[int, int]]:
    """Training and forward FLOPs of a text for each number of blocks from 1 on.

    In the number of blocks they are polynomials of degree 2 (a router scores L blocks, its noise mixes them), so three
    counts are all of them: counting walks over every window.
    """
    counts = [count_flops(config, context) for config in configs[:3]]
    columns = [[one.training for one in counts], [one.forward for one in counts]]
    training, forward = ([_extrapolate(column, place) for place in range(len(configs))] for column in columns)
    return list(zip(training, forward, strict=True))


def _extrapolate(values: list[int], place: int) -> int:
    """The polynomial of least degree through values at 0, 1, 2, exactly (Newton's differences)."""
    if place < len(values):
        return values[place]
    first, second, third = values
    return first + place * (second - first) + place * (place - 1) // 2 * (third - 2 * second + first)


def _point(config: LoLConfig, training: int, forward: int, context: int, dtype: torch.dtype) -> Point:
    counts = count_parameters(config)
    return Point(
        num_experts=config.num_experts,
        stored=counts.stored,
        active=counts.active,
        total=counts.total,
        flops_per_token=training / context,
        forward_flops_per_token=forward / context,
        cache_bytes=cache_bytes(config, context, 1, dtype),
        checkpoint_bytes=checkpoint_bytes(config),
    )


@cache
def published_marks() -> tuple[Mark, ...]:
    """The article's runs that have a core."""
    models = {name: make().model for name, make in PUBLISHED.items()}
    counted = {name: (model, count_parameters(model)) for name, model in models.items() if model.num_routed_depths}
    return tuple(
        Mark(name, model.num_experts, model.num_routed_depths, model.hidden_size, counts.stored, counts.active)
        for name, (model, counts) in counted.items()
    )


def _recipe(config: LoLConfig, context: int) -> DialRecipe:
    base, default = recipe(_BASE), LoLConfig()
    words = ["lol", "train", "--recipe", _BASE, "--run", "runs/mine"]
    for name in MODEL_FIELDS:
        value = getattr(config, name)
        if value != getattr(base.model, name):
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--model.{flag}" if value else f"--model.no-{flag}")
            else:
                words += [f"--model.{flag}", str(value)]
    if context != base.data.context_length:
        words += ["--data.context-length", str(context)]
    changed = {name: getattr(config, name) for name in MODEL_FIELDS if getattr(config, name) != getattr(default, name)}
    # transformers tells by the type whose configuration a file is.
    return DialRecipe(shlex.join(words), {"model_type": config.model_type, **changed})
