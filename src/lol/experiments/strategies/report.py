"""x"""
from pathlib import Path
from lol.experiments.harness import Numbers
def draw_numbers(numbers: Numbers, folder: Path) -> None: ...
def word_numbers(numbers: Numbers, name: str) -> str:
    return ""
