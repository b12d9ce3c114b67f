"""What the figures of the experiments share, beside `lol.paths.figure`."""

from matplotlib.axes import Axes

from lol.paths.figure import INK, SOFT, save_figure

__all__ = ["clean_axes", "save_figure"]


def clean_axes(axes: Axes) -> Axes:
    """Axes without a frame, for points and lines; returns the same."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, color=SOFT, labelcolor=INK)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes
