"""Sudokus with one solution, five strategies that write down how they solve them, and the experiment on both."""
