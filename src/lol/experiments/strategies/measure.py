"""What a model trained on strategies does when it is told one, told none, and when a strategy's mode path is forced."""
from pathlib import Path
from typing import Any
from lol.experiments.strategies.corpus import CorpusConfig
from lol.experiments.strategies.puzzle import Puzzle
def measure_run(puzzle: Puzzle, corpus: CorpusConfig, run: Path) -> dict[str, Any]:
    return {}
