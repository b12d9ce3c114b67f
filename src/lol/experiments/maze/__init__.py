"""Five ways through a maze: the puzzle, and how each way searches."""
