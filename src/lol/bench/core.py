"""`lol bench core`: what one routed depth costs beside one dense block on the same tokens.

Ratios of medians, measured interleaved in one process (`measure.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lol.bench.measure import Step, bench_device, conditions, measure, medians
from lol.model.base import LoLModel
from lol.model.config import LoLConfig
from lol.model.core import lay_depths
from lol.model.windows import WindowLayout, find_documents


@dataclass(frozen=True)
class BenchCore:
    """Time forward and backward of one routed depth against its alternatives.

    Example: lol bench core --json core.json
    """

    hidden_size: int = 512
    num_attention_heads: int = 8
    num_experts: int = 16
    window_size: int = 128
    window_stride: int = 64
    length: int = 1024
    """Tokens in a row."""
    batch_size: int = 4
    """Rows."""
    repeats: int = 9
    """Rounds; each times every row of the table once."""
    seed: int = 0
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the numbers to this file."""


def bench(options: BenchCore) -> dict[str, Any]:
    """Run the benchmark, print its table, and return its numbers."""
    torch.manual_seed(options.seed)
    with bench_device() as device:
        steps = _steps(options, device)
    seconds = measure(steps, options.repeats)
    median = medians(seconds)
    ratios = {name: median[name] / median["dense block"] for name in steps}
    _print(options, ratios, seconds)
    return conditions(options) | {
        "median_over_dense": ratios,
        "seconds": seconds,
    }


def _steps(options: BenchCore, device: torch.device) -> dict[str, Step]:
    """Each row of the table: forward and backward of one depth on the same tokens, from the same kind of stream."""
    model = LoLModel(
        LoLConfig(
            vocab_size=8,
            hidden_size=options.hidden_size,
            num_attention_heads=options.num_attention_heads,
            num_prelude_layers=1,
            num_coda_layers=0,
            num_experts=options.num_experts,
            num_routed_depths=2,
            window_size=options.window_size,
            window_stride=options.window_stride,
        )
    )
    library = model.library
    assert library is not None
    documents = find_documents((options.batch_size, options.length), None, None, device)
    unshifted, shifted = lay_depths(model.config, documents, 2)
    stream = torch.randn(options.batch_size * options.length, options.hidden_size)
    gradient = torch.randn_like(stream)
    grid = stream.view(options.batch_size, options.length, -1)

    def finish(output: Tensor, source: Tensor) -> None:
        output.backward(gradient.view_as(output))
        source.grad = None
        model.zero_grad(set_to_none=True)

    def dense() -> None:
        source = grid.clone().requires_grad_()
        finish(model.prelude[0](source, *model.layer_inputs(source, documents)), source)

    def routed(layout: WindowLayout, form: str, experts: list[Tensor]) -> Step:
        weight = torch.full((layout.num_windows,), 0.5)

        def step() -> None:
            source = stream.clone().requires_grad_()
            model.dispatch.form = form  # pyright: ignore[reportAttributeAccessIssue]
            shelf = library()
            total = torch.stack([model.dispatch(source, shelf, layout, expert, weight, None) for expert in experts])
            finish(total.sum(0), source)

        return step

    def random_blocks(layout: WindowLayout) -> list[Tensor]:
        return [torch.randint(options.num_experts, (layout.num_windows,))]

    everything = [torch.full((unshifted.num_windows,), block) for block in range(options.num_experts)]
    return {
        "dense block": dense,
        "routed, grouped": routed(unshifted, "grouped", random_blocks(unshifted)),
        "routed, grouped, half windows": routed(shifted, "grouped", random_blocks(shifted)),
        "routed, loop": routed(unshifted, "loop", random_blocks(unshifted)),
        "routed, loop, half windows": routed(shifted, "loop", random_blocks(shifted)),
        "every block on everything": routed(unshifted, "grouped", everything),
    }


def _print(options: BenchCore, ratios: dict[str, float], seconds: dict[str, list[float]]) -> None:
    table = Table(
        title=f"forward + backward of one depth: d={options.hidden_size}, {options.batch_size} x {options.length} "
        f"tokens, W={options.window_size}, L={options.num_experts}, float32, {torch.get_num_threads()} threads",
        box=None,
    )
    table.add_column("")
    table.add_column("median / dense", justify="right")
    table.add_column("fastest and slowest, ms", justify="right")
    for name, ratio in ratios.items():
        times = seconds[name]
        table.add_row(name, f"{ratio:.2f}", f"{1000 * min(times):.0f} - {1000 * max(times):.0f}")
    Console().print(table)
