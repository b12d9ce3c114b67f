"""`lol bench gpu`: does a GPU compute what a CPU does, does each published run take a step on it, and the benches.

Where there is no GPU it says so in one line and does nothing. Everything here takes a device, so that its tests can
run it on a CPU.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lol.bench import core, decode, train
from lol.bench.measure import conditions, peak_bytes
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.train.config import Precision, TrainConfig
from lol.train.memory import training_memory
from lol.train.parallel import autocast
from lol.train.published import PUBLISHED
from lol.train.recipes import recipe

NO_GPU = "no GPU here: nothing was checked"


@dataclass(frozen=True)
class BenchGpu:
    """Check a GPU against the CPU, take one step of each published run that fits, and run the other benches on it.

    Without a GPU it prints one line. The exit code is 1 if a check fails.

    Example: lol bench gpu --json gpu.json
    """

    recipes: tuple[str, ...] = tuple(PUBLISHED)
    """Recipes to take a step of."""
    seed: int = 0
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the numbers to this file, if there is a GPU."""


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    outcome: Literal["ok", "FAILED", "skipped"]
    detail: str


def bench(options: BenchGpu) -> dict[str, Any] | None:
    """Run everything, print its table, and return its numbers; `None` where there is no GPU."""
    if not torch.cuda.is_available():
        print(NO_GPU)
        return None
    torch.manual_seed(options.seed)
    device = torch.device("cuda")
    checks = [*equality(device), *(take_recipe_step(name, device) for name in options.recipes)]
    _print(checks)
    benches = {
        "core": core.bench(core.BenchCore()),
        "decode": decode.bench(decode.BenchDecode()),
        "train": train.bench(train.BenchTrain(lengths=(1024, 4096), batch_size=8)),
    }
    failed = [check.name for check in checks if check.outcome == "FAILED"]
    return conditions(options) | {"failed": failed, "checks": [vars(check) for check in checks], "benches": benches}


def equality(device: torch.device) -> Iterable[Check]:
    """A small model on the device against the same one in float32 on the CPU: logits, gradients, decoding with a cache.

    Routes are forced and tokens take every expert, for rounding may decide between two that score alike. A block stays
    idle. Errors are relative to the norm of what is compared; the tolerances are decided here.
    """
    model, ids = _small_model(), torch.randint(256, (2, 200))
    path = torch.randint(3, (2, model.config.num_routed_depths, model.config.windows_in(200)))
    truth = _pass(model, ids, path, "float32", torch.device("cpu"))
    true_gradient = _gradient(model)
    tolerances: dict[Precision, tuple[float, float]] = {"float32": (1e-4, 1e-3), "bf16": (0.02, 0.03)}
    model.to(device)  # pyright: ignore[reportArgumentType]
    ids, path = ids.to(device), path.to(device)
    for precision, (tolerance, gradient_tolerance) in tolerances.items():
        logits = _pass(model, ids, path, precision, device)
        own = _gradient(model)
        yield _compare(f"logits, {precision}", logits, truth, tolerance)
        yield _compare(f"gradients, {precision}", own, true_gradient, gradient_tolerance)
        idle = [parameter.grad[3] for parameter in _library_matrices(model)]
        yield _judge(f"an idle block's gradient is 0, {precision}", all(bool((part == 0).all()) for part in idle), "")
        cached = _decode(model, ids, path, precision, device)
        yield _compare(f"decoding with a cache, {precision}", cached, truth, tolerance)
        model.model.dispatch.form = "loop"
        looped = _pass(model, ids, path, precision, device)
        model.model.dispatch.form = "grouped"
        yield _compare(f"grouped dispatch against the loop, {precision}", logits, looped, tolerance)


def _small_model() -> LoLForCausalLM:
    config = LoLConfig(
        vocab_size=256,
        hidden_size=64,
        num_attention_heads=2,
        num_prelude_layers=1,
        num_coda_layers=1,
        num_experts=4,
        num_routed_depths=4,
        window_size=64,
        window_stride=32,
        moe_num_experts=3,
        moe_top_k=3,
        depth_film=True,
        input_injection="diagonal",
        router_noise_max=0.0,
        # With the default one the blocks add so little to the stream that the checks would hardly see them.
        initializer_range=0.1,
    )
    return LoLForCausalLM(config).train()


def _library_matrices(model: LoLForCausalLM) -> list[Any]:
    assert model.model.library is not None
    return list(model.model.library.parameters())


def _pass(model: LoLForCausalLM, ids: Tensor, path: Tensor, precision: Precision, device: torch.device) -> Tensor:
    """The logits; the gradient is left at the parameters."""
    model.zero_grad()
    with autocast(precision, device):
        output = model(ids, labels=ids, path=path)
    output.loss.backward()
    return output.logits.detach()


def _gradient(model: LoLForCausalLM) -> Tensor:
    given = [parameter.grad for parameter in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in given if gradient is not None])


@torch.inference_mode()
def _decode(model: LoLForCausalLM, ids: Tensor, path: Tensor, precision: Precision, device: torch.device) -> Tensor:
    """The logits, from a beginning and then in pieces that windows do not end with."""
    pieces, cache, end = [], None, 0
    with autocast(precision, device):
        for part in ids.split([50, 1, 1, 90, ids.shape[1] - 142], dim=1):
            end += part.shape[1]
            named = path[:, :, : model.config.windows_in(end)]
            output = model(part, cache=cache, use_cache=True, path=named)
            cache = output.cache
            pieces.append(output.logits)
    return torch.cat(pieces, dim=1)


def _compare(name: str, own: Float[Tensor, "..."], truth: Float[Tensor, "..."], tolerance: float) -> Check:
    own, truth = own.float().cpu(), truth.float().cpu()
    error = ((own - truth).norm() / truth.norm()).item()
    return _judge(name, error <= tolerance, f"error {error:.1e}, at most {tolerance:.0e}")


def _judge(name: str, is_right: bool, detail: str) -> Check:
    return Check(name, "ok" if is_right else "FAILED", detail)


def take_recipe_step(name: str, device: torch.device, room: int | None = None) -> Check:
    """One step of a recipe on one row in bfloat16, if its estimate (`lol.train.memory`) fits in 9/10 of the memory.

    Args:
        name: Of the recipe.
        device: Where.
        room: Bytes; default: what is free on the GPU.
    """
    config = recipe(name)
    estimate = training_memory(config, 1, rows=1, bf16=True).total
    room = _free_bytes() if room is None else room
    if estimate > 0.9 * room:
        return Check(name, "skipped", f"needs {estimate / 1e9:.1f} GB, {room / 1e9:.1f} are free")
    try:
        return _step(name, config, device, estimate)
    except torch.OutOfMemoryError:
        return Check(name, "FAILED", f"out of memory, {estimate / 1e9:.2f} GB estimated, {room / 1e9:.2f} were free")


def _step(name: str, config: TrainConfig, device: torch.device, estimate: int) -> Check:
    with device:
        trained = train.Trained(LoLForCausalLM(config.model), device)
    ids = torch.randint(config.model.vocab_size, (1, config.data.context_length), device=device)
    step = trained.step(
        "bf16",
        input_ids=ids,
        labels=ids,
        backprop_depth=config.growth.backprop_depth,
        first_window_full_backprop=config.growth.first_window_full_backprop,
    )
    losses: list[float] = []
    held = trained.stored_bytes + peak_bytes(lambda: losses.append(step().item()))
    detail = f"loss {losses[0]:.2f}, {held / 1e9:.2f} GB at the peak, {estimate / 1e9:.2f} estimated"
    return _judge(name, bool(torch.isfinite(torch.tensor(losses)).all()), detail)


def _free_bytes() -> int:
    """Of the GPU, after what earlier models have left is given back."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _print(checks: list[Check]) -> None:
    table = Table(title="the GPU against the CPU, and one step of each published run", box=None)
    for heading in ("", "", ""):
        table.add_column(heading)
    for check in checks:
        table.add_row(check.name, check.outcome, check.detail)
    Console().print(table)
