"""Recipes: functions that return a `TrainConfig`."""

from collections.abc import Callable

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.train.config import BalanceConfig, DataConfig, EvalConfig, GrowthConfig, OptimConfig, TrainConfig


def demo() -> TrainConfig:
    """The first hour: a small LoL on the standard library's own text, in minutes on two CPU cores.

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
    """Half a minute on two CPU cores: to see a run from end to end, on any text of a few pages."""
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


RECIPES: dict[str, Callable[[], TrainConfig]] = {"demo": demo, "tiny": tiny}


def recipe(name: str) -> TrainConfig:
    """The recipe of this name.

    Raises:
        UserError: there is none; the message lists those that exist.
    """
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}: choose one of {', '.join(sorted(RECIPES))}")
    return RECIPES[name]()
