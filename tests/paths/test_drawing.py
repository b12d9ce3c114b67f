"""Figures hold the numbers they were given, and colours can be told apart."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from lol.paths.colors import block_colors
from lol.paths.curves import read_curves, thin
from lol.paths.svg import balance_svg, loss_svg

# Machado, Oliveira and Fernandes 2009, full strength: what protan, deutan and tritan eyes see, in linear RGB.
EYES = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def oklab(color: str, eyes: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(EYES[eyes]) @ linear, 0, 1)
    to_cones = [
        [0.41222147, 0.53633254, 0.05144599],
        [0.2119035, 0.6806995, 0.1073969],
        [0.0883025, 0.2817188, 0.6299787],
    ]
    to_lab = [
        [0.21045426, 0.79361779, -0.00407205],
        [1.9779985, -2.4285922, 0.45059371],
        [0.02590404, 0.78277177, -0.80867577],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_cones) @ seen)


@pytest.mark.parametrize("eyes", EYES)
def test_eight_colors_can_be_told_apart(eyes):
    colors = [oklab(color, eyes) for color in block_colors(8)]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colors, 2)) > 0.1


def test_every_color_shows_on_white_and_on_black():
    lightness = [oklab(color, "normal")[0] for color in block_colors(8)]
    assert min(lightness) > 0.45
    assert max(lightness) < 0.85


def test_a_block_keeps_its_color_in_a_larger_library():
    assert block_colors(33)[:5] == block_colors(5)
    assert len(set(block_colors(40))) == 40


def test_curves_are_the_events(metrics):
    curves = read_curves(metrics)
    assert len(curves.train) == 20
    assert curves.held_out == [(20, 4.25)]
    assert (curves.unigram, curves.bigram) == (5.5, 4.5)
    assert curves.depth[-1] == (21, 3)


def test_thinning_keeps_the_mean():
    points = [(float(step), float(step % 7)) for step in range(100)]
    assert len(thin(points, 10)) == 10
    assert np.mean(thin(points, 10), axis=0) == pytest.approx(np.mean(points, axis=0))
    assert thin([], 10) == []


def test_loss_svg_names_every_line_and_no_two_names_touch(metrics):
    close = [*metrics, {"event": "summary", "unigram_loss": 4.1, "bigram_loss": 4.05}]
    drawing = loss_svg(close, 600, 300)
    heights = []
    for name in ("held-out 4.25", "unigram 4.10", "bigram 4.05", "train 4.00"):
        before = drawing[: drawing.index(f">{name}<")]
        heights.append(float(before[before.rindex('y="') + 3 : -1]))
    assert all(below - above > 14.8 for above, below in itertools.pairwise(heights))
    axis = max(float(y) for y in re.findall(r'class="grid"[^>]*y1="([\d.]+)"', drawing))
    assert heights[-1] <= axis + 4.05
    assert drawing.count('<rect class="depth"') == 3


@pytest.mark.parametrize("part", [slice(0), slice(-1, None), slice(20, 21)])
def test_no_losses_no_drawing(metrics, part):
    assert loss_svg(metrics[part], 600, 300) is None
    assert balance_svg(metrics[part], 600, 300) is None


def test_one_step_can_be_drawn(metrics):
    assert "NaN" not in loss_svg(metrics[:1], 600, 300)


def test_balance_svg_stacks_the_shares(metrics):
    drawing = balance_svg(metrics, 400, 200)
    assert drawing.count("<polygon") == 2
    first = drawing.split('points="')[1].split('"')[0].split()
    # Step 1 splits the windows 1 to 1: the border of the two blocks begins half way up.
    assert first[-1] == f"34.0,{(26 + 170) / 2:.1f}"
