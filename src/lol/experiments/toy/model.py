"""The toy's encoder: the library's blocks over one window per example, which sees itself whole.

Letters: B examples, N digits, S steps of a program, n tokens of an example, d width, L blocks, V digits' base.
"""

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lol.experiments.toy.config import WRITTEN, Between, ToyConfig
from lol.experiments.toy.task import BASE, NUM_DIGITS
from lol.experiments.toy.torch_blocks import TorchBlocks
from lol.model.base import LoLPreTrainedModel
from lol.model.layers import RMSNorm
from lol.model.library import Dispatch, Library, Shelf
from lol.model.router import Router
from lol.model.short_windows import Packed, Repeated, pack
from lol.model.windows import WindowLayout, find_documents, lay_windows

_NOISE = 0.3


@dataclass(frozen=True)
class ToyOutput:
    """What a pass returns."""

    logits: Float[Tensor, "B N V"]
    experts: Int[Tensor, "B S"]
    """The block of each step; the most probable one where all run."""
    router_logits: tuple[Float[Tensor, "B L"], ...]
    """Of each step; empty where no router is asked."""
    states: tuple[Float[Tensor, "B _ d"], ...]
    """Before the first step and after each; after the last, of the digits' places alone, which are all that is read."""


@dataclass(frozen=True)
class Mixture:
    """All blocks run at each step, weighted by the softmax of the router's logits."""

    temperature: float = 1.0
    gumbel: Float[Tensor, "S B L"] | None = None
    """Standard Gumbel draws that are added to the logits."""

    def shares(self, logits: Float[Tensor, "B L"], step: int) -> Float[Tensor, "B L"]:
        """The weight of each block."""
        moved = logits if self.gumbel is None else logits + self.gumbel[step]
        return (moved / self.temperature).softmax(-1)


class ToyModel(LoLPreTrainedModel):
    """Embeddings → one block per step → norm → head on the digits' places."""

    expert_bias: Tensor

    def __init__(self, config: ToyConfig):
        super().__init__(config.library())
        d = config.hidden_size
        self.toy = config
        num_tokens = NUM_DIGITS + (0 if config.blind else config.steps)
        self.digit_embedding = nn.Embedding(BASE, d)
        self.program_embedding = nn.Embedding(config.steps * len(config.primitives), d)
        self.place_embedding = nn.Embedding(num_tokens, d)
        self.library = Library(self.config)
        self.dispatch = Dispatch(self.config)
        self.dispatch.is_causal = False
        self.packs_shelf = True
        self.norm = RMSNorm(d, self.config.rms_norm_eps)
        self.head = nn.Linear(d, BASE)
        self.router = None
        if config.routing == "learned":
            self.router = Router(self.config)
            self.depth_embedding = nn.Embedding(config.steps, d)
            bias_shape = (config.num_blocks,) if config.balance_scope == "global" else (config.steps, config.num_blocks)
            self.register_buffer("expert_bias", torch.zeros(bias_shape))
        self.post_init()
        for embedding in (self.digit_embedding, self.program_embedding):
            nn.init.normal_(embedding.weight, std=config.embedding_std)
        nn.init.normal_(self.place_embedding.weight, std=config.place_std)
        nn.init.zeros_(self.head.bias)
        if config.block != "library":
            # After `post_init`, which starts weights in the library's way.
            self.library = TorchBlocks(config.num_blocks, d, config.num_heads, config.block == "torch as it comes")
            self.norm = nn.LayerNorm(d)
            self.head.reset_parameters()
        if config.between in WRITTEN:
            # A head that cannot read digits yet would hand the next block the same mean embedding at every place.
            self.head.weight.data.copy_(self.digit_embedding.weight.data / d**0.5)

    def forward(
        self,
        digits: Int[Tensor, "B N"],
        program: Int[Tensor, "B S"],
        path: Int[Tensor, "B S"] | None = None,
        weight: Float[Tensor, "B S"] | None = None,
        noise: Float[Tensor, "S B L"] | None = None,
        mixture: Mixture | None = None,
        between: Between | None = None,
        generator: torch.Generator | None = None,
    ) -> ToyOutput:
        """Run programs on digits.

        Args:
            digits: The input.
            program: The primitive of each step.
            path: Blocks to run, with weight 1 unless there is a router, whose probability of them it is then.
            weight: Of each step's update, where there is no router; 1 without it.
            noise: Standard normal draws of the router's training noise.
            mixture: Run all blocks at each step in place of the chosen one.
            between: In place of the configuration's own.
            generator: Of what is drawn between blocks in training; nothing is drawn without it.
        """
        batch = digits.shape[0]
        steps = program.shape[1]
        between = between or self.toy.between
        tokens = self._embed(digits, program)
        x = tokens.spread()
        instruction = None if self.router is None else self.program_embedding(self._place_primitives(program))
        shelf, length = self._take_shelf(), x.shape[1]
        state, states = x, [x]
        experts, router_logits = [], []
        for step in range(steps):
            wanted = NUM_DIGITS if step == steps - 1 else length
            if step:
                state = self._between(state, between, generator)
            stream = state.flatten(0, 1) if step else tokens
            forced = None if path is None else path[:, step]
            if self.router is None:
                assert forced is not None
                expert, share = forced, state.new_ones(batch) if weight is None else weight[:, step]
                state = self._run(stream, shelf, expert, share, wanted)
            else:
                assert instruction is not None
                features = self._features(state, step, instruction)
                bias = self.expert_bias if self.expert_bias.ndim == 1 else self.expert_bias[step]
                logits, share, expert = self.router(
                    features, step, bias, None if noise is None else noise[step], forced=forced
                )
                router_logits.append(logits)
                if mixture is None:
                    state = self._run(stream, shelf, expert, share, wanted)
                else:
                    state = self._mix(stream, state, shelf, mixture.shares(logits, step), wanted)
            experts.append(expert)
            states.append(state)
        return ToyOutput(self.read(states[-1]), torch.stack(experts, dim=1), tuple(router_logits), tuple(states))

    def try_paths(
        self, digits: Int[Tensor, "B N"], program: Int[Tensor, "B S"], paths: Int[Tensor, "B C S"], between: Between
    ) -> Float[Tensor, "B C N V"]:
        """Logits along several given paths of each example; what its paths begin with in common is run once.

        Nothing is drawn between blocks.
        """
        batch, tries, steps = paths.shape
        tokens, shelf = self._embed(digits, program), self._take_shelf()
        length, state = tokens.which.shape[1], tokens
        # The row of `state` that each path has come to.
        row = torch.arange(batch).repeat_interleave(tries)
        for step in range(steps):
            named, row = (row * self.toy.num_blocks + paths[..., step].flatten()).unique(return_inverse=True)
            before, expert = named // self.toy.num_blocks, named % self.toy.num_blocks
            if isinstance(state, Repeated):
                stream = Repeated(state.distinct, state.which.index_select(0, before))
            else:
                stream = self._between(state, between, None).index_select(0, before).flatten(0, 1)
            wanted = NUM_DIGITS if step == steps - 1 else length
            state = self._run(stream, shelf, expert, tokens.distinct.new_ones(len(expert)), wanted)
        assert isinstance(state, Tensor), "a program has at least one step"
        return self.read(state)[row].unflatten(0, (batch, tries))

    def read(self, state: Float[Tensor, "*batch N d"]) -> Float[Tensor, "*batch N V"]:
        """Logits of the digits that the head reads off a state, after whichever step."""
        return self.head(self.norm(state))

    def _embed(self, digits: Int[Tensor, "B N"], program: Int[Tensor, "B S"]) -> Repeated:
        """The tokens of an example: a digit at each of N places, and unless blind, a primitive at each of S more."""
        place = self.place_embedding.weight[:, None]
        distinct = (place[:NUM_DIGITS] + self.digit_embedding.weight).flatten(0, 1)
        index = digits + BASE * torch.arange(NUM_DIGITS)
        if not self.toy.blind:
            primitives = self.program_embedding.weight.unflatten(0, (self.toy.steps, -1))
            index = torch.cat([index, len(distinct) + self._place_primitives(program)], dim=1)
            distinct = torch.cat([distinct, (place[NUM_DIGITS:] + primitives).flatten(0, 1)])
        return Repeated(distinct, index)

    def _place_primitives(self, program: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        """Which of the (step, primitive) pairs they are."""
        return program + torch.arange(self.toy.steps) * len(self.toy.primitives)

    def _features(self, state: Tensor, step: int, instruction: Tensor) -> Float[Tensor, "B d"]:
        """½ (mean state + depth embedding); where the blocks are blind, plus the mean of the program's embeddings."""
        features = 0.5 * (state.mean(1) + self.depth_embedding.weight[step])
        return (features + instruction.mean(1) if self.toy.blind else features).float()

    def _between(
        self, state: Float[Tensor, "B N d"], between: Between, generator: torch.Generator | None
    ) -> Float[Tensor, "B N d"]:
        """What the next block sees of a state: see `ToyConfig.between`."""
        if between == "nothing" or (generator is None and between not in WRITTEN):
            return state
        if between == "noise":
            size = state.detach().pow(2).mean(-1, keepdim=True).sqrt()
            return state + _NOISE * size * torch.randn(state.shape, generator=generator)
        shares = self.read(state).softmax(-1)
        if between in ("hard digits", "hard digits at random"):
            sure = F.one_hot(shares.argmax(-1), shares.shape[-1]).to(shares.dtype)
            shares = sure + shares - shares.detach()
        digits = shares @ self.digit_embedding.weight + self.place_embedding.weight
        if between in WRITTEN:
            return digits
        return torch.where(torch.rand((len(state), 1, 1), generator=generator) < 0.5, digits, state)

    def _take_shelf(self) -> Shelf | Packed | TorchBlocks:
        if isinstance(self.library, TorchBlocks):
            return self.library
        return pack(self.library.stacks(), self.toy.num_heads) if self.packs_shelf else self.library()

    def _run(
        self,
        stream: Tensor | Repeated,
        shelf: Shelf | Packed | TorchBlocks,
        expert: Int[Tensor, "B"],
        weight: Float[Tensor, "B"],
        wanted: int,
    ) -> Float[Tensor, "B wanted d"]:
        """One step of every example, of which the first `wanted` tokens are returned."""
        examples = expert.shape[0]
        if not isinstance(shelf, Packed) and isinstance(stream, Repeated):
            stream = stream.spread().flatten(0, 1)
        if isinstance(shelf, TorchBlocks):
            return shelf(cast(Tensor, stream).unflatten(0, (examples, -1)), expert, weight)[:, :wanted]
        layout = _one_window_each(examples, _length(stream, examples))
        part = wanted if isinstance(shelf, Packed) else None
        moved = self.dispatch(stream, shelf, layout, expert, weight, None, wanted=part)
        return moved.unflatten(0, (examples, -1))[:, :wanted]

    def _mix(
        self,
        stream: Tensor | Repeated,
        state: Float[Tensor, "B n d"],
        shelf: Shelf | Packed | TorchBlocks,
        shares: Float[Tensor, "B L"],
        wanted: int,
    ) -> Float[Tensor, "B wanted d"]:
        """s + Σ_m share_m (E_m(s) - s): every block on a copy of every window."""
        batch, blocks = shares.shape
        if isinstance(stream, Repeated):
            copies = Repeated(stream.distinct, stream.which.repeat(blocks, 1))
        else:
            copies = stream.repeat(blocks, 1)
        expert = torch.arange(blocks).repeat_interleave(batch)
        moved = self._run(copies, shelf, expert, shares.t().flatten(), wanted)
        first = state[:, :wanted]
        return first + (moved.unflatten(0, (blocks, -1)) - first).sum(0)


def _length(stream: Tensor | Repeated, examples: int) -> int:
    """Tokens of an example."""
    return stream.which.shape[1] if isinstance(stream, Repeated) else len(stream) // examples


@cache
def _one_window_each(batch: int, length: int) -> WindowLayout:
    """Every example is one window, which is all of its document."""
    return lay_windows(find_documents((batch, length), None, None, torch.device("cpu")), 0, None)
