"""`lol toy discover`: routers that find the primitives, trained by what every other block would have cost.

Blocks see digits alone and update x ← E_b(x). A router reads one instruction per step of the path:

    pc    step l reads instruction l
    mix   step l reads a mixture of the instructions, which is learned (a doubly stochastic matrix)
    ord   one map from instruction to block, and a learned order in which the instructions are read

While exploring, one choice of each example is tried with every block, the others are drawn; the router is moved by the
exact gradient of its expected loss over that choice. Then the router is frozen at its most probable path and the blocks
are trained on. Programs held out for good are read by `score_held_out` and nowhere else; what is selected is selected
on others, held out of the trained ones. (The rules are this project's own.) Letters: B examples, S steps, P primitives,
L blocks, O orders, C tries of an example.
"""

import itertools
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import set_seed

from lol.data.order import generator_named
from lol.errors import UserError
from lol.experiments.toy.config import ToyConfig
from lol.experiments.toy.model import ToyModel
from lol.experiments.toy.task import NUM_DIGITS, Program, split_programs
from lol.experiments.toy.train import NUM_EXAMPLES, Examples, describe, draw

Rule = Literal["pc", "mix", "ord"]
_SINKHORN_ROUNDS = 8
_HISTORY_EVERY = 100


@dataclass(frozen=True)
class DiscoverConfig:
    """A discovery but for its seed. The defaults are those of `ord`."""

    rule: Rule = "ord"
    toy: ToyConfig = field(default_factory=lambda: ToyConfig(routing="by primitive", blind=True))
    """Task, split, blocks and their optimizer; the path is the rule's."""
    num_validation: int = 8
    """Trained programs that are held out for selection."""
    explore_steps: int = 1600
    settle_steps: int = 1400
    """Steps with the router frozen."""
    tries: int = 256
    """Passes of an exploring step: examples times what is tried of each."""
    entropy: float = 0.3
    """Coefficient of the entropy of the choices at the start."""
    entropy_until: float = 0.5
    """Share of exploration at which it is 0."""
    balance: float = 0.3
    """Coefficient of the entropy of a batch's mean choice."""
    order_from: float = 0.4
    """Share of exploration from which the order is learned: before, the loss says nothing of it."""
    order_every: int = 3
    """From then on, each so many steps all orders are tried in place of all blocks."""
    router_learning_rate: float = 1e-2
    reading_learning_rate: float = 3e-2
    """Of the order, or of the mixture of instructions."""

    def __post_init__(self) -> None:
        if self.toy.router_training != "top-1" or self.toy.routing != "by primitive":
            raise UserError("a discovery brings its own router: leave toy.routing and toy.router_training alone")


RULES: dict[str, DiscoverConfig] = {
    "pc": DiscoverConfig("pc", explore_steps=1500, settle_steps=1500, entropy_until=0.7),
    "mix": DiscoverConfig("mix", explore_steps=1500, settle_steps=1500, entropy_until=0.7),
    "ord": DiscoverConfig("ord"),
}


class InstructionRouter(nn.Module):
    """Instructions → a distribution over the blocks for each choice; and over the orders in which they are run."""

    def __init__(self, rule: Rule, config: ToyConfig):
        super().__init__()
        steps, shape = config.steps, (len(config.primitives), config.num_blocks)
        self.rule = rule
        lead = (steps, steps) if rule == "mix" else (steps,)
        self.score = nn.Parameter(0.1 * torch.randn(*lead, *shape))
        orders = list(itertools.permutations(range(steps))) if rule == "ord" else [tuple(range(steps))]
        self.register_buffer("orders", torch.tensor(orders))
        self.reading = nn.Parameter(torch.zeros((steps, steps) if rule == "mix" else len(orders)))

    orders: Int[Tensor, "O S"]
    """Which choice each step of the path runs."""

    def forward(self, program: Int[Tensor, "B S"]) -> Float[Tensor, "B S L"]:
        """The probability of each block for each choice: of an instruction (`ord`), or of a step."""
        instruction = torch.arange(program.shape[1])
        if self.rule != "mix":
            return self.score[instruction, program].softmax(-1)
        of_instruction = self.score[:, instruction, program].softmax(-1)
        return torch.einsum("lj,lbjm->blm", _doubly_stochastic(self.reading), of_instruction)

    def order_shares(self) -> Float[Tensor, "O"]:
        """The probability of each order; one where there is only one."""
        return torch.ones(1) if self.rule == "mix" else self.reading.softmax(-1)

    @torch.no_grad()
    def path(self, program: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        """The most probable block of each step."""
        return self(program).argmax(-1)[:, self.orders[self.order_shares().argmax()]]


def _doubly_stochastic(logits: Float[Tensor, "S S"]) -> Float[Tensor, "S S"]:
    """Rows and columns that add up to 1, by turns. (Sinkhorn.)"""
    for _ in range(_SINKHORN_ROUNDS):
        logits = logits.log_softmax(1).log_softmax(0)
    return logits.log_softmax(1).exp()


def selection_programs(config: DiscoverConfig) -> tuple[tuple[Program, ...], tuple[Program, ...]]:
    """The programs to train on and those to select on; none of the programs held out for good."""
    toy = config.toy
    known = split_programs(toy.task, toy.split, toy.split_number, toy.num_held_out).trained
    inner = split_programs(toy.task, toy.split, toy.split_number, config.num_validation, among=known)
    return inner.trained, inner.held_out


class Discovery:
    """Blocks and router in training; a function of configuration and seed."""

    def __init__(self, config: DiscoverConfig, seed: int):
        self.config, self.seed = config, seed
        self.trained, self.validation = selection_programs(config)
        set_seed(seed)
        self.model = ToyModel(config.toy)
        self.router = InstructionRouter(config.rule, config.toy)
        toy = config.toy
        self.blocks_optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=toy.learning_rate, weight_decay=toy.weight_decay, fused=True
        )
        self.router_optimizer = torch.optim.Adam([
            {"params": [self.router.score], "lr": config.router_learning_rate},
            {"params": [self.router.reading], "lr": config.reading_learning_rate},
        ], betas=(0.9, 0.99))  # fmt: skip
        self.generator = generator_named(f"toy discovery {seed}")
        self.step = 0
        self.history: list[dict[str, Any]] = []

    def train(self) -> None:
        """Explore, then settle."""
        for _ in range(self.config.explore_steps):
            if self.step % _HISTORY_EVERY == 0:
                self.remember()
            self.explore()
        self.remember()
        for _ in range(self.config.settle_steps):
            self.settle()

    def remember(self) -> None:
        """What the router would choose now, for the picture of the table that forms."""
        with torch.no_grad():
            scores = self.router.score.softmax(-1)
            reading = (
                self.router.order_shares() if self.config.rule != "mix" else _doubly_stochastic(self.router.reading)
            )
        self.history.append({"step": self.step, "scores": _rounded(scores), "reading": _rounded(reading)})

    def explore(self) -> None:
        """One step in which every block of one choice, or every order, is tried."""
        config, router = self.config, self.router
        done = self.step / config.explore_steps
        learns_order = config.rule == "ord" and done > config.order_from
        tries_orders = learns_order and self.step % config.order_every == 0
        tries = len(router.orders) if tries_orders else config.toy.num_blocks
        examples = draw(config.toy, self.trained, config.tries // tries, self.generator)
        probability, order_shares = router(examples.program), router.order_shares()
        drawn = _draw_rows(probability.detach().flatten(0, 1), self.generator).view(examples.program.shape)
        if tries_orders:
            paths = drawn[:, router.orders]
            share = order_shares.expand(len(drawn), -1)
        else:
            paths, share = self._try_blocks(drawn, probability, order_shares)
        loss = self._losses(examples, paths)
        entropy = config.entropy * max(0.0, 1 - done / config.entropy_until)
        order_entropy = config.entropy * max(0.0, 1 - 2 * max(0.0, done - config.order_from))
        router_loss = (
            (share * (NUM_DIGITS * loss.detach())).sum(-1).mean()
            - entropy * _entropy(probability).sum(-1).mean()
            - config.balance * _entropy(probability.mean(0)).sum()
            - order_entropy * _entropy(order_shares)
        )
        blocks_loss = (share.detach() * loss).sum(-1).mean()
        self._update_blocks(blocks_loss, min(1.0, (self.step + 1) / config.toy.warmup_steps))
        router_loss.backward()
        if config.rule == "ord" and not learns_order:
            router.reading.grad = None
        self.router_optimizer.step()
        self.router_optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _try_blocks(
        self, drawn: Int[Tensor, "B S"], probability: Float[Tensor, "B S L"], order_shares: Float[Tensor, "O"]
    ) -> tuple[Int[Tensor, "B C S"], Float[Tensor, "B C"]]:
        """Paths with each block at one choice of each example, and the router's probability of that block."""
        row, steps = torch.arange(len(drawn)), drawn.shape[1]
        choice = torch.randint(steps, row.shape, generator=self.generator)
        order = _draw_rows(order_shares.detach().expand(len(row), -1), self.generator)
        blocks = torch.arange(probability.shape[-1])
        tried = drawn[:, None].repeat(1, len(blocks), 1)
        tried[row[:, None], blocks, choice[:, None]] = blocks.expand(len(row), -1)
        paths = tried.gather(2, self.router.orders[order][:, None].expand_as(tried))
        return paths, probability[row, choice]

    def _losses(self, examples: Examples, paths: Int[Tensor, "B C S"]) -> Float[Tensor, "B C"]:
        """Mean cross-entropy of a digit on each path of each example."""
        batch, tries, _ = paths.shape
        digits, program, target = (
            part.repeat_interleave(tries, 0) for part in (examples.digits, examples.program, examples.target)
        )
        logits = self.model(digits, program, path=paths.flatten(0, 1)).logits
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return losses.view(batch, tries, -1).mean(-1)

    def settle(self) -> None:
        """One step of the blocks under the router's most probable paths."""
        toy = self.config.toy
        left = 1 - (self.step - self.config.explore_steps) / self.config.settle_steps
        examples = draw(toy, self.trained, toy.batch_size, self.generator)
        loss = self._losses(examples, self.router.path(examples.program)[:, None]).mean()
        cosine = 0.5 * (1 - torch.cos(torch.tensor(torch.pi * left)).item())
        self._update_blocks(loss, cosine)
        self.step += 1

    def _update_blocks(self, loss: Float[Tensor, ""], rate: float) -> None:
        toy = self.config.toy
        for group in self.blocks_optimizer.param_groups:
            group["lr"] = toy.learning_rate * rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), toy.clip_norm)
        self.blocks_optimizer.step()
        self.blocks_optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def measure(self, programs: tuple[Program, ...]) -> dict[str, Any]:
        """Accuracy and routing on fresh examples of these programs."""
        toy = self.config.toy
        examples = draw(toy, programs, NUM_EXAMPLES, generator_named(f"toy evaluation {self.seed}"))
        output = self.model(examples.digits, examples.program, path=self.router.path(examples.program))
        right = (output.logits.argmax(-1) == examples.target).all(-1)
        return describe(toy, programs, right, examples, output.experts)


def score_held_out(discovery: Discovery, log: list[str]) -> dict[str, Any]:
    """Read the programs held out for good, once training is over: nothing else does. The log says when.

    Raises:
        UserError: training is not over, or they were read before.
    """
    config = discovery.config
    last = config.explore_steps + config.settle_steps
    if discovery.step != last or log:
        raise UserError(f"held-out programs are scored once, after step {last}: this is step {discovery.step}, {log}")
    log.append(f"held-out programs read after step {discovery.step} of {last}")
    toy = config.toy
    split = split_programs(toy.task, toy.split, toy.split_number, toy.num_held_out)
    score = discovery.measure(split.held_out)
    functions = toy.task.functions
    known = {functions[program] for program in split.trained}
    by_program = score["by_program"]
    for name, seen in (("known_functions", True), ("new_functions", False)):
        own = [program for program in split.held_out if (functions[program] in known) == seen]
        values = [by_program["".join(map(str, program))] for program in own]
        score[name] = round(sum(values) / len(values), 2) if values else None
    return score


def discover(config: DiscoverConfig, seed: int) -> tuple[dict[str, Any], Discovery]:
    """Train, score, and return the record (JSON values, accuracies in percent) and what was trained."""
    began = time.process_time()
    discovery = Discovery(config, seed)
    discovery.train()
    discovery.model.eval()
    log: list[str] = []
    record: dict[str, Any] = {
        "config": asdict(config),
        "seed": seed,
        "torch": torch.__version__,
        "trained": discovery.measure(discovery.trained),
        "validation": discovery.measure(discovery.validation),
    }
    record |= {
        "held_out": score_held_out(discovery, log),
        "held_out_log": log,
        "history": discovery.history,
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    return record, discovery


def _draw_rows(probability: Float[Tensor, "N M"], generator: torch.Generator) -> Int[Tensor, "N"]:
    return torch.multinomial(probability, 1, generator=generator).squeeze(1)


def _entropy(probability: Float[Tensor, "*rows M"]) -> Float[Tensor, "*rows"]:
    return -(probability * probability.clamp(min=1e-12).log()).sum(-1)


def _rounded(values: Tensor) -> Any:
    return values.double().round(decimals=3).tolist()
