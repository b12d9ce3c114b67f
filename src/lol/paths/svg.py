"""The report's curves as SVG, drawn by hand so that they take the page's colours, light or dark, and its typeface.

Lines are named where they end, so there is no legend. Classes are coloured by the page's style sheet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from lol.paths.curves import Curves, read_curves, thin

_LEFT, _TOP, _BOTTOM, _STRIP = 34, 26, 30, 12
_LABEL_GAP = 15  # pixels between the names of two lines


def loss_svg(metrics: Sequence[Mapping[str, Any]], width: int, height: int) -> Markup | None:
    """Draw train and held-out loss, unigram and bigram lines, and a strip of the depths that ran.

    Args:
        metrics: The events of `metrics.jsonl`.
        width: In CSS pixels, the strip of names at the right included.
        height: Likewise, the strip of depths included.

    Returns:
        An `<svg>` element, or `None` if there is no loss to draw.
    """
    curves = read_curves(metrics)
    losses = [loss for _, loss in curves.train + curves.held_out]
    if not losses:
        return None
    baselines = [loss for loss in (curves.unigram, curves.bigram) if loss is not None]
    axis = _Axis(curves, [*losses, *baselines], width, height)
    parts = [*_grid(axis), *_baselines(axis, curves)]
    parts.append(_line(axis, thin(curves.train, 240), "train"))
    parts.append(_line(axis, curves.held_out, "held-out"))
    parts += [
        f'<circle class="held-out" cx="{axis.x(s):.1f}" cy="{axis.y(v):.1f}" r="2.5"/>' for s, v in curves.held_out
    ]
    parts += _names(axis, curves)
    parts += _depth_strip(axis, curves)
    label = f"Loss over {axis.last} steps, from {losses[0]:.2f} to {losses[-1]:.2f} nats per token"
    return _picture(parts, width, height, label)


def balance_svg(metrics: Sequence[Mapping[str, Any]], width: int, height: int) -> Markup | None:
    """Draw which share of the windows each block took as training went on, all depths together, stacked to 100 %.

    Args:
        metrics: The events of `metrics.jsonl`; of "train" the `load` (D × L counts) is read.
        width: In CSS pixels.
        height: Likewise.

    Returns:
        An `<svg>` element, or `None` with fewer than two loads.
    """
    events = [event for event in metrics if event.get("event") == "train" and event.get("load")]
    if len(events) < 2:
        return None
    loads = np.array([np.sum(event["load"], axis=0) for event in events], dtype=float)
    steps = np.array([event["step"] for event in events], dtype=float)
    groups = np.array_split(np.arange(len(events)), min(len(events), 120))
    load = np.array([loads[group].sum(0) for group in groups])
    border = np.concatenate([np.zeros((len(groups), 1)), (load / load.sum(1, keepdims=True)).cumsum(1)], axis=1)
    middle = np.array([steps[group].mean() for group in groups])
    right, bottom = width - _LEFT, height - _BOTTOM
    x = _LEFT + (right - _LEFT) * (middle - middle[0]) / (middle[-1] - middle[0])
    y = bottom - (bottom - _TOP) * border
    parts = [f'<text class="unit" x="0" y="{_TOP - 13}">% of windows in training</text>']
    for block in range(load.shape[1]):
        lower = [f"{a:.1f},{b:.1f}" for a, b in zip(x, y[:, block], strict=True)]
        upper = [f"{a:.1f},{b:.1f}" for a, b in zip(x, y[:, block + 1], strict=True)]
        color = f"var(--block-{block})"
        parts.append(f'<polygon class="share" points="{" ".join(lower + upper[::-1])}" style="fill: {color}"/>')
        if y[-1, block] - y[-1, block + 1] > 11:
            at = (y[-1, block] + y[-1, block + 1]) / 2 + 4
            parts.append(f'<text class="tick" x="{right + 8}" y="{at:.1f}">{block}</text>')
    for percent in (0, 50, 100):
        at = bottom - (bottom - _TOP) * percent / 100
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 8}" y="{at + 4:.1f}">{percent}</text>')
    for anchor, at, step in (("start", _LEFT, middle[0]), ("end", right, middle[-1])):
        name = f"step {step:,.0f}"
        parts.append(f'<text class="tick" text-anchor="{anchor}" x="{at}" y="{bottom + 17}">{name}</text>')
    return _picture(parts, width, height, "Share of each block in training")


def _picture(parts: list[str], width: int, height: int, label: str) -> Markup:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return Markup(f'<svg {size} role="img" aria-label="{label}">{"".join(parts)}</svg>')


class _Axis:
    """Where a step and a loss lie on the drawing."""

    def __init__(self, curves: Curves, losses: list[float], width: int, height: int):
        self.last = max(int(step) for step, _ in curves.train + curves.held_out)
        self.left, self.right = _LEFT, width - 108
        self.top, self.bottom = _TOP, height - _BOTTOM - (_STRIP + 18 if curves.depth else 0)
        # A first loss far above the rest must not flatten the rest.
        low, high = min(losses), max(losses)
        self.loss_ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        self.low, self.high = float(self.loss_ticks[0]), float(self.loss_ticks[-1])
        steps = MaxNLocator(5 if width > 500 else 3, integer=True).tick_values(0, max(self.last, 1))
        self.step_ticks = [int(step) for step in steps if 0 <= step <= self.last]

    def x(self, step: int | float) -> float:
        return self.left + (self.right - self.left) * step / max(self.last, 1)

    def y(self, loss: int | float) -> float:
        return self.bottom - (self.bottom - self.top) * (loss - self.low) / (self.high - self.low)


def _grid(axis: _Axis) -> list[str]:
    parts = [f'<text class="unit" x="0" y="{axis.top - 13}">nats per token</text>']
    for loss in axis.loss_ticks:
        y = axis.y(float(loss))
        parts.append(f'<line class="grid" x1="{axis.left}" x2="{axis.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{axis.left - 8}" y="{y + 4:.1f}">{loss:g}</text>')
    for step in axis.step_ticks:
        name = f"step {step:,}" if step == axis.step_ticks[-1] else f"{step:,}"
        y = axis.bottom + 17
        parts.append(f'<text class="tick" text-anchor="middle" x="{axis.x(step):.1f}" y="{y}">{name}</text>')
    return parts


def _baselines(axis: _Axis, curves: Curves) -> list[str]:
    heights = [axis.y(loss) for loss in (curves.unigram, curves.bigram) if loss is not None]
    return [f'<line class="baseline" x1="{axis.left}" x2="{axis.right}" y1="{y:.1f}" y2="{y:.1f}"/>' for y in heights]


def _line(axis: _Axis, points: Sequence[tuple[float, float]], name: str) -> str:
    path = " ".join(f"{axis.x(step):.1f},{axis.y(loss):.1f}" for step, loss in points)
    return f'<polyline class="{name}" points="{path}"/>' if len(points) > 1 else ""


def _names(axis: _Axis, curves: Curves) -> list[str]:
    """Each line's name and last value at its right end, pushed apart where they would touch."""
    ends = {
        "unigram": curves.unigram,
        "bigram": curves.bigram,
        "train": thin(curves.train, 240)[-1][1] if curves.train else None,
        "held-out": curves.held_out[-1][1] if curves.held_out else None,
    }
    known = sorted((axis.y(loss), name, loss) for name, loss in ends.items() if loss is not None)
    heights = np.array([height for height, _, _ in known])
    for _ in range(100):
        overlap = _LABEL_GAP - np.diff(heights)
        if (overlap <= 0.01).all():
            break
        push = np.clip(overlap, 0, None) / 2
        heights[:-1] -= push
        heights[1:] += push
    heights += min(0.0, axis.bottom - float(heights.max()))
    return [
        f'<text class="name {name}" x="{axis.right + 10}" y="{height + 4:.1f}">{name} {loss:.2f}</text>'
        for height, (_, name, loss) in zip(heights, known, strict=True)
    ]


def _depth_strip(axis: _Axis, curves: Curves) -> list[str]:
    """One bar per stretch of steps at the same depth, darker where more depths run."""
    if not curves.depth:
        return []
    deepest = max(depth for _, depth in curves.depth)
    begins = [curves.depth[0]]
    for step, depth in curves.depth:
        if depth != begins[-1][1]:
            begins.append((step, depth))
    parts = []
    top = axis.bottom + 26
    borders = [0, *(step for step, _ in begins[1:]), axis.last]
    for place, (_, depth) in enumerate(begins):
        left, right = axis.x(borders[place]), axis.x(borders[place + 1])
        strength = 0.08 + 0.32 * depth / deepest
        parts.append(
            f'<rect class="depth" x="{left:.1f}" y="{top}" width="{max(right - left - 1, 0.5):.1f}" height="{_STRIP}" '
            f'fill-opacity="{strength:.2f}"/>'
        )
        if right - left > 14:
            x, y = (left + right) / 2, top + _STRIP + 13
            parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{y}">{depth}</text>')
    parts.append(f'<text class="name depth" x="{axis.right + 10}" y="{top + _STRIP - 2}">depths run</text>')
    return parts
