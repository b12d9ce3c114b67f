"""`lol toy discover`: routers that find the primitives, trained by what every other block would have cost.

Blocks see digits alone and update x ← E_b(x). A router reads one instruction per step of the path (`instruction.py`):

    pc    step l reads instruction l
    mix   step l reads a mixture of the instructions, which is learned (a doubly stochastic matrix)
    ord   one map from instruction to block, and a learned order in which the instructions are read
    sum   the control: step l reads all instructions, and adds up what they say

While exploring, one choice of each example is tried with every block, the others are drawn; the router is moved by the
exact gradient of its expected loss over that choice. Then the router is frozen at its most probable path and the blocks
are trained on. Programs held out for good are read by `score_held_out` and nowhere else; what is selected is selected
on others, held out of the trained ones. (The rules are this project's own.) Letters: B examples, S steps, P primitives,
L blocks, O orders, C tries of an example.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import set_seed

from lol.data.order import generator_named
from lol.errors import UserError
from lol.experiments.toy.config import WRITTEN, Between
from lol.experiments.toy.discovery.config import DiscoverConfig, programs_of_length, selection_programs
from lol.experiments.toy.discovery.crossfit import RepairConfig, repair_routes
from lol.experiments.toy.discovery.instruction import InstructionRouter, doubly_stochastic
from lol.experiments.toy.model import ToyModel
from lol.experiments.toy.records import split_by_function, written
from lol.experiments.toy.task import BASE, NUM_DIGITS, Program, split_programs
from lol.experiments.toy.train import NUM_EXAMPLES, Examples, describe, draw, percent, shown

_HISTORY_EVERY = 100
_PATHS_TRIED = 4


@dataclass(frozen=True)
class Tries:
    """Paths of some examples, and what the router has to do with them."""

    paths: Int[Tensor, "B C S"]
    share: Float[Tensor, "B C"]
    """How much each path counts in the blocks' loss; adds up to 1."""
    reward: Float[Tensor, "B C"]
    """What the router is to raise where the loss is low: probabilities, or logarithms of them."""
    weight: Float[Tensor, "B C S"] | None = None
    """Of the update of each step, where that is how the router is credited."""


class Discovery:
    """Blocks and router in training; a function of configuration and seed."""

    def __init__(self, config: DiscoverConfig, seed: int):
        self.config, self.seed = config, seed
        self.trained, self.validation = selection_programs(config)
        set_seed(seed)
        self.model = ToyModel(config.toy)
        toy = config.toy
        self.router = InstructionRouter(
            config.rule, toy, config.readings == "maps", config.tied, given=config.table == "given",
            spread=config.first_spread, by_program=config.repair is not None,
        )  # fmt: skip
        self.programs = {toy.steps: self.trained}
        for length in set(config.lengths) - {toy.steps}:
            self.programs[length] = programs_of_length(config, length)
        self.blocks_optimizer = self._new_blocks_optimizer()
        self.router_optimizer = torch.optim.Adam([
            {"params": [self.router.score], "lr": config.router_learning_rate},
            {"params": [self.router.reading], "lr": config.reading_learning_rate},
        ], betas=(0.9, 0.99))  # fmt: skip
        self.generator = generator_named(f"toy discovery {seed}")
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.repairs: list[dict[str, Any]] = []

    def train(self) -> None:
        """Explore, then settle."""
        for _ in shown(self.config.explore_steps, "exploring"):
            if self.step % _HISTORY_EVERY == 0:
                self.remember()
            self.explore()
        self.remember()
        if self.config.repair is not None:
            self.repair(self.config.repair)
        for _ in shown(self.config.settle_steps, "settling"):
            self.settle()

    def repair(self, how: RepairConfig) -> None:
        """Better paths than the router's, and blocks that know nothing yet."""
        toy = self.config.toy
        routes = self.router.path(torch.tensor(toy.task.programs))
        self.router.routes, self.repairs = repair_routes(toy, how, self.trained, routes, self.seed)
        set_seed(self.seed)
        self.model = ToyModel(toy)
        self.blocks_optimizer = self._new_blocks_optimizer()

    def _new_blocks_optimizer(self) -> torch.optim.Optimizer:
        toy = self.config.toy
        return torch.optim.AdamW(
            self.model.parameters(), lr=toy.learning_rate, weight_decay=toy.weight_decay, fused=True
        )

    def remember(self) -> None:
        """What the router would choose now, for the picture of the table that forms."""
        with torch.no_grad():
            scores = self.router.score.softmax(-1)
            reading = (
                self.router.order_shares() if self.config.rule != "mix" else doubly_stochastic(self.router.reading)
            )
        self.history.append({"step": self.step, "scores": _rounded(scores), "reading": _rounded(reading)})

    def explore(self) -> None:
        """One step in which every block of one choice, or every order, is tried."""
        config, router = self.config, self.router
        done = self.step / config.explore_steps
        learns_order = config.rule == "ord" and done > config.order_from
        tries_orders = learns_order and self.step % config.order_every == 0 and config.credit != "whole path"
        examples = self._draw(config.tries // self._number_of_tries(tries_orders))
        probability, order_shares = router(examples.program), router.order_shares()
        tries = self._try(tries_orders, probability, order_shares, learns_order)
        between = config.toy.between if config.between_from == "exploring" else "nothing"
        loss = self._losses(examples, tries.paths, between, tries.weight)
        cost = NUM_DIGITS * loss.detach()
        if config.credit == "whole path":
            cost = (cost - cost.mean(-1, keepdim=True)) / (_PATHS_TRIED - 1)
        entropy = config.entropy * max(0.0, 1 - done / config.entropy_until)
        order_entropy = config.entropy * max(0.0, 1 - 2 * max(0.0, done - config.order_from))
        router_loss = (
            (tries.reward * cost).sum(-1).mean()
            - entropy * _entropy(probability).sum(-1).mean()
            - config.balance * _entropy(probability.mean(0)).sum()
            - order_entropy * _entropy(order_shares)
        )
        if config.path_balance:
            router_loss = router_loss - config.path_balance * _entropy(_path_shares(probability).mean(0))
        blocks_loss = (tries.share * loss).sum(-1).mean()
        self._update_blocks(blocks_loss + router_loss, min(1.0, (self.step + 1) / config.toy.warmup_steps))
        if config.rule == "ord" and not learns_order:
            router.reading.grad = None
        self.router_optimizer.step()
        self.router_optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _number_of_tries(self, tries_orders: bool) -> int:
        if tries_orders:
            return len(self.router.orders)
        return {"every block": self.config.toy.num_blocks, "whole path": _PATHS_TRIED, "weight": 1}[self.config.credit]

    def _draw(self, count: int) -> Examples:
        """Examples of trained programs, all of one length."""
        programs, lengths = self.trained, self.config.lengths
        if lengths:
            which = torch.randint(len(lengths), (), generator=self.generator)
            programs = self.programs[lengths[int(which)]]
        return draw(self.config.toy, programs, count, self.generator)

    def _try(
        self, tries_orders: bool, probability: Float[Tensor, "B S L"], order_shares: Float[Tensor, "O"], ordered: bool
    ) -> Tries:
        """The paths of a step of exploration; `ordered` says whether the order is being learned."""
        batch, credit = len(probability), self.config.credit
        if credit == "whole path":
            return self._try_paths(probability, order_shares, ordered)
        if credit == "weight":
            top, drawn = probability.max(-1)
            # Its gradient in the units of the other credits: nats of all digits, where the loss is the mean of a digit.
            top = NUM_DIGITS * top - (NUM_DIGITS - 1) * top.detach()
        else:
            drawn, top = _draw_rows(probability.detach().flatten(0, 1), self.generator).view(batch, -1), None
        if tries_orders:
            share, orders = order_shares.expand(batch, -1), self.router.orders
            return Tries(drawn[:, orders], share.detach(), share, None if top is None else top[:, orders])
        if top is None:
            return self._try_blocks(drawn, probability, order_shares)
        order = self._draw_orders(order_shares, drawn)
        once = torch.ones(batch, 1)
        return Tries(drawn.gather(1, order)[:, None], once, 0 * once, top.gather(1, order)[:, None])

    def _try_blocks(
        self, drawn: Int[Tensor, "B S"], probability: Float[Tensor, "B S L"], order_shares: Float[Tensor, "O"]
    ) -> Tries:
        """Each block at one choice of each example, and the router's probability of that block."""
        row, steps = torch.arange(len(drawn)), drawn.shape[1]
        choice = torch.randint(steps, row.shape, generator=self.generator)
        order = self._draw_orders(order_shares, drawn)
        blocks = torch.arange(probability.shape[-1])
        tried = drawn[:, None].repeat(1, len(blocks), 1)
        tried[row[:, None], blocks, choice[:, None]] = blocks.expand(len(row), -1)
        share = probability[row, choice]
        return Tries(tried.gather(2, order[:, None].expand_as(tried)), share.detach(), share)

    def _try_paths(self, probability: Float[Tensor, "B S L"], order_shares: Float[Tensor, "O"], ordered: bool) -> Tries:
        """Some whole paths of each example, and the logarithm of the router's probability of each."""
        rows = probability.repeat_interleave(_PATHS_TRIED, 0)
        drawn = _draw_rows(rows.detach().flatten(0, 1), self.generator).view(rows.shape[:2])
        number = _draw_rows(order_shares.detach().expand(len(rows), -1), self.generator)
        chance = rows.gather(2, drawn[:, :, None]).squeeze(2).log().sum(-1)
        if ordered:
            chance = chance + order_shares.log()[number]
        paths = drawn.gather(1, self.router.readings(drawn.shape[1])[number])
        share = torch.full((len(probability), _PATHS_TRIED), 1 / _PATHS_TRIED)
        return Tries(paths.unflatten(0, (-1, _PATHS_TRIED)), share, chance.view_as(share))

    def _draw_orders(self, order_shares: Float[Tensor, "O"], drawn: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        number = _draw_rows(order_shares.detach().expand(len(drawn), -1), self.generator)
        return self.router.readings(drawn.shape[1])[number]

    def _losses(
        self,
        examples: Examples,
        paths: Int[Tensor, "B C S"],
        between: Between,
        weight: Float[Tensor, "B C S"] | None = None,
    ) -> Float[Tensor, "B C"]:
        """Mean cross-entropy of a digit on each path of each example."""
        batch, tries, _ = paths.shape
        if tries > 1 and weight is None and between in ("nothing", *WRITTEN):
            logits = self.model.try_paths(examples.digits, examples.program, paths, between).flatten(0, 1)
        else:
            # What is drawn between blocks is drawn for every path apart.
            digits, program = (part.repeat_interleave(tries, 0) for part in (examples.digits, examples.program))
            weight = None if weight is None else weight.flatten(0, 1)
            logits = self.model(
                digits, program, path=paths.flatten(0, 1), weight=weight, between=between, generator=self.generator
            ).logits
        target = examples.target.repeat_interleave(tries, 0)
        losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        return losses.view(batch, tries, -1).mean(-1)

    def settle(self) -> None:
        """One step of the blocks under the router's most probable paths."""
        toy = self.config.toy
        left = 1 - (self.step - self.config.explore_steps) / self.config.settle_steps
        examples = self._draw(toy.batch_size)
        loss = self._losses(examples, self.router.path(examples.program)[:, None], toy.between).mean()
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

    @torch.no_grad()
    def measure_length(self, length: int, between: Between | None = None) -> float | None:
        """Accuracy on random programs of a length, in percent; `None` where the router reads in another order."""
        toy, generator = self.config.toy, generator_named(f"toy evaluation {self.seed}")
        program = torch.randint(len(toy.primitives), (NUM_EXAMPLES, length), generator=generator)
        digits = torch.randint(BASE, (NUM_EXAMPLES, NUM_DIGITS), generator=generator)
        path = self.router.path_of_any_length(program)
        if path is None:
            return None
        logits = self.model(digits, program, path=path, between=between).logits
        return percent((logits.argmax(-1) == toy.task.run_each(digits, program)).all(-1))


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
    accuracies = split_by_function(toy.task, map(written, split.trained), score["by_program"])
    for kind in ("known", "new"):
        score[f"{kind}_functions"] = round(accuracies[kind], 2) if kind in accuracies else None
    if config.lengths_tested:
        lengths = config.lengths_tested
        score["lengths"] = {str(length): discovery.measure_length(length) for length in lengths}
        for between in WRITTEN:
            name = f"lengths_as_{between.replace(' ', '_')}"
            score[name] = {str(length): discovery.measure_length(length, between) for length in lengths}
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
        **({"repairs": discovery.repairs} if config.repair else {}),
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    return record, discovery


def _draw_rows(probability: Float[Tensor, "N M"], generator: torch.Generator) -> Int[Tensor, "N"]:
    return torch.multinomial(probability, 1, generator=generator).squeeze(1)


def _entropy(probability: Float[Tensor, "*rows M"]) -> Float[Tensor, "*rows"]:
    return -(probability * probability.clamp(min=1e-12).log()).sum(-1)


def _path_shares(probability: Float[Tensor, "B S L"]) -> Float[Tensor, "B paths"]:
    """The probability of each of the L^S paths."""
    shares = probability[:, 0]
    for step in range(1, probability.shape[1]):
        shares = (shares[:, :, None] * probability[:, step, None]).flatten(1)
    return shares


def _rounded(values: Tensor) -> Any:
    return values.double().round(decimals=3).tolist()
