"""Change the path: force blocks on a model for as long as a `with` block lasts.

The core uses what `model.router` returns for a depth and nothing else, so forcing is a forward hook on the router that
replaces the block and the weight of the windows named. Forced windows are named by their number in the row, which the
router does not know: a hook in front of the model finds where windows lie, from the same arguments, with the model's
own functions. Models of `routing="fixed"` have no router; there the same hook fills in the model's `path` argument.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from lol.errors import UserError
from lol.model.base import LoLModel
from lol.model.cache import documents_of_pass
from lol.model.core import broadcast_path, lay_depths
from lol.model.router import Router
from lol.model.windows import WindowLayout
from lol.paths.record import find_model


@contextmanager
def force_path(
    model: nn.Module,
    path: int | Sequence[int] | Int[Tensor, "_"],
    depths: Sequence[int] | None = None,
    windows: Sequence[int] | None = None,
    weight: Literal["router"] | int | float = "router",
) -> Iterator[None]:
    """Run the given blocks, whatever the router would choose, inside of `with force_path(model, path):`.

    Holds for every forward pass of the model in the block, `generate` included. Blocks nest: where two force the same
    window, the inner one wins; where a forward pass is given a `path` of its own, `force_path` wins. The model is as
    before when the block ends, also by an exception.

    Args:
        model: `LoLModel`, `LoLForCausalLM` or a module around one.
        path: A block per depth of `depths`, -1 where the router stays free; or one block for all of them.
        depths: The depths that are forced, 0-based. Default: all. A pass of fewer depths (growing) uses their part.
        windows: Numbers of the windows that are forced, in each row and counted as in the model's `routing`. The same
            number means a place half a window further at every other depth. Default: all. Windows that do not exist
            yet are forced once generation reaches them; a window that began in a cache before keeps its block.
        weight: Weight of a forced block's update: `"router"` takes the router's own probability of it (decided here),
            a number is used as it is.

    Raises:
        UserError: a block or depth that does not exist, a path of the wrong length, or a weight other than 1 for a
            model without a router.
    """
    base = find_model(model)
    forcing = _Forcing(
        base,
        blocks=_spread_over_depths(base, path, depths),
        windows=None if windows is None else _check_windows(windows),
        weight=_check_weight(base, weight),
    )
    handles = []
    if base.router is None or windows is not None:
        handles.append(base.register_forward_pre_hook(forcing.before_model, with_kwargs=True))
    if base.router is not None:
        handles.append(base.router.register_forward_hook(forcing.after_router, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Forcing:
    """One `force_path` that is in force: the hooks, and where the windows of the current forward pass lie."""

    def __init__(self, model: LoLModel, blocks: list[int], windows: Tensor | None, weight: float | None):
        self.blocks = blocks
        self.windows = windows
        self.weight = weight
        self.layouts: list[WindowLayout] = []
        self.forward_signature = inspect.signature(model.forward)
        # The class's, not the module's: an adapter around the router takes (x, *args) and hands them on.
        self.router_signature = inspect.signature(Router.forward)

    def before_model(self, model: LoLModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Find the windows; where there is no router, put the blocks into the `path` argument."""
        call = self.forward_signature.bind(*args, **kwargs)
        given = call.arguments
        inputs = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if inputs is None:
            return None  # the model itself says what is missing
        shape = (inputs.shape[0], inputs.shape[1])
        places = (given.get("position_ids"), given.get("attention_mask"))
        documents = documents_of_pass(shape, *places, inputs.device, given.get("cache"))
        num_depths = given.get("num_depths")
        self.layouts = lay_depths(model.config, documents, len(self.blocks) if num_depths is None else num_depths)
        if model.router is not None or not self.layouts:
            return None
        given["path"] = self._overlay(given.get("path"), shape[0], model.config.num_experts)
        return call.args, call.kwargs

    def after_router(self, router: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Replace block and weight of the forced windows."""
        depth = self.router_signature.bind(router, *args, **kwargs).arguments["depth"]
        block = self.blocks[depth]
        if block < 0:
            return output
        logits, weight, expert = output
        forced = torch.ones_like(expert, dtype=torch.bool) if self.windows is None else self._is_named(depth)
        own = logits.float().softmax(-1)[:, block]
        new = own if self.weight is None else torch.full_like(own, self.weight)
        return logits, torch.where(forced, new, weight), torch.where(forced, block, expert)

    def _is_named(self, depth: int) -> Bool[Tensor, "K"]:
        number = self.layouts[depth].index_in_row
        if self.windows is None:
            return torch.ones_like(number, dtype=torch.bool)
        return torch.isin(number, self.windows.to(number.device))

    def _overlay(self, path: Any, batch: int, num_experts: int) -> Tensor:
        """The caller's path with the forced windows written over it."""
        width = max((layout.max_in_row for layout in self.layouts), default=0)
        depths = len(self.layouts)
        device = self.layouts[0].row.device
        below = torch.full((depths,), -1, device=device) if path is None else torch.as_tensor(path, device=device)
        filled = broadcast_path(below, batch, depths, num_experts, width).clone()
        for depth, layout in enumerate(self.layouts):
            if self.blocks[depth] >= 0:
                named = self._is_named(depth)
                filled[layout.row[named], depth, layout.index_in_row[named]] = self.blocks[depth]
        return filled


def _spread_over_depths(model: LoLModel, path: Any, depths: Sequence[int] | None) -> list[int]:
    """A block for each of the model's depths, -1 where it is free."""
    num_depths, num_experts = model.config.num_routed_depths, model.config.num_experts
    chosen = list(range(num_depths)) if depths is None else list(depths)
    for depth in chosen:
        if not 0 <= depth < num_depths:
            raise UserError(f"depth {depth} does not exist: the model has depths 0 to {num_depths - 1}")
    blocks = [path] * len(chosen) if isinstance(path, int) else _as_blocks(path)
    if len(blocks) != len(chosen):
        raise UserError(
            f"path names {len(blocks)} blocks for {len(chosen)} depths: give one block per depth, or a number"
        )
    for block in blocks:
        if not -1 <= block < num_experts:
            raise UserError(
                f"path names block {block}, but the library holds blocks 0 to {num_experts - 1} (-1 leaves it free)"
            )
    spread = [-1] * num_depths
    for depth, block in zip(chosen, blocks, strict=True):
        spread[depth] = block
    return spread


def _as_blocks(path: Any) -> list[int]:
    blocks = path.tolist() if hasattr(path, "tolist") else path
    if not isinstance(blocks, Sequence) or not all(isinstance(block, int) for block in blocks):
        raise UserError(
            f"path={path!r} is no list of blocks: give one whole number per depth, or a number for all depths; to "
            "force single windows, name them in windows=, or use the model's own path="
        )
    return list(blocks)


def _check_windows(windows: Sequence[int]) -> Int[Tensor, "_"]:
    numbers = torch.as_tensor(list(windows), dtype=torch.long)
    if numbers.numel() and int(numbers.min()) < 0:
        raise UserError(f"window {int(numbers.min())} does not exist: windows are counted from 0")
    return numbers


def _check_weight(model: LoLModel, weight: Any) -> float | None:
    if weight == "router":
        return None
    if isinstance(weight, str):
        raise UserError(f"weight={weight!r} is not known: give 'router' or a number")
    if model.router is None and weight != 1:
        raise UserError("this model has no router and runs every block with weight 1: leave weight out")
    if not math.isfinite(weight):
        raise UserError(f"weight={weight}: give 'router' or a finite number")
    return float(weight)
