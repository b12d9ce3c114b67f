"""Paths as points of a plane: principal components, the same for the same numbers, and a picture with a legend."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from lol.errors import UserError
from lol.paths.colors import block_colors
from lol.paths.figure import new_axes, save_figure


class Projection(NamedTuple):
    """What `principal_components` found."""

    points: Float[np.ndarray, "R k"]
    """The rows, centred, along each component."""
    components: Float[np.ndarray, "k F"]
    """Unit vectors; the entry of largest size is positive."""
    explained: Float[np.ndarray, "k"]
    """Share of the variance along each component."""
    mean: Float[np.ndarray, "F"]
    """What was subtracted from the rows."""


def principal_components(features: Float[np.ndarray, "R F"], k: int = 2) -> Projection:
    """The k directions along which rows differ most, exactly, by the eigenvectors of their covariance.

    Raises:
        UserError: fewer rows or features than components.
    """
    if min(features.shape) < k:
        raise UserError(f"{features.shape[0]} rows of {features.shape[1]} features have no {k} components: give more")
    rows = features.astype(np.float64)
    mean = rows.mean(0)
    variances, vectors = np.linalg.eigh(np.cov(rows - mean, rowvar=False, bias=True))
    components = vectors[:, ::-1][:, :k].T
    signs = np.sign(components[np.arange(k), np.abs(components).argmax(1)])
    components = components * signs[:, None]
    total = max(float(variances.sum()), np.finfo(np.float64).tiny)
    return Projection((rows - mean) @ components.T, components, np.clip(variances[::-1][:k], 0, None) / total, mean)


def draw_projection(projection: Projection, labels: Sequence[str], file: Path, title: str = "") -> None:
    """Draw the first two components as an SVG figure, a colour per label, with a legend.

    Raises:
        UserError: as many labels as rows are needed.
    """
    if len(labels) != len(projection.points):
        raise UserError(f"{len(labels)} labels for {len(projection.points)} rows: give one for each")
    own = np.asarray(labels)
    figure = Figure(figsize=(6.8, 4.6), layout="constrained")
    axes = new_axes(figure, title)
    names = np.unique(own)
    for name, color in zip(names, block_colors(len(names)), strict=True):
        points = projection.points[own == name]
        axes.scatter(points[:, 0], points[:, 1], s=9, color=color, alpha=0.6, linewidths=0, label=str(name))
    for number, set_label in enumerate((axes.set_xlabel, axes.set_ylabel)):
        set_label(f"component {number + 1} ({100 * projection.explained[number]:.0f} % of the variance)")
    axes.legend(frameon=False, fontsize=8, markerscale=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, file)
