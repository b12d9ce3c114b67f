"""The maze experiment at both scales."""

from lol.experiments.maze.puzzle import MazePuzzle
from lol.experiments.strategies.corpus import CorpusConfig
from lol.experiments.strategies.experiment import Study, strategy_experiment
from lol.model.config import LoLConfig
from lol.train.config import BalanceConfig, DataConfig, EvalConfig, OptimConfig, TrainConfig
from lol.train.recipes import recipe


def tiny() -> Study:
    """4 × 4 mazes for two CPU cores. A step reads about 97 of them. (Sizes: decided here.)

    A row of 256 tokens cuts one puzzle in seven, of which the part without its prompt is not learned; longer rows cost
    more in the full attention of prelude and coda than that.
    """
    return Study(
        MazePuzzle(size=4),
        CorpusConfig(examples=300_000),
        TrainConfig(
            recipe="maze-tiny",
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
            data=DataConfig(context_length=256),
            optim=OptimConfig(learning_rate=3e-3, warmup_steps=100),
            balance=BalanceConfig(sequence_aux=1e-3),
            eval=EvalConfig(every=250, rows=56),
            steps=5_000,
            batch_size=14,
            checkpoint_every=250,
        ),
    )


def paper() -> Study:
    """8 × 8 mazes for the published model; the article gives no size. A puzzle has 70 to 180 tokens."""
    return Study(MazePuzzle(size=8), CorpusConfig(examples=4_000_000, validation=1000, test=1000), recipe("maze"))


MAZE = strategy_experiment(
    "maze",
    "Five ways through a maze: the path alone says which.",
    "the forced strategy comes out 99.79 to 100 % of the time",
    {"tiny": tiny, "paper": paper},
)
