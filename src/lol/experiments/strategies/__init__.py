"""Models that solve one puzzle by several strategies, the path alone carrying which: what maze and sudoku share."""
