"""Models that solve one puzzle by several strategies, where the path alone carries which: what maze and sudoku share."""
