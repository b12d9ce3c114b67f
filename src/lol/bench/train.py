"""`lol bench train`: tokens/s and memory of training steps, of LoL, a Llama of as many executed layers, and baselines.

Ratios of medians, measured interleaved in one process (`measure.py`). A step is a forward pass with its loss, a
backward pass and an optimizer step, under autocast as in training. The learning rate is 0: the optimizer does all of
its work, and every round finds the weights that the first one found.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from lol.bench.measure import Step, bench_device, conditions, measure, medians, peak_bytes
from lol.bench.models import llama_beside, spread_routes
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
class _Case:
    """A row of the table."""

    setting: Setting
    precision: Precision
    length: int

    @property
    def name(self) -> str:
        return f"{self.setting}, {self.precision}, n={self.length}"


def bench(options: BenchTrain) -> dict[str, Any]:
    """Run the benchmark, print its table, and return its numbers.

    Raises:
        UserError: flags that leave nothing to time.
    """
    if not options.lengths or not options.precisions:
        raise UserError("nothing to time: give --lengths and --precisions")
    torch.manual_seed(options.seed)
    settings = tuple(dict.fromkeys((*_ALWAYS, *options.settings)))
    cases: list[_Case] = []
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    with bench_device() as device:
        trained = {setting: Trained(_make_model(setting, options), device) for setting in settings}
    for length in options.lengths:
        ids = torch.randint(options.vocab_size, (options.batch_size, length), device=device)
        own = settings if length == options.lengths[0] else _ALWAYS
        new = [_Case(setting, precision, length) for setting in own for precision in options.precisions]
        steps: dict[str, Step] = {
            case.name: trained[case.setting].step(case.precision, input_ids=ids, labels=ids) for case in new
        }
        # The pass that warms up is the one whose memory is counted.
        peaks |= {name: peak_bytes(step) for name, step in steps.items()}
        seconds |= measure(steps, options.repeats, warm_up=False)
        cases += new
    median = medians(seconds)
    ratios = _ratios(cases, median)
    rates = {case.name: options.batch_size * case.length / median[case.name] for case in cases}
    _print(options, cases, seconds, rates, peaks, ratios)
    return conditions(options) | {
        "bytes_of_weights_and_moments": {setting: one.stored_bytes for setting, one in trained.items()},
        "peak_bytes_beyond": peaks,
        "seconds": seconds,
        "tokens_per_second": rates,
        "ratios": ratios,
    }


class Trained:
    """A model in training, and its steps."""

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self.device = device
        self.model = model.train()
        self.optimizer = make_optimizer(model, OptimConfig(learning_rate=0.0))
        # The moments are there before the first step is measured.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._update()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def stored_bytes(self) -> int:
        """Weights and moments, which stay from step to step."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *moments) if torch.is_tensor(tensor))

    def step(self, precision: Precision, **inputs: Any) -> Callable[[], Tensor]:
        """One training step on these inputs of the forward pass; it returns the loss."""

        def step() -> Tensor:
            with autocast(precision, self.device):
                loss = self.model(**inputs).loss
            loss.backward()
            self._update()
            return loss.detach()

        return step


def _make_model(setting: Setting, options: BenchTrain) -> PreTrainedModel:
    if setting == "Llama":
        return llama_beside(_config("LoL", options), max(options.lengths))
    model = LoLForCausalLM(_config(setting, options))
    if setting == "LoL, loop":
        model.model.dispatch.form = "loop"
    if model.model.router is not None:
        spread_routes(model)
    return model


def _config(setting: Setting, options: BenchTrain) -> LoLConfig:
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
    return LoLConfig(**(fields | changes))


def _ratios(cases: list[_Case], median: dict[str, float]) -> dict[str, float]:
    """Tokens/s over those of Llama in the same rounds, and of LoL in bf16 over float32."""
    ratios = {}
    for case in cases:
        if case.setting != "Llama":
            llama = replace(case, setting="Llama")
            ratios[f"tokens/s of {case.setting} over Llama's, {case.precision}, n={case.length}"] = (
                median[llama.name] / median[case.name]
            )
    for case in cases:
        wide = replace(case, precision="float32")
        if case.setting == "LoL" and case.precision == "bf16" and wide in cases:
            ratios[f"tokens/s of LoL in bf16 over float32, n={case.length}"] = median[wide.name] / median[case.name]
    return ratios


def _print(
    options: BenchTrain,
    cases: list[_Case],
    seconds: dict[str, list[float]],
    rates: dict[str, float],
    peaks: dict[str, int],
    ratios: dict[str, float],
) -> None:
    title = (
        f"training steps: d={options.hidden_size}, {options.num_fixed_layers}+{options.num_fixed_layers} layers, "
        f"{options.num_routed_depths} depths, L={options.num_experts}, W={options.window_size}, {options.batch_size} "
        f"x n tokens, {torch.get_num_threads()} threads"
    )
    table = Table(title=title, caption="MB: the peak beyond weights and moments", box=None)
    table.add_column("")
    table.add_column("products")
    for heading in ("n", "tokens/s", "/ Llama's", "seconds", "MB"):
        table.add_column(heading, justify="right")
    for case in cases:
        times = seconds[case.name]
        over = ratios.get(f"tokens/s of {case.setting} over Llama's, {case.precision}, n={case.length}", 1.0)
        table.add_row(
            case.setting,
            case.precision,
            str(case.length),
            f"{rates[case.name]:,.0f}",
            f"{over:.2f}",
            f"{min(times):.2f} - {max(times):.2f}",
            f"{peaks[case.name] / 1e6:,.0f}",
        )
    Console().print(table)
    for name, ratio in ratios.items():
        if "bf16 over float32" in name:
            print(f"{name}: {ratio:.2f}")
