"""Routers that read instructions: what each choice of a path may depend on, and in which order instructions are read.

Letters: B examples, S steps of a program, P primitives, L blocks, O readings, Q programs.
"""

import itertools
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lol.experiments.toy.config import ToyConfig
from lol.experiments.toy.discovery.crossfit import number_of

Rule = Literal["pc", "mix", "ord", "sum"]
_SINKHORN_ROUNDS = 8
_SURE = 1e4


class InstructionRouter(nn.Module):
    """Instructions → a distribution over the blocks for each choice; and over the readings in which they are run.

    Args:
        rule: What a choice reads: its own instruction ("pc", "ord"), a learned mixture of readings of one each ("mix"),
            or the sum of what all say ("sum").
        config: Task and blocks.
        maps: `ord` may read any instruction at any step, as often as it likes, in place of each once.
        tied: One table for all places in the program.
        given: The table is the primitive's own block, and stays.
        spread: Deviation of the scores at the start.
        by_program: Once exploration is over, `routes` says the path of every program.
    """

    def __init__(
        self,
        rule: Rule,
        config: ToyConfig,
        maps: bool = False,
        tied: bool = False,
        given: bool = False,
        spread: float = 0.1,
        by_program: bool = False,
    ):
        super().__init__()
        steps, shape = config.steps, (len(config.primitives), config.num_blocks)
        self.rule, self.config = rule, config
        lead = (steps, steps) if rule in ("mix", "sum") else (1,) if tied else (steps,)
        self.score = nn.Parameter(spread * torch.randn(*lead, *shape))
        if given:
            with torch.no_grad():
                self.score.copy_(_SURE * F.one_hot(torch.arange(shape[0]), shape[1]))
        orders = [tuple(range(steps))]
        if rule == "ord":
            orders = list(itertools.product(range(steps), repeat=steps) if maps else itertools.permutations(orders[0]))
        self.register_buffer("orders", torch.tensor(orders))
        every = (shape[0] ** steps, steps)
        self.register_buffer("routes", torch.full(every, -1) if by_program else None)
        self.reading = nn.Parameter(torch.zeros((steps, steps) if rule == "mix" else len(orders)))

    orders: Int[Tensor, "O S"]
    """Which choice each step of the path runs."""
    routes: Int[Tensor, "Q S"] | None
    """Of every program in the order of `Task.programs`; -1 until they are set."""

    def forward(self, program: Int[Tensor, "B S"]) -> Float[Tensor, "B S L"]:
        """The probability of each block for each choice: of an instruction (`ord`), or of a step."""
        instruction = torch.arange(program.shape[1])
        if self.rule in ("pc", "ord"):
            place = instruction if len(self.score) > 1 else torch.zeros_like(instruction)
            return self.score[place, program].softmax(-1)
        of_instruction = self.score[:, instruction, program]
        if self.rule == "sum":
            return of_instruction.sum(2).softmax(-1).transpose(0, 1)
        return torch.einsum("lj,lbjm->blm", doubly_stochastic(self.reading), of_instruction.softmax(-1))

    def order_shares(self) -> Float[Tensor, "O"]:
        """The probability of each order; one where there is only one."""
        return torch.ones(1) if self.rule == "mix" else self.reading.softmax(-1)

    def readings(self, length: int) -> Int[Tensor, "O S"]:
        """The orders for programs of this length; other lengths than the task's are read from first to last."""
        return self.orders if length == self.orders.shape[1] else torch.arange(length)[None]

    @torch.no_grad()
    def path(self, program: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        """The most probable block of each step, or what `routes` says."""
        if self.routes is not None and self.routes[0, 0] >= 0:
            return self.routes[number_of(self.config, program)]
        return self(program).argmax(-1)[:, self.readings(program.shape[1])[self.order_shares().argmax()]]

    @torch.no_grad()
    def path_of_any_length(self, program: Int[Tensor, "B K"]) -> Int[Tensor, "B K"] | None:
        """The block that the tables of all places give to each instruction together; `None` if not read in order."""
        own = torch.arange(self.orders.shape[1])
        if self.rule == "sum" or not torch.equal(self.most_read(), own):
            return None
        table = self.score.softmax(-1)
        if self.rule == "mix":
            table = table[own, own]
        return table.mean(0).argmax(-1)[program]

    @torch.no_grad()
    def most_read(self) -> Int[Tensor, "S"]:
        """The instruction that each step reads most."""
        if self.rule == "mix":
            return doubly_stochastic(self.reading).argmax(-1)
        return self.orders[self.order_shares().argmax()]


def doubly_stochastic(logits: Float[Tensor, "S S"]) -> Float[Tensor, "S S"]:
    """Rows and columns that add up to 1, by turns. (Sinkhorn.)"""
    for _ in range(_SINKHORN_ROUNDS):
        logits = logits.log_softmax(1).log_softmax(0)
    return logits.log_softmax(1).exp()
