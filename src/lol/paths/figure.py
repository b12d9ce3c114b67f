"""What the figures of paths share: plain axes, matrices with their numbers, and files that do not change."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, SOFT = "#1a1a1a", "#8a8a8a"
# More cells than this stay without their numbers, which would not be read.
_MOST_NUMBERS = 400


def new_axes(figure: Figure, title: str = "") -> Axes:
    """Axes without a frame at the top and right."""
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, color=SOFT, labelcolor=INK)
    if title:
        axes.set_title(title, fontsize=9, loc="left")
    return axes


def draw_matrix(
    values: Float[np.ndarray, "A B"],
    file: Path,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    names: tuple[str, str],
    title: str = "",
    most: float | None = None,
    form: str = "{:.0%}",
) -> None:
    """Draw a matrix as an SVG figure: darker where larger, each number in its cell.

    Args:
        values: The numbers, none negative.
        file: The file to write.
        rows: Name of each row, from the top.
        columns: Name of each column.
        names: What rows and columns are.
        title: Over the figure.
        most: The number that is darkest. Default: the largest.
        form: How a number is written.
    """
    size = (1.6 + 0.46 * len(columns), 1.2 + 0.34 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = new_axes(figure, title)
    top = float(np.nanmax(values)) if most is None else most
    top = top or 1.0
    axes.imshow(values, cmap="Blues", vmin=0, vmax=top, aspect="auto")
    if values.size <= _MOST_NUMBERS:
        for row, column in np.ndindex(values.shape):
            value = float(values[row, column])
            color = "white" if value > 0.6 * top else INK
            axes.text(column, row, form.format(value), ha="center", va="center", fontsize=7, color=color)
    slanted = max(map(len, columns)) > 4
    axes.set_xticks(range(len(columns)), columns, rotation=40 if slanted else 0, ha="right" if slanted else "center")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylabel(names[0], fontsize=8)
    axes.set_xlabel(names[1], fontsize=8)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    save_figure(figure, file)


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure as SVG: the same file for the same numbers, so no date, and ids that do not change."""
    with matplotlib.rc_context({"svg.hashsalt": "lol", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
