"""The sudoku experiment at both scales."""

from lol.experiments.strategies.corpus import CorpusConfig
from lol.experiments.strategies.experiment import Study, strategy_experiment
from lol.experiments.sudoku.puzzle import SudokuPuzzle
from lol.model.config import LoLConfig
from lol.train.config import BalanceConfig, DataConfig, EvalConfig, OptimConfig, TrainConfig
from lol.train.recipes import recipe


def tiny() -> Study:
    """4 × 4 sudokus for two CPU cores. A step reads about 58 of them. (Sizes: decided here.)

    A row of 384 tokens cuts one puzzle in six, of which the part without its prompt is not learned.
    """
    return Study(
        SudokuPuzzle(),
        CorpusConfig(examples=300_000),
        TrainConfig(
            recipe="sudoku-tiny",
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
            data=DataConfig(context_length=384),
            optim=OptimConfig(learning_rate=3e-3, warmup_steps=100),
            balance=BalanceConfig(sequence_aux=1e-3),
            eval=EvalConfig(every=250, rows=40),
            steps=5_000,
            batch_size=10,
            checkpoint_every=250,
        ),
    )


def paper() -> Study:
    """9 × 9 sudokus of 38 givens for the published model; the article gives no givens.

    The longest have, with the puzzle's 82 words and a document's ends, 1,016 of the published context's 1,024 tokens.
    """
    puzzle = SudokuPuzzle(shape="9x9", givens=38, longest_trace=930)
    return Study(puzzle, CorpusConfig(examples=300_000, validation=1000, test=1000), recipe("sudoku"))


SUDOKU = strategy_experiment(
    "sudoku",
    "Five ways to solve a sudoku: the path alone says which.",
    "the forced strategy comes out 99.5 to 100 % of the time",
    {"tiny": tiny, "paper": paper},
)
