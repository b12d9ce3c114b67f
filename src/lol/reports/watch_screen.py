"""The screen of `lol watch`: a run's state as something that rich prints, at any size, with and without colours."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lol.paths.colors import block_colors
from lol.paths.curves import Points, thin
from lol.reports.watch_state import RunState
from lol.train.progress import duration, shorten

_FACTS = 31
"""Columns of the numbers beside the load."""
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots of a braille character, by column and row."""
_SHADES, _PLAIN_SHADES = " ░▒▓█", " .:+#"
_BARS, _PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_TRAIN, _HELD_OUT = "cyan", "bold yellow"
_EARLY = 0.05
"""Share of the steps, of many, whose losses may lie above the chart: they would press the rest flat."""


def screen(state: RunState, console: Console, height: int | None = None) -> RenderableType:
    """The whole picture; of `height` lines, where a terminal has so many, or of the lines that it likes best."""
    load = state.load
    beside = max(len(load) + 4, 12) if height is None else max(6, min(len(load) + 4, height // 2, height - 10))
    chart_lines = 12 if height is None else max(3, height - 2 - max(beside, 12) - 3)
    plain = console.options.ascii_only or console.legacy_windows
    below = Table.grid(expand=True)
    below.add_column(ratio=1)
    below.add_column(width=_FACTS + 4)
    blocks = load_map(load, console.width - _FACTS - 8, max(beside, 12) - 4, plain)
    below.add_row(
        Panel(Group(*blocks), title="windows that ran each block", title_align="left", height=max(beside, 12)),
        Panel(_facts(state, plain), title="now", title_align="left", height=max(beside, 12)),
    )
    curves = [(state.losses, _TRAIN), (state.held_out, _HELD_OUT)]
    chart = Group(*draw_chart(curves, console.width - 4, chart_lines, plain or console.no_color))
    return Group(
        _headline(state),
        _progress(state, console.width, plain),
        Panel(chart, title=_losses(state), title_align="left"),
        below,
    )


def lines(state: RunState) -> list[str]:
    """The newest state in plain sentences, for a pipe or a file."""
    ran = state.load[state.load.sum(1) > 0]
    found = [_headline(state).plain, _where(state), _losses(state).plain]
    found += [f"{name}: {value}" for name, value in _numbers(state)]
    if len(ran):
        found.append("load of the blocks, %: " + " ".join(f"{100 * share:.0f}" for share in ran.mean(0)))
    return found


def draw_chart(series: Sequence[tuple[Points, str]], width: int, height: int, plain: bool) -> list[Text]:
    """Curves over the steps as `height` lines of text and one of steps; later curves lie over earlier ones.

    plain: a sign for each place of the grid, . and o, where characters are ASCII only or have no colours to tell the
    curves apart; else 2 x 4 dots of braille.
    """
    shown = [([(x, y) for x, y in points if math.isfinite(y)], style) for points, style in series]
    everything = [point for points, _ in shown for point in points]
    if not everything:
        return [Text("no loss yet", style="dim"), *[Text()] * height]
    first, last = min(x for x, _ in everything), max(x for x, _ in everything)
    late = [y for x, y in everything if len(everything) < 40 or x >= first + _EARLY * (last - first)]
    low, high = min(late), max(late)
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    room = max(map(len, labels)) + 1
    across, down = (1, 1) if plain else (2, 4)
    columns, rows = max(2, (width - room) * across), height * down
    dots = np.zeros((len(shown), height, max(1, width - room)), dtype=int)
    for number, (points, _) in enumerate(shown):
        if not points:
            continue
        steps, values = np.array(thin(points, columns)).T
        places = (steps - first) / max(last - first, 1) * (columns - 1)
        between = np.arange(round(places[0]), round(places[-1]) + 1)
        drops = (high - np.interp(between, places, values).clip(low, high)) / max(high - low, 1e-9) * (rows - 1)
        before = round(drops[0])
        for column, row in zip(between.tolist(), drops.round().astype(int).tolist(), strict=True):
            # From behind the dot before, so that a steep curve is a line.
            way = 1 if row > before else -1
            for dot in range(before + way, row + way, way) if row != before else [row]:
                dots[number, dot // down, column // across] |= _BRAILLE[column % across][dot % down]
            before = row
    drawn = []
    for line in range(height):
        text = Text(f"{labels[line]:>{room - 1}} ", style="dim", no_wrap=True)
        for cell in dots[:, line].T:
            over = max(np.flatnonzero(cell), default=0)
            bits = int(np.bitwise_or.reduce(cell))
            sign = (" " if not bits else "o" if over else ".") if plain else chr(0x2800 + bits)
            text.append(sign, style=f"not dim {shown[over][1]}")
        drawn.append(text)
    ends = f"{first:,.0f}", f"step {last:,.0f}"
    return [*drawn, Text(" " * room + ends[0] + ends[1].rjust(max(0, width - room - len(ends[0]))), style="dim")]


def load_map(load: Float[np.ndarray, "D L"], width: int, height: int, plain: bool) -> list[Text]:
    """Depths by blocks, the darker the more of a depth's windows ran the block, and a bar for each block over all.

    What has no room is drawn together with its neighbours: depths by their means, blocks by their sums.
    """
    if not load.size:
        return [Text("no routed depth has run yet", style="dim")]
    depths, blocks = load.shape
    room = len(f"{depths - 1}-{depths - 1}") if depths > height - 2 else len("all")
    rows = np.array_split(np.arange(depths), min(depths, max(1, height - 2)))
    columns = np.array_split(np.arange(blocks), min(blocks, max(1, width - room - 2)))
    wide = max(1, min(3, (width - room - 2) // len(columns)))
    colors = [block_colors(blocks)[int(column[0])] for column in columns]
    shades, bars = (_PLAIN_SHADES, _PLAIN_BARS) if plain else (_SHADES, _BARS)
    ruler = Text(" " * (room + 2), no_wrap=True)
    for column, color in zip(columns, colors, strict=True):
        ruler.append(f"{str(column[0])[-wide:]:<{wide}}", style=color)
    drawn = [ruler]
    for row in rows:
        name = f"{row[0]}" if len(row) == 1 else f"{row[0]}-{row[-1]}"
        text = Text(f"{name:>{room}}  ", style="dim", no_wrap=True)
        for column, color in zip(columns, colors, strict=True):
            share = float(load[row][:, column].sum(1).mean())
            # As the picture for TensorBoard: an even share is well visible however many blocks there are.
            shade = math.log1p(share * blocks) / math.log1p(blocks)
            text.append(shades[math.ceil(min(shade, 1.0) * (len(shades) - 1) - 1e-9)] * wide, style=f"not dim {color}")
        drawn.append(text)
    ran = load[load.sum(1) > 0]
    shares = [float(ran[:, column].sum(1).mean()) for column in columns]
    text = Text(f"{'all':>{room}}  ", style="dim", no_wrap=True)
    for share, color in zip(shares, colors, strict=True):
        text.append(bars[math.ceil(share / max(shares) * (len(bars) - 1) - 1e-9)] * wide, style=f"not dim {color}")
    return [*drawn, text]


def _headline(state: RunState) -> Text:
    style = {"training": "green", "finished": "green", "stopped": "yellow", "waiting": "dim"}[state.status]
    words = {
        "waiting": "no step yet",
        "training": "training",
        "stopped": "stopped; lol train --resume goes on",
        "finished": f"finished in {duration(float((state.summary or {}).get('seconds', 0)))}",
    }
    # The state first: a long path is cut at the screen's edge.
    text = Text(f"{words[state.status]}  ", style=style, no_wrap=True, overflow="ellipsis")
    return text.append(str(state.run), style="bold")


def _where(state: RunState) -> str:
    if state.plan is None:
        return f"step {state.step:,}"
    total = f"{'about ' if state.plan.limit == 'flops' else ''}{state.plan.steps:,}"
    text = f"step {state.step:,} of {total}"
    left = state.seconds_left
    return f"{text}, about {duration(left)} left" if left is not None and state.status == "training" else text


def _progress(state: RunState, width: int, plain: bool) -> Text:
    where = _where(state)
    room = max(4, width - len(where) - 2)
    done = 0 if state.plan is None else min(room, round(room * state.step / state.plan.steps))
    text = Text(("#" if plain else "━") * done, style="green", no_wrap=True)
    text.append(("-" if plain else "─") * (room - done), style="dim")
    return text.append(f"  {where}", style="default")


def _losses(state: RunState) -> Text:
    text = Text("loss, nats: ")
    if state.losses:
        text.append(f"training {state.losses[-1][1]:.3f}", style=_TRAIN)
    if state.held_out:
        step, loss = state.held_out[-1]
        text.append(f"  held-out {loss:.3f} at step {step:,.0f}", style=_HELD_OUT)
    return text


def _facts(state: RunState, plain: bool) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    for name, value in _numbers(state):
        table.add_row(name, value)
    table.add_row("entropy", sparkline(state.entropy, _FACTS - 12, plain))
    table.add_row("depth", sparkline(state.depths, _FACTS - 12, plain))
    return table


def _numbers(state: RunState) -> list[tuple[str, str]]:
    last = state.last
    if not last:
        return []
    model = None if state.config is None else state.config.model
    found = [
        ("depth", f"{last['depth']}" + (f" of {model.num_routed_depths}" if model else "")),
        ("entropy", f"{last['router_entropy']:.2f}" + (f" of {math.log(model.num_experts):.2f} nats" if model else "")),
        ("grad norm", f"{last['grad_norm']:.3g}"),
        ("learn rate", f"{last['learning_rate']:.3g}"),
        ("trained on", f"{shorten(last['tokens'])} tokens"),
        ("computed", shorten(last["flops"], "FLOP")),
    ]
    speed = state.tokens_per_second
    found += [] if speed is None else [("speed", f"{speed:,.0f} tokens/s")]
    memory = [(last.get("peak_memory_bytes"), ""), (last.get("peak_gpu_memory_bytes"), " on the GPU")]
    return found + [("memory", f"{shorten(size, 'B')}{where}") for size, where in memory if size]


def sparkline(points: Points, width: int, plain: bool) -> str:
    """The values as a row of bars, between their lowest and highest."""
    values = [value for _, value in thin(points, width)]
    if not values:
        return ""
    low, high = min(values), max(values)
    signs = (_PLAIN_BARS if plain else _BARS)[1:]
    return "".join(signs[round((value - low) / max(high - low, 1e-9) * (len(signs) - 1))] for value in values)
