"""`lol bench decode`: what a token costs while text grows.

Ratios of medians, measured interleaved in one process (`measure.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from lol.bench.measure import bench_device, conditions, measure, medians
from lol.bench.models import llama_beside, spread_routes
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM


@dataclass(frozen=True)
class BenchDecode:
    """Time cached decoding against running the prefix again, and against a Llama of as many executed layers.

    Example: lol bench decode --json decode.json
    """

    hidden_size: int = 512
    num_attention_heads: int = 8
    num_fixed_layers: int = 4
    """Layers of the prelude, and as many of the coda."""
    num_experts: int = 16
    num_routed_depths: int = 16
    window_size: int = 128
    window_stride: int = 64
    contexts: tuple[int, ...] = (64, 1024, 4096)
    """Tokens that are in the cache when a token is timed."""
    prefix: int = 1024
    """Tokens of the text that is run again for the comparison without a cache."""
    batch_size: int = 16
    """Rows of the comparison of a batch with one row; each row takes routes of its own."""
    repeats: int = 9
    """Rounds; each times every row of a table once."""
    seed: int = 0
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the numbers to this file."""


@torch.inference_mode()
def bench(options: BenchDecode) -> dict[str, Any]:
    """Run the benchmark, print its table, and return its numbers."""
    torch.manual_seed(options.seed)
    with bench_device():
        lol, core, llama = _lol(options, options.num_fixed_layers), _lol(options, 0), _llama(options)
    seconds: dict[str, list[float]] = {}
    for context in options.contexts:
        steps = {
            f"LoL, {context} tokens cached": _next_token(lol, 1, context),
            f"its core alone, {context} tokens cached": _next_token(core, 1, context),
            f"Llama, {context} tokens cached": _next_token(llama, 1, context),
        }
        seconds |= measure(steps, options.repeats)
    batch = f"LoL, {options.batch_size} rows, {options.contexts[0]} tokens cached"
    many = _next_token(lol, options.batch_size, options.contexts[0])
    blocks = [len(row.unique()) for row in many().routing.experts[:, :, -1].t()]
    one = f"LoL, 1 row, {options.contexts[0]} tokens cached"
    prefix, cached = f"LoL, {options.prefix} tokens run again", f"LoL, {options.prefix} tokens in the cache"
    text = _random_ids(1, options.prefix)
    seconds |= measure(
        {
            one: _next_token(lol, 1, options.contexts[0]),
            batch: many,
            prefix: lambda: lol(text, logits_to_keep=1),
            cached: _next_token(lol, 1, options.prefix),
        },
        options.repeats,
    )
    median = medians(seconds)
    first, last = options.contexts[0], options.contexts[-1]
    ratios = {"cache over running the prefix again": median[prefix] / median[cached]}
    for context in options.contexts:
        name = f"tokens/s over Llama's, {context} tokens cached"
        ratios[name] = median[f"Llama, {context} tokens cached"] / median[f"LoL, {context} tokens cached"]
    ratios[f"time of the core, {last} over {first} tokens cached"] = (
        median[f"its core alone, {last} tokens cached"] / median[f"its core alone, {first} tokens cached"]
    )
    ratios[f"tokens/s of {options.batch_size} rows over one"] = options.batch_size * median[one] / median[batch]
    _print(options, median, ratios)
    print(f"blocks that those {options.batch_size} rows run at a depth: {sum(blocks) / len(blocks):.1f} on average")
    return conditions(options) | {
        "blocks_of_batch_by_depth": blocks,
        "seconds": seconds,
        "ratios": ratios,
    }


def _config(options: BenchDecode, fixed: int) -> LoLConfig:
    return LoLConfig(
        vocab_size=1000,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        num_prelude_layers=fixed,
        num_coda_layers=fixed,
        num_experts=options.num_experts,
        num_routed_depths=options.num_routed_depths,
        window_size=options.window_size,
        window_stride=options.window_stride,
    )


def _lol(options: BenchDecode, fixed: int) -> LoLForCausalLM:
    model = LoLForCausalLM(_config(options, fixed)).eval()
    spread_routes(model)
    return model


def _llama(options: BenchDecode) -> LlamaForCausalLM:
    return llama_beside(_config(options, options.num_fixed_layers), 2 * max(options.contexts)).eval()


def _next_token(model: PreTrainedModel, rows: int, context: int) -> Callable[[], Any]:
    """A step that decodes one more token of each row; the cache grows by the few tokens that are timed."""
    cache = DynamicCache(config=model.config)
    model(input_ids=_random_ids(rows, context), cache=cache, use_cache=True, logits_to_keep=1)
    return lambda: model(input_ids=_random_ids(rows, 1), cache=cache, use_cache=True, logits_to_keep=1)


def _random_ids(rows: int, columns: int) -> Tensor:
    return torch.randint(1000, (rows, columns), device=bench_device())


def _print(options: BenchDecode, median: dict[str, float], ratios: dict[str, float]) -> None:
    title = (
        f"one token: d={options.hidden_size}, {options.num_fixed_layers}+{options.num_fixed_layers} layers, "
        f"{options.num_routed_depths} depths, W={options.window_size}, float32, {torch.get_num_threads()} threads"
    )
    table = Table(title=title, box=None)
    table.add_column("")
    table.add_column("median, ms", justify="right")
    for name, seconds in median.items():
        table.add_row(name, f"{1000 * seconds:.1f}")
    shown = Table(box=None)
    shown.add_column("")
    shown.add_column("ratio", justify="right")
    for name, ratio in ratios.items():
        shown.add_row(name, f"{ratio:.2f}")
    console = Console()
    console.print(table)
    console.print(shown)
