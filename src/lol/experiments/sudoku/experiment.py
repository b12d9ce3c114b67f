"""The sudoku experiment at both scales."""

from lol.experiments.strategies.corpus import CorpusConfig
from lol.experiments.strategies.experiment import Study, strategy_experiment, tiny_run
from lol.experiments.sudoku.puzzle import SudokuPuzzle
from lol.train.recipes import recipe


def tiny() -> Study:
    """4 × 4 sudokus for two CPU cores. A step reads about 58 of them. (Sizes: decided here.)

    A row of 384 tokens cuts one puzzle in six, of which the part without its prompt is not learned.
    """
    return Study(
        SudokuPuzzle(),
        CorpusConfig(examples=300_000),
        tiny_run("sudoku-tiny", context_length=384, batch_size=10),
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
