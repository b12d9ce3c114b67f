"""Recipes: functions that return a `TrainConfig`. The article's runs are in `published.py`; each has a twin here."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.train.config import (
    MODEL_FIELDS,
    BalanceConfig,
    BudgetConfig,
    DataConfig,
    EvalConfig,
    GrowthConfig,
    OptimConfig,
    TrainConfig,
)
from lol.train.published import MATH_FLOPS, MOE_FLOPS, PUBLISHED


def demo() -> TrainConfig:
    """Minutes on two CPU cores.

    The first hour: a small LoL on the standard library's own text.

    The paper's balance (bias 0.001 a step, sequence loss 1e-4) cannot settle in a few hundred steps, and a faster bias
    alone makes all windows change block together; a stronger sequence loss makes them differ (LOG.md, 2026-11-29).
    """
    return TrainConfig(
        recipe="demo",
        model=LoLConfig(
            vocab_size=512,
            hidden_size=192,
            num_attention_heads=6,
            num_prelude_layers=1,
            num_coda_layers=1,
            num_experts=4,
            num_routed_depths=6,
            window_size=32,
            window_stride=16,
            tie_word_embeddings=True,
        ),
        data=DataConfig(source="stdlib", context_length=256),
        optim=OptimConfig(learning_rate=4e-3, warmup_steps=40),
        balance=BalanceConfig(rate=0.002, sequence_aux=0.1),
        growth=GrowthConfig(initial_depth=1),
        eval=EvalConfig(every=90, rows=128, ngrams=True),
        steps=450,
        batch_size=8,
        checkpoint_every=150,
    )


def tiny() -> TrainConfig:
    """Half a minute on a CPU.

    To see a run from end to end, on any text of a few pages.
    """
    return TrainConfig(
        recipe="tiny",
        model=LoLConfig(
            vocab_size=512,
            hidden_size=64,
            num_attention_heads=4,
            num_prelude_layers=1,
            num_coda_layers=1,
            num_experts=4,
            num_routed_depths=6,
            window_size=16,
            window_stride=8,
            tie_word_embeddings=True,
        ),
        data=DataConfig(source="stdlib", document_chars=500, held_out_fraction=0.1, context_length=128),
        optim=OptimConfig(learning_rate=4e-3, warmup_steps=20),
        balance=BalanceConfig(rate=0.002, sequence_aux=0.2),
        growth=GrowthConfig(initial_depth=1),
        eval=EvalConfig(every=50, rows=16, ngrams=True),
        steps=200,
        batch_size=8,
        checkpoint_every=100,
    )


def twin(published: Callable[[], TrainConfig]) -> TrainConfig:
    """The same run at a size for two CPU cores.

    Layers, blocks, depths, experts, attention, growing and truncated backprop are the published ones, and so is the
    proportion of context, window and stride; width, vocabulary, batch and length are small, and the text is the
    standard library's. Runs that are matched by FLOPs still are, with step caps in the same proportion. Balance and
    learning rate are those of `tiny`: the paper's balance cannot settle in so few steps. (Decided here.)
    """
    config, like = published(), tiny()
    sizes = {name: getattr(like.model, name) for name in _TWIN_SIZES}
    fields: dict[str, Any] = {name: getattr(config.model, name) for name in MODEL_FIELDS}
    flops = config.budget.flops
    return replace(
        like,
        recipe=f"{config.recipe}-tiny",
        model=LoLConfig(**(fields | sizes)),
        growth=config.growth,
        budget=BudgetConfig(flops=None if flops is None else _TWIN_FLOPS[flops]),
        steps=like.steps if flops is None else config.steps * like.steps // _TWIN_STEPS_OF,
    )


_TWIN_SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "window_size", "window_stride")
_TWIN_FLOPS = {MATH_FLOPS: 1.7e12, MOE_FLOPS: 2.2e12}
# So many steps of a run that is matched by FLOPs become those of `tiny`.
_TWIN_STEPS_OF = 7_269

RECIPES: dict[str, Callable[[], TrainConfig]] = (
    {"demo": demo, "tiny": tiny}
    | PUBLISHED
    | {f"{name}-tiny": partial(twin, published) for name, published in PUBLISHED.items()}
)


def recipe(name: str) -> TrainConfig:
    """The recipe of this name.

    Raises:
        UserError: there is none; the message names the nearest.
    """
    if name not in RECIPES:
        nearest = get_close_matches(name, RECIPES, n=1)
        guess = f"did you mean {nearest[0]}? " if nearest else ""
        raise UserError(f"there is no recipe {name!r}: {guess}`lol recipe list` shows them all")
    return RECIPES[name]()
