"""`lol bench train`: tokens/s and memory of training steps, of LoL, a Llama of as many executed layers, and baselines.

Ratios of medians, measured interleaved in one process (`measure.py`). A step is a forward pass with its loss, a
backward pass and an optimizer step, under autocast as in training. The learning rate is 0: the optimizer does all of
its work, and every round finds the weights that the first one found.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lol.bench.measure import Step, bench_device, conditions, measure, medians, peak_bytes
from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.train.config import OptimConfig, Precision
from lol.train.optim import make_optimizer
from lol.train.parallel import autocast

Setting = Literal["LoL", "LoL, loop", "Llama", "dense", "sliding", "MoE"]
_ALWAYS: tuple[Setting, ...] = ("LoL", "Llama")


@dataclass(frozen=True)
class BenchTrain:
    """Time training steps of LoL, of a Llama of as many executed layers, and of the baselines.

    "LoL, loop" runs block after block, "dense", "sliding" and "MoE" are settings of this package's model: full
    attention, a sliding window, and as many layers of 3 experts of which a token takes 2.

    Example: lol bench train --hidden-size 512 --num-fixed-layers 4 --num-experts 16 --num-routed-depths 16
    --lengths 1024 4096 --repeats 3 --json train.json
    """

    hidden_size: int = 256
    num_attention_heads: int = 8
    num_fixed_layers: int = 2
    """Layers of the prelude, and as many of the coda."""
    num_experts: int = 8
    num_routed_depths: int = 8
    window_size: int = 128
    window_stride: int = 64
    vocab_size: int = 1000
    lengths: tuple[int, ...] = (1024,)
    """Tokens in a row. At all but the first, LoL and Llama alone are timed."""
    batch_size: int = 1
    """Rows."""
    settings: tuple[Setting, ...] = ("LoL", "LoL, loop", "Llama", "dense", "sliding", "MoE")
    """What is timed; LoL and Llama always are."""
    precisions: tuple[Precision, ...] = ("float32", "bf16")
    repeats: int = 5
    """Rounds; each times every row of a table once."""
    seed: int = 0
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the numbers to this file."""


@dataclass(frozen=True)
class _Numbers:
    """By the name of a step."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)


def bench(options: BenchTrain) -> dict[str, Any]:
    """Run the benchmark, print its tables, and return its numbers.

    Raises:
        UserError: flags that leave nothing to time.
    """
    if not options.lengths or not options.precisions or options.repeats < 1:
        raise UserError("give at least one of --lengths, one of --precisions and one of --repeats")
    torch.manual_seed(options.seed)
    numbers = _Numbers()
    with bench_device() as device:
        trained = {setting: _Trained(setting, options, device) for setting in _timed(options)}
        for length in options.lengths:
            _bench_length(options, trained, length, numbers)
    stored = {setting: one.bytes_before for setting, one in trained.items()}
    _print(options, numbers)
    return conditions(options) | {"stored_bytes": stored} | vars(numbers)


def _timed(options: BenchTrain) -> list[Setting]:
    return list(dict.fromkeys((*_ALWAYS, *options.settings)))


class _Trained:
    """A model in training, and its steps."""

    def __init__(self, setting: Setting, options: BenchTrain, device: torch.device):
        self.device = device
        self.model: PreTrainedModel = _llama(options) if setting == "Llama" else _lol(setting, options)
        self.model.train()
        self.optimizer = make_optimizer(self.model, OptimConfig(learning_rate=0.0))
        # The moments are there before the first step is measured.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._update()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def bytes_before(self) -> int:
        """Weights and moments, which stay from step to step."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *moments) if torch.is_tensor(tensor))

    def step(self, ids: torch.Tensor, precision: Precision) -> Step:
        """One training step on these rows."""

        def step() -> None:
            with autocast(precision, self.device):
                loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self._update()

        return step


def _lol(setting: Setting, options: BenchTrain) -> LoLForCausalLM:
    fixed, depths = options.num_fixed_layers, options.num_routed_depths
    changes: dict[str, Any] = {}
    if setting in ("dense", "sliding"):
        attention = "full" if setting == "dense" else "sliding"
        changes = {"routing": "fixed", "num_experts": depths, "fixed_path": list(range(depths))}
        changes |= {"core_attention": attention}
    elif setting == "MoE":
        layers = 2 * fixed + depths
        changes = {"num_routed_depths": 0, "num_prelude_layers": layers // 2, "num_coda_layers": layers - layers // 2}
        changes |= {"moe_num_experts": 3}
    fields: dict[str, Any] = {
        "vocab_size": options.vocab_size,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.num_attention_heads,
        "num_prelude_layers": fixed,
        "num_coda_layers": fixed,
        "num_experts": options.num_experts,
        "num_routed_depths": depths,
        "window_size": options.window_size,
        "window_stride": options.window_stride,
    }
    model = LoLForCausalLM(LoLConfig(**(fields | changes)))
    if setting == "LoL, loop":
        model.model.dispatch.form = "loop"
    if model.model.router is not None:
        # Fresh routers choose one block for all: this one tells windows and rows apart.
        torch.nn.init.normal_(model.model.router.weight)
    return model


def _llama(options: BenchTrain) -> LlamaForCausalLM:
    shape = LoLConfig(hidden_size=options.hidden_size, num_attention_heads=options.num_attention_heads)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocab_size,
            hidden_size=options.hidden_size,
            intermediate_size=shape.mlp_size,
            num_hidden_layers=2 * options.num_fixed_layers + options.num_routed_depths,
            num_attention_heads=options.num_attention_heads,
            max_position_embeddings=max(options.lengths),
        )
    )


def _bench_length(options: BenchTrain, trained: dict[Setting, _Trained], length: int, numbers: _Numbers) -> None:
    """Rows of one length: every step's memory, in the pass that warms up, then rounds of them all."""
    ids = torch.randint(options.vocab_size, (options.batch_size, length))
    own = list(trained) if length == options.lengths[0] else list(_ALWAYS)
    names = {
        (setting, precision): f"{setting}, {precision}, n={length}" for setting in own for precision in _all(options)
    }
    steps = {name: trained[setting].step(ids, precision) for (setting, precision), name in names.items()}
    numbers.peak_bytes.update({name: peak_bytes(step) for name, step in steps.items()})
    seconds = measure(steps, options.repeats, warm_up=False)
    numbers.seconds.update(seconds)
    median = medians(seconds)
    numbers.tokens_per_second.update({name: ids.numel() / median[name] for name in steps})
    for (setting, precision), name in names.items():
        if setting != "Llama":
            over = median[names["Llama", precision]] / median[name]
            numbers.ratios[f"tokens/s of {setting} over Llama's, {precision}, n={length}"] = over
    if {"float32", "bf16"} <= set(options.precisions):
        numbers.ratios[f"tokens/s of LoL in bf16 over float32, n={length}"] = (
            median[names["LoL", "float32"]] / median[names["LoL", "bf16"]]
        )


def _all(options: BenchTrain) -> list[Precision]:
    return list(dict.fromkeys(options.precisions))


def _print(options: BenchTrain, numbers: _Numbers) -> None:
    title = (
        f"training steps: d={options.hidden_size}, {options.num_fixed_layers}+{options.num_fixed_layers} layers, "
        f"{options.num_routed_depths} depths, L={options.num_experts}, W={options.window_size}, {options.batch_size} "
        f"rows, {torch.get_num_threads()} threads"
    )
    table = Table(title=title, box=None)
    table.add_column("")
    for heading in ("tokens/s", "fastest and slowest, s", "peak beyond weights and moments, MB"):
        table.add_column(heading, justify="right")
    for name, times in numbers.seconds.items():
        rate, peak = numbers.tokens_per_second[name], numbers.peak_bytes[name]
        table.add_row(name, f"{rate:,.0f}", f"{min(times):.2f} - {max(times):.2f}", f"{peak / 1e6:,.0f}")
    shown = Table(box=None)
    shown.add_column("")
    shown.add_column("ratio", justify="right")
    for name, ratio in numbers.ratios.items():
        shown.add_row(name, f"{ratio:.2f}")
    console = Console()
    console.print(table)
    console.print(shown)
