"""An experiment on a puzzle: what is trained, on which corpus; measuring and wording are in `measure` and `report`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lol.experiments.harness import Experiment, Numbers, Scale, Setting
from lol.experiments.strategies.corpus import STRATEGY_COLUMN, TOKENIZER, TRAIN, VALIDATION, CorpusConfig, write_corpus
from lol.experiments.strategies.measure import measure_run
from lol.experiments.strategies.puzzle import Puzzle
from lol.experiments.strategies.report import draw_numbers, word_numbers
from lol.model.config import LoLConfig
from lol.train.config import BalanceConfig, DataConfig, EvalConfig, OptimConfig, TrainConfig

CORPUS, _RUN = "corpus", "seed-"


@dataclass(frozen=True)
class Study:
    """A puzzle at one scale."""

    puzzle: Puzzle
    corpus: CorpusConfig
    train: TrainConfig
    """The run, but for its data and its seed."""
    mixtures: int = 60
    """So many mixtures of two mode paths are tried."""


def tiny_run(recipe: str, *, context_length: int, batch_size: int) -> TrainConfig:
    """The run of a puzzle for two CPU cores, held out on as many rows as four steps read. (Sizes: decided here.)

    Args:
        recipe: Its name.
        context_length: Tokens in a row; longer rows cut fewer puzzles and cost more in prelude and coda.
        batch_size: Rows of a step.
    """
    return TrainConfig(
        recipe=recipe,
        model=LoLConfig(
            vocab_size=64,
            hidden_size=128,
            num_attention_heads=4,
            num_prelude_layers=2,
            num_coda_layers=2,
            num_experts=8,
            num_routed_depths=6,
            window_size=16,
            window_stride=8,
            router_only_tokens=True,
        ),
        data=DataConfig(context_length=context_length),
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=100),
        balance=BalanceConfig(sequence_aux=1e-3),
        eval=EvalConfig(every=250, rows=4 * batch_size),
        steps=5_000,
        batch_size=batch_size,
        checkpoint_every=250,
    )


def strategy_experiment(
    name: str, purpose: str, published: str, studies: Mapping[Scale, Callable[[], Study]]
) -> Experiment:
    """An experiment that trains a model on all strategies of a puzzle and forces each one's mode path.

    Args:
        name, purpose, published: as in `Experiment`.
        studies: What is done at each scale.
    """

    def prepare(setting: Setting) -> None:
        study = _study(studies, setting)
        write_corpus(study.puzzle, study.corpus, setting.folder / CORPUS)

    def runs(setting: Setting) -> Mapping[str, TrainConfig]:
        study = _study(studies, setting)
        data = data_of(study.puzzle, setting.folder / CORPUS)
        config = replace(study.train, data=replace(study.train.data, **data))
        return {f"{_RUN}{seed}": replace(config, seed=seed) for seed in setting.seeds}

    def measure(setting: Setting, folders: Mapping[str, Path]) -> Numbers:
        study = _study(studies, setting)
        corpus = setting.folder / CORPUS
        return {
            name: measure_run(study.puzzle, study.corpus, corpus, run, study.mixtures) for name, run in folders.items()
        }

    return Experiment(name, purpose, published, (0,), runs, measure, draw_numbers, word_numbers, prepare=prepare)


def data_of(puzzle: Puzzle, corpus: Path) -> dict[str, Any]:
    """The fields of `DataConfig` that make a run read a corpus of `write_corpus`."""
    return {
        "source": str(corpus / TRAIN),
        "held_out_source": str(corpus / VALIDATION),
        "tokenizer": str(corpus / TOKENIZER),
        "router_only_column": STRATEGY_COLUMN,
        "scored_after": puzzle.scored_after,
    }


def _study(studies: Mapping[Scale, Callable[[], Study]], setting: Setting) -> Study:
    study = studies[setting.scale]()
    if setting.fast:
        return replace(study, corpus=replace(study.corpus, examples=64, validation=3, test=8), mixtures=2)
    return study
