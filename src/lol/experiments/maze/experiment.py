"""The maze experiment at both scales."""

from lol.experiments.maze.puzzle import MazePuzzle
from lol.experiments.strategies.corpus import CorpusConfig
from lol.experiments.strategies.experiment import Study, strategy_experiment, tiny_run
from lol.train.recipes import recipe


def tiny() -> Study:
    """4 × 4 mazes for two CPU cores. A step reads about 97 of them. (Sizes: decided here.)

    A row of 256 tokens cuts one puzzle in seven, of which the part without its prompt is not learned; longer rows cost
    more in the full attention of prelude and coda than that.
    """
    return Study(
        MazePuzzle(size=4),
        CorpusConfig(examples=300_000),
        tiny_run("maze-tiny", context_length=256, batch_size=14),
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
