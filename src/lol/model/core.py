"""The routed core: at every depth route, run, blend, shift.

Letters: B batch, n columns, T real tokens, G documents, K windows of a depth, d width, L blocks, D depths.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lol.errors import UserError
from lol.model.cache import CoreMemory
from lol.model.carry import DepthPass
from lol.model.config import LoLConfig
from lol.model.layers import DiagonalInjection, FilmTable
from lol.model.library import Library
from lol.model.router import router_features
from lol.model.windows import Documents, WindowLayout, lay_windows


@dataclass(frozen=True)
class Steering:
    """What a caller may impose on the routes of one forward pass."""

    path: Int[Tensor, "B D K"] | None = None
    """Block per row, depth and window; -1 leaves the router free."""
    path_weight: float | None = None
    """Weight of a forced block's update; `None` takes the router's own probability of it."""
    router_only: Float[Tensor, "G d"] | None = None
    """Per document, the summed embeddings of its router-only tokens."""
    generator: torch.Generator | None = None
    """Source of the training noise; `None` is torch's global one."""


@dataclass(frozen=True, eq=False)
class DepthRoute:
    """What one depth did: its layout, the raw logits, and the block and weight of each window."""

    layout: WindowLayout
    logits: Float[Tensor, "K L"] | None
    expert: Int[Tensor, "K"]
    weight: Float[Tensor, "K"]
    state: Float[Tensor, "T d"]
    """The stream after this depth."""


@dataclass(frozen=True, eq=False)
class CoreParts:
    """The parameters of the core, as the model holds them."""

    config: LoLConfig
    library: Library
    router: nn.Module | None
    """A `Router`, or an adapter around one."""
    depth_embedding: Tensor | None
    expert_bias: Tensor | None
    film: FilmTable | None
    injection: DiagonalInjection | None


def lay_depths(config: LoLConfig, documents: Documents, num_depths: int) -> list[WindowLayout]:
    """The layout of each depth; depths of the same shift share one."""
    shifts = [config.window_shift(depth) for depth in range(num_depths)]
    layouts = {shift: lay_windows(documents, shift, config.core_window) for shift in dict.fromkeys(shifts)}
    return [layouts[shift] for shift in shifts]


def run_core(
    parts: CoreParts,
    prelude: Float[Tensor, "T d"],
    layouts: list[WindowLayout],
    steering: Steering,
    training: bool,
    memory: CoreMemory | None = None,
) -> tuple[Float[Tensor, "T d"], list[DepthRoute]]:
    """Run the depths of `layouts` on the prelude's output.

    Training noise is drawn before the first depth, depth after depth, one standard normal per window (in the order of
    the stream) and block, in float32 on the generator's device: recomputation can then never draw anew.

    With a memory, windows that began in earlier passes go on: with the block and weight that they began with, and with
    the keys and values that are kept of them.

    Returns:
        The state after the last depth, and what each depth did.
    """
    noise = _draw_noise(parts, prelude, layouts, steering.generator) if training else [None] * len(layouts)
    state, routes, shelf = prelude, [], parts.library.open()
    for depth, layout in enumerate(layouts):
        if parts.injection is not None:
            state = parts.injection(state, prelude)
        film = parts.film(depth) if parts.film is not None else None
        if memory is None:
            logits, weight, expert = _choose(parts, state, depth, layout, steering, noise[depth])
            after = parts.library(state, shelf, layout, expert, weight, film)
        else:
            past = memory.begin(depth, layout, state, steering.router_only)
            logits, weight, expert = _go_on(parts, state, depth, past, steering, noise[depth])
            after = parts.library(state, shelf, layout, expert, weight, film, past)
            memory.end(depth, past, expert, weight)
        state = after
        routes.append(DepthRoute(layout, logits, expert, weight, state))
    return state, routes


def _go_on(
    parts: CoreParts,
    state: Float[Tensor, "T d"],
    depth: int,
    past: DepthPass,
    steering: Steering,
    noise: Float[Tensor, "K L"] | None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """`_choose` for windows that begin; the others keep block and weight. Their logits are 0: the choice is past."""
    plan, rows = past.plan, past.rows
    if plan.only_goes_on:
        if parts.router is None:
            return None, rows.weight, rows.expert
        return (
            state.new_zeros(len(rows.weight), parts.config.num_experts, dtype=torch.float32),
            rows.weight,
            rows.expert,
        )
    row = plan.layout.row
    logits, weight, expert = _choose(parts, state, depth, plan.layout, steering, noise, past)
    if logits is not None:
        logits = logits.masked_fill(plan.continues[:, None], 0.0)
    expert = torch.where(plan.continues, rows.expert[row], expert)
    return logits, torch.where(plan.continues, rows.weight[row], weight), expert


def _choose(
    parts: CoreParts,
    state: Float[Tensor, "T d"],
    depth: int,
    layout: WindowLayout,
    steering: Steering,
    noise: Float[Tensor, "K L"] | None,
    past: DepthPass | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Raw logits, weight and block of each window: the router's, or the fixed path's with weight 1."""
    forced = None if steering.path is None else layout.from_rows(steering.path[:, depth])
    if parts.router is None:
        assert parts.config.fixed_path is not None
        expert = layout.document.new_full((layout.num_windows,), parts.config.fixed_path[depth])
        if forced is not None:
            expert = torch.where(forced >= 0, forced, expert)
        weight = torch.ones(layout.num_windows, device=state.device)
        if forced is not None and steering.path_weight is not None:
            weight = weight.masked_fill(forced >= 0, steering.path_weight)
        return None, weight, expert
    assert parts.depth_embedding is not None
    assert parts.expert_bias is not None
    features = router_features(state, layout, parts.depth_embedding[depth], steering.router_only, past)
    bias = parts.expert_bias if parts.config.balance_scope == "global" else parts.expert_bias[depth]
    return parts.router(features, depth, bias, noise, forced, steering.path_weight)


def _draw_noise(
    parts: CoreParts, like: Tensor, layouts: list[WindowLayout], generator: torch.Generator | None
) -> list[Tensor | None]:
    if parts.router is None or parts.config.router_noise_max == 0:
        return [None] * len(layouts)
    device = like.device if generator is None else generator.device
    return [
        torch.randn(layout.num_windows, parts.config.num_experts, generator=generator, device=device).to(like.device)
        for layout in layouts
    ]


def give_path_rows(path: Int[Tensor, "..."], batch: int) -> Int[Tensor, "B D _"]:
    """Bring a caller's path into shape (batch, depths, windows), where windows is as given, or 1.

    Args:
        path: (D,), (D, windows) or (batch, D, windows), where batch and windows may be 1.

    Raises:
        UserError: a shape that does not fit.
    """
    if not 1 <= path.ndim <= 3:
        raise UserError(f"path must have shape (D,), (D, windows) or (batch, D, windows), not {tuple(path.shape)}")
    shaped = path[:, None] if path.ndim == 1 else path
    shaped = shaped if shaped.ndim == 3 else shaped[None]
    if shaped.shape[0] not in (1, batch):
        raise UserError(f"path has {shaped.shape[0]} rows, but the batch has {batch}: give one row, or one per row")
    return shaped.expand(batch, -1, -1)


def fit_path(path: Int[Tensor, "..."], num_windows: int) -> Int[Tensor, "..."]:
    """Cut or fill a path to what a growing text has of windows so far: those that it does not name stay free.

    Args:
        path: As in `broadcast_path`; one block per depth holds for every window and stays as it is.
    """
    if path.ndim == 1 or path.shape[-1] == 1:
        return path
    return nn.functional.pad(path[..., :num_windows], (0, max(0, num_windows - path.shape[-1])), value=-1)


def broadcast_path(
    path: Int[Tensor, "..."], batch: int, num_depths: int, num_experts: int, num_windows: int
) -> Int[Tensor, "B D K"]:
    """Bring a caller's path into shape (batch, depths, windows).

    Args:
        path: (D,), (D, windows) or (batch, D, windows), where batch and windows may be 1.

    Raises:
        UserError: a block that does not exist, or a shape that does not fit.
    """
    if path.numel() and (int(path.max()) >= num_experts or int(path.min()) < -1):
        wrong = int(path.max()) if int(path.max()) >= num_experts else int(path.min())
        raise UserError(
            f"path names block {wrong}, but the library holds blocks 0 to {num_experts - 1} (-1 leaves the router free)"
        )
    shaped = give_path_rows(path, batch)
    if shaped.shape[1] != num_depths:
        raise UserError(f"path has {shaped.shape[1]} depths, but {num_depths} are run: give one block per depth")
    if shaped.shape[2] not in (1, num_windows):
        raise UserError(
            f"path has {shaped.shape[2]} windows, but the longest row has {num_windows}: give one block per depth, or "
            "one per window, with -1 for those that stay free"
        )
    return shaped.expand(batch, num_depths, num_windows)
