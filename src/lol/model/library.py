"""The library: L blocks as stacked tensors, and the dispatch of windows to them.

`Library` holds the weights and is called once per forward pass of the model: its result, the shelf, is what `Dispatch`
runs the windows of every depth on. Where weights are spread over processes (`lol.train.parallel`) they are therefore
gathered once, however deep the core is and whatever the path.

The windows of a depth are brought into the order of their blocks, so that each block's tokens are one run; every
projection is then one grouped matrix product over the runs (`grouped.py`), and attention folds windows of equal length
into one batch. `Dispatch.form = "loop"` runs block after block with the plain code of an ordinary layer instead: the
reference that the grouped form is tested against. A packed shelf has a third form, for short windows
(`short_windows.py`). Letters: T tokens, K windows, d width, H heads, L blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lol.errors import UserError
from lol.model.attention import AttentionShape, window_attention
from lol.model.carry import DepthPass
from lol.model.config import LoLConfig
from lol.model.grouped import autocast, fits_kernel, kernel_linear, shelf_linear
from lol.model.layers import BlockParts, Film, block_update, rms_normalize, swiglu
from lol.model.shared_gradient import Matrices
from lol.model.short_windows import Packed, Repeated, Shape, run_short_windows
from lol.model.windows import WindowLayout, Windows, line_up

NORMS = ("attn_norm", "mlp_norm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Shelf = dict[str, tuple[Tensor, ...] | Tensor]
"""The stacked weights taken apart into the L blocks' own, once per forward pass: the gradients of all depths then add
up block by block (`shared_gradient.py`), and a block that no window chose costs nothing but its zeros at the end. Where
one kernel takes all blocks they stay stacked."""


class Stack(nn.Module):
    """A weight of all L blocks.

    It is read by calling the module, never as an attribute from outside: what wraps a module's call to change its
    weight (PEFT's `target_parameters`, a parametrization) then changes the library's blocks too.
    """

    weight: nn.Parameter

    def forward(self, cast: Callable[[Tensor], Tensor]) -> Tensor:
        """The weight after `cast`."""
        return cast(self.weight)


class StackedNorm(Stack):
    """The scales of a norm of all L blocks."""

    def __init__(self, experts: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))


class StackedLinear(Stack):
    """The matrices of a projection of all L blocks, each (out, in)."""

    def __init__(self, experts: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))


class StackedOutputLinear(StackedLinear):
    """The matrices of a projection that writes into the residual stream; they start smaller."""


class Library(nn.Module):
    """L transformer blocks of the same shape; every parameter is stacked (L, …)."""

    def __init__(self, config: LoLConfig):
        super().__init__()
        experts, d, hidden = config.num_experts, config.hidden_size, config.mlp_size
        self.attn_norm = StackedNorm(experts, d)
        self.q_proj = StackedLinear(experts, d, d)
        self.k_proj = StackedLinear(experts, d, d)
        self.v_proj = StackedLinear(experts, d, d)
        self.o_proj = StackedOutputLinear(experts, d, d)
        self.mlp_norm = StackedNorm(experts, d)
        self.gate_proj = StackedLinear(experts, d, hidden)
        self.up_proj = StackedLinear(experts, d, hidden)
        self.down_proj = StackedOutputLinear(experts, hidden, d)

    def forward(self) -> Shelf:
        """Take the stacks apart, once per forward pass of the model; under autocast the projections are cast here."""
        stacks = self.stacks()
        if all(fits_kernel(stacks[name]) for name in PROJECTIONS):
            # Views, for FSDP2 leaves a hook on whatever is returned, and a parameter would keep it.
            return {name: stack.view_as(stack) for name, stack in stacks.items()}
        apart: Shelf = {name: stacks[name].unbind(0) for name in NORMS}
        return apart | {name: Matrices.of(stacks[name]) for name in PROJECTIONS}

    def stacks(self) -> dict[str, Tensor]:
        """The stacks as they are, by name; under autocast the projections are cast."""
        stacks: dict[str, Tensor] = {name: getattr(self, name)(_as_is) for name in NORMS}
        return stacks | {name: getattr(self, name)(autocast) for name in PROJECTIONS}

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter stands around a stack, and computes its weight."""
        return not all(isinstance(getattr(self, name), Stack) for name in (*NORMS, *PROJECTIONS))


class Dispatch(GradientCheckpointingLayer):
    """Runs the windows of a depth on the library's blocks; called once per depth, without parameters of its own."""

    def __init__(self, config: LoLConfig):
        super().__init__()
        self.config = config
        self.form: Literal["grouped", "loop"] = "grouped"
        # The elementwise work of the blocks, for which `lol.train.compiled` has a compiled form.
        self.normalize, self.gate = rms_normalize, swiglu
        self.is_causal = True

    def forward(
        self,
        state: Float[Tensor, "T d"] | Repeated,
        shelf: Shelf | Packed,
        layout: WindowLayout,
        expert: Int[Tensor, "K"],
        weight: Float[Tensor, "K"],
        film: Film | None,
        past: DepthPass | None = None,
        wanted: int | None = None,
    ) -> Float[Tensor, "wanted_T d"]:
        """Run on every window its block: s ← s + weight · (E(s) - s).

        Args:
            state: The stream of real tokens; on a packed shelf it may be tokens that come again and again.
            shelf: What the library returned in this forward pass; packed for short windows of one length, which
                then have neither modulation nor a past.
            layout: The windows of this depth.
            expert: The block of each window.
            weight: The weight of each window's update.
            film: This depth's modulation, or `None`.
            past: What a cache keeps of these windows, or `None`; the loop has no form for it.
            wanted: How many first tokens of each window to return, all without; for a packed shelf alone.
        """
        if isinstance(shelf, Packed):
            assert film is None, "no modulation on a packed shelf"
            assert past is None, "no cache on a packed shelf"
            shape = self._shape(layout.windows, wanted)
            return run_short_windows(state, weight.to(shelf.qkv.dtype), shelf, expert, shape)
        assert wanted is None, "a part of each window is for a packed shelf"
        assert isinstance(state, Tensor), "repeated tokens are for a packed shelf"
        if self.form == "loop" and past is None:
            update = self._run_loop(state, shelf, layout, expert, film)
        elif isinstance(shelf["q_proj"], Tensor):
            update = self._run_kernel(state, shelf, layout, expert, film, past)
        else:
            update = self._run_grouped(state, shelf, layout, expert, film, past)
        return state + update * weight[layout.window_of_token, None].to(state.dtype)

    def check_adapters(self, library: Library) -> None:
        """Refuse what torch would fail at in the backward pass.

        Reentrant checkpointing runs a backward pass of its own at every depth, and all of them would go through what an
        adapter computes once per forward pass; through plain parameters they may.
        """
        reentrant = getattr(getattr(self, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant")
        runs_twice = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if reentrant and runs_twice and library.is_adapted:
            raise UserError(
                "reentrant gradient checkpointing cannot pass an adapter on the library: use "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, which is transformers' default"
            )

    def _run_grouped(
        self,
        state: Tensor,
        shelf: Shelf,
        layout: WindowLayout,
        expert: Tensor,
        film: Film | None,
        past: DepthPass | None,
    ) -> Tensor:
        windows = layout.windows
        counts = self._tokens_of_blocks(layout, expert).tolist()
        used = [block for block, count in enumerate(counts) if count]
        parts = self._parts(shelf, used, [counts[block] for block in used], shelf_linear)
        if len(used) == 1:
            return block_update(parts, state, self._attention(windows, past), film, self.gate)
        order = layout.group(expert)
        attend = self._attention(order.windows, past)
        return order.restore(block_update(parts, order.arrange(state), attend, film, self.gate))

    def _run_kernel(
        self,
        state: Tensor,
        shelf: Shelf,
        layout: WindowLayout,
        expert: Tensor,
        film: Film | None,
        past: DepthPass | None,
    ) -> Tensor:
        """The grouped form whose runs' lengths stay on the device: all blocks take part, the idle ones too."""
        counts = self._tokens_of_blocks(layout, expert)
        ends = counts.cumsum(0).to(torch.int32)
        blocks = torch.arange(self.config.num_experts, device=expert.device)
        block_of_row = blocks.repeat_interleave(counts, output_size=layout.windows.total)

        def scale(name: str, x: Tensor) -> Tensor:
            # An embedding, because the gradient of one adds up in the same order every time.
            return self.normalize(x, self.config.rms_norm_eps) * F.embedding(block_of_row, cast(Tensor, shelf[name]))

        def project(name: str, x: Tensor) -> Tensor:
            return kernel_linear(x, ends, cast(Tensor, shelf[name]))

        order = layout.group(expert)
        attend = self._attention(order.windows, past)
        return order.restore(block_update(_gather_parts(scale, project), order.arrange(state), attend, film, self.gate))

    def _tokens_of_blocks(self, layout: WindowLayout, expert: Tensor) -> Tensor:
        tokens = torch.zeros(self.config.num_experts, dtype=torch.long, device=expert.device)
        return tokens.index_add(0, expert, layout.windows.length)

    def _run_loop(self, state: Tensor, shelf: Shelf, layout: WindowLayout, expert: Tensor, film: Film | None) -> Tensor:
        update = torch.zeros_like(state)
        for block in range(self.config.num_experts):
            chosen = expert == block
            if not chosen.any():
                continue
            index = chosen[layout.window_of_token].nonzero().squeeze(1)
            attend = self._attention(line_up(layout.windows.length[chosen]))
            parts = self._parts(shelf, [block], [index.numel()], _multiply_one)
            own = block_update(parts, state[index], attend, film, self.gate)
            update = update.index_copy(0, index, own.to(update.dtype))
        return update

    def _parts(
        self,
        shelf: Shelf,
        blocks: Sequence[int],
        counts: list[int],
        multiply: Callable[[Tensor, list[int], Matrices, Sequence[int]], Tensor],
    ) -> BlockParts:
        """The parts of these blocks, each working on its run of `counts` tokens."""
        eps = self.config.rms_norm_eps

        def scale(name: str, x: Tensor) -> Tensor:
            normed = self.normalize(x, eps)
            if len(blocks) == 1:
                return normed * shelf[name][blocks[0]]
            runs = normed.split(counts)
            return torch.cat([run * shelf[name][block] for run, block in zip(runs, blocks, strict=True)])

        def project(name: str, x: Tensor) -> Tensor:
            matrices = shelf[name]
            assert isinstance(matrices, Matrices)
            return multiply(x, counts, matrices, blocks)

        return _gather_parts(scale, project)

    def _shape(self, windows: Windows, wanted: int | None) -> Shape:
        length, config = windows.equal_length, self.config
        assert length is not None, "a packed shelf needs windows of one length"
        return Shape(
            length=length,
            wanted=length if wanted is None else wanted,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            rope_theta=config.rope_theta,
            is_causal=self.is_causal,
            eps=config.rms_norm_eps,
        )

    def _attention(self, windows: Windows, past: DepthPass | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if past is not None:
            return partial(past.attend, windows=windows)
        return partial(
            window_attention, windows=windows, shape=replace(AttentionShape.of(self.config), is_causal=self.is_causal)
        )


def _gather_parts(scale: Callable[[str, Tensor], Tensor], project: Callable[[str, Tensor], Tensor]) -> BlockParts:
    """A block's parts from what a norm and what a projection does, by name."""
    parts = {name: partial(scale, name) for name in NORMS} | {name: partial(project, name) for name in PROJECTIONS}
    return cast(BlockParts, SimpleNamespace(**parts))


def _multiply_one(x: Tensor, _counts: list[int], matrices: Matrices, blocks: Sequence[int]) -> Tensor:
    """`shelf_linear` for one block, as an ordinary layer does it."""
    return F.linear(x, matrices[blocks[0]])


def _as_is(x: Tensor) -> Tensor:
    return x
