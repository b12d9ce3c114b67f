"""The routed core: at every depth route, run, blend, shift.

Letters: B batch, n columns, T real tokens, G documents, K windows of a depth, d width, L blocks, D depths.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lol.errors import UserError
from lol.model.cache import CoreMemory
from lol.model.carry import DepthPass
from lol.model.config import LoLConfig
from lol.model.layers import DiagonalInjection, FilmTable
from lol.model.library import Dispatch, Library, Shelf
from lol.model.router import router_features
from lol.model.windows import Documents, WindowLayout, lay_windows


@dataclass(frozen=True)
class Backprop:
    """Truncated backprop: which of the core's work a gradient goes back through. It changes no value. (Article; what
    has no gradient in detail: decided here.)

    At depths before the last `depth` ones the result is a constant: neither the state nor the prelude's output is
    reached through them, and their blocks, router, depth embedding, FiLM and injection learn nothing there, from the
    auxiliary losses neither. They keep no activations. What the router reads at later depths is differentiated as
    always. Without injection and `first_windows` the prelude and the embedding of the input therefore get no gradient.
    """

    depth: int | None = None
    """The last so many of the depths that run; `None` is all."""
    first_windows: bool = False
    """Each document's first window keeps its gradient at every depth: everything that its result is made of, the
    router's choice included. Tokens that a shift moves out of it are constants from there on."""

    def first_depth(self, num_depths: int) -> int:
        """The first depth of which everything has a gradient."""
        if self.depth is None or not torch.is_grad_enabled():
            return 0
        return max(0, num_depths - self.depth)


@dataclass(frozen=True)
class Steering:
    """What a caller may impose on one forward pass: on its routes, and on its gradient."""

    path: Int[Tensor, "B D K"] | None = None
    """Block per row, depth and window; -1 leaves the router free."""
    path_weight: float | None = None
    """Weight of a forced block's update; `None` takes the router's own probability of it."""
    router_only: Float[Tensor, "G d"] | None = None
    """Per document, the summed embeddings of its router-only tokens."""
    generator: torch.Generator | None = None
    """Source of the training noise; `None` is torch's global one."""
    backprop: Backprop = Backprop()


@dataclass(frozen=True, eq=False)
class DepthRoute:
    """What one depth did: its layout, the raw logits, and the block and weight of each window."""

    layout: WindowLayout
    logits: Float[Tensor, "K L"] | None
    expert: Int[Tensor, "K"]
    weight: Float[Tensor, "K"]
    state: Float[Tensor, "T d"] | None
    """The stream after this depth, where it was asked for."""


@dataclass(frozen=True, eq=False)
class CoreParts:
    """The parameters of the core, as the model holds them."""

    config: LoLConfig
    library: Library
    dispatch: Dispatch
    router: nn.Module | None
    """A `Router`, or an adapter around one."""
    depth_embedding: Tensor | None
    expert_bias: Tensor | None
    film: FilmTable | None
    injection: DiagonalInjection | None

    def inject(self, state: Float[Tensor, "T d"], prelude: Float[Tensor, "T d"]) -> Float[Tensor, "T d"]:
        """The state as a depth finds it."""
        return state if self.injection is None else self.injection(state, prelude)


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
    keep_states: bool = False,
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
    parts.dispatch.check_adapters(parts.library)
    state, routes = prelude, []
    run = _CoreRun(parts, prelude, parts.library(), steering)
    whole = steering.backprop.first_depth(len(layouts))
    splits = _split_first_windows(layouts[:whole]) if steering.backprop.first_windows else {}
    for depth, layout in enumerate(layouts):
        split = splits.get(id(layout))
        if depth < whole and split is not None:
            state, route = run.depth_of_first_windows(depth, layout, split, state, noise[depth])
        else:
            differentiable = depth >= whole or steering.backprop.first_windows
            with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
                state, route = run.depth(depth, layout, state, noise[depth], memory)
            if not differentiable and parts.dispatch.gradient_checkpointing:
                # Reentrant checkpointing passes no gradient on where no input wants one.
                state.requires_grad_()
        routes.append(replace(route, state=state) if keep_states else route)
    return state, routes


@dataclass(frozen=True, eq=False)
class _Split:
    """The windows of a layout that are the first of their document, and the others; neither is empty."""

    first: Int[Tensor, "_"]
    first_tokens: Int[Tensor, "_"]
    first_layout: WindowLayout
    rest: Int[Tensor, "_"]
    rest_tokens: Int[Tensor, "_"]
    rest_layout: WindowLayout


def _split_first_windows(layouts: list[WindowLayout]) -> dict[int, _Split]:
    """By layout; without those in which every window is a first one."""
    splits = {}
    for key, layout in {id(layout): layout for layout in layouts}.items():
        is_first = layout.index_in_document == 0
        first, rest = is_first.nonzero().squeeze(1), (~is_first).nonzero().squeeze(1)
        if rest.numel():
            splits[key] = _Split(first, *layout.take(first), rest, *layout.take(rest))
    return splits


@dataclass(frozen=True, eq=False)
class _CoreRun:
    """What the depths of one forward pass share."""

    parts: CoreParts
    prelude: Float[Tensor, "T d"]
    shelf: Shelf
    steering: Steering

    def depth(
        self,
        depth: int,
        layout: WindowLayout,
        state: Float[Tensor, "T d"],
        noise: Float[Tensor, "K L"] | None,
        memory: CoreMemory | None = None,
    ) -> tuple[Float[Tensor, "T d"], DepthRoute]:
        """The state after a depth, and what it did."""
        parts, steering = self.parts, self.steering
        state = parts.inject(state, self.prelude)
        film = parts.film(depth) if parts.film is not None else None
        if memory is None:
            features = _read(parts, state, depth, layout, steering)
            logits, weight, expert = _choose(parts, features, depth, layout, steering, noise)
            after = parts.dispatch(state, self.shelf, layout, expert, weight, film)
        else:
            past = memory.begin(depth, layout, state, steering.router_only)
            logits, weight, expert = _go_on(parts, state, depth, past, steering, noise)
            after = parts.dispatch(state, self.shelf, layout, expert, weight, film, past)
            memory.end(depth, past, expert, weight)
        return after, DepthRoute(layout, logits, expert, weight, None)

    def depth_of_first_windows(
        self,
        depth: int,
        layout: WindowLayout,
        split: _Split,
        state: Float[Tensor, "T d"],
        noise: Float[Tensor, "K L"] | None,
    ) -> tuple[Float[Tensor, "T d"], DepthRoute]:
        """The same, where only the first windows' part has a gradient."""
        parts, steering = self.parts, self.steering
        own_state, own_prelude = (x.index_select(0, split.first_tokens) for x in (state, self.prelude))
        own = parts.inject(own_state, own_prelude)
        film = parts.film(depth) if parts.film is not None else None
        with torch.no_grad():
            constant = parts.inject(state, self.prelude)
            features = _read(parts, constant, depth, layout, steering)
        own_features = _read(parts, own, depth, split.first_layout, steering)
        if features is not None and own_features is not None:
            features = features.index_copy(0, split.first, own_features)
        # One call for all windows, so that a hook on the router sees a depth once.
        logits, weight, expert = _choose(parts, features, depth, layout, steering, noise)
        if logits is not None:
            logits = torch.where(layout.index_in_document[:, None] == 0, logits, logits.detach())
        own_after = parts.dispatch(own, self.shelf, split.first_layout, expert[split.first], weight[split.first], film)
        with torch.no_grad():
            others = constant.index_select(0, split.rest_tokens)
            others = parts.dispatch(others, self.shelf, split.rest_layout, expert[split.rest], weight[split.rest], film)
            after = constant.index_copy(0, split.rest_tokens, others)
        after = after.index_copy(0, split.first_tokens, own_after)
        return after, DepthRoute(layout, logits, expert, weight, None)


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
    features = _read(parts, state, depth, plan.layout, steering, past)
    logits, weight, expert = _choose(parts, features, depth, plan.layout, steering, noise)
    if logits is not None:
        logits = logits.masked_fill(plan.continues[:, None], 0.0)
    expert = torch.where(plan.continues, rows.expert[row], expert)
    return logits, torch.where(plan.continues, rows.weight[row], weight), expert


def _read(
    parts: CoreParts,
    state: Float[Tensor, "T d"],
    depth: int,
    layout: WindowLayout,
    steering: Steering,
    past: DepthPass | None = None,
) -> Float[Tensor, "K d"] | None:
    """What the router reads for each window; `None` where there is no router."""
    if parts.router is None:
        return None
    assert parts.depth_embedding is not None
    return router_features(state, layout, parts.depth_embedding[depth], steering.router_only, past)


def _choose(
    parts: CoreParts,
    features: Float[Tensor, "K d"] | None,
    depth: int,
    layout: WindowLayout,
    steering: Steering,
    noise: Float[Tensor, "K L"] | None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Raw logits, weight and block of each window: the router's, or the fixed path's with weight 1."""
    forced = None if steering.path is None else layout.from_rows(steering.path[:, depth])
    if parts.router is None:
        assert parts.config.fixed_path is not None
        expert = layout.document.new_full((layout.num_windows,), parts.config.fixed_path[depth])
        if forced is not None:
            expert = torch.where(forced >= 0, forced, expert)
        weight = torch.ones(layout.num_windows, device=layout.document.device)
        if forced is not None and steering.path_weight is not None:
            weight = weight.masked_fill(forced >= 0, steering.path_weight)
        return None, weight, expert
    assert parts.expert_bias is not None
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
