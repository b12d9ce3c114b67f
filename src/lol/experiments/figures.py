"""What the figures of the experiments share."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INK, _SOFT = "#1a1a1a", "#8a8a8a"


def clean_axes(axes: Axes) -> Axes:
    """Axes without a frame, for points and lines; returns the same."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, color=_SOFT, labelcolor=_INK)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure as SVG: the same file for the same numbers, so no date, and ids that do not change."""
    with matplotlib.rc_context({"svg.hashsalt": "lol", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, metadata={"Date": None})
