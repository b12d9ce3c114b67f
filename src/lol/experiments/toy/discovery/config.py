"""What decides a discovery but for its seed, the rules by name, and which programs it may see."""

from dataclasses import dataclass, field, replace
from typing import Literal

from lol.errors import UserError
from lol.experiments.toy.config import Between, ToyConfig
from lol.experiments.toy.discovery.crossfit import RepairConfig
from lol.experiments.toy.discovery.instruction import Rule
from lol.experiments.toy.task import Program, Task, split_programs

Credit = Literal["every block", "whole path", "weight"]


@dataclass(frozen=True)
class DiscoverConfig:
    """A discovery but for its seed. The defaults are those of `ord`."""

    rule: Rule = "ord"
    toy: ToyConfig = field(default_factory=lambda: ToyConfig(routing="by primitive", blind=True))
    """Task, split, blocks and their optimizer; the path is the rule's."""
    credit: Credit = "every block"
    """What moves the router: at one choice of each example what every block costs; what four paths of each example cost
    (REINFORCE, each against the mean of the others); or, as in the article, the gradient of the probability of the most
    probable block, which weighs its update. The order of `ord` is credited with what every order costs all the same,
    but for whole paths."""
    table: Literal["learned", "given"] = "learned"
    """Given: each primitive's own block from the start, under the order that the rule learns, if it does."""
    readings: Literal["orders", "maps"] = "orders"
    """Of `ord`: each instruction once, or any instruction at any step."""
    tied: bool = False
    """One table from primitive to block for all places in the program (`pc` and `ord`)."""
    lengths: tuple[int, ...] = ()
    """Lengths of the programs trained, one drawn for each step; without it the task's own (tied `pc` only)."""
    lengths_tested: tuple[int, ...] = ()
    """Lengths that are scored at the end besides: by the tables of all places together, read from first to last; with
    the state as it is, and written between the blocks as digits and as hard digits."""
    first_spread: float = 0.1
    """Deviation of the router's scores at the start."""
    path_balance: float = 0.0
    """Coefficient of the entropy of the mean distribution over whole paths (not of `ord`)."""
    repair: RepairConfig | None = None
    """Between exploring and settling: repair the paths (`crossfit.py`), and settle with a fresh library."""
    between_from: Literal["exploring", "settling"] = "exploring"
    """When what `toy.between` says of the state between blocks begins: with training, or once the router is frozen."""
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
        if (self.tied or self.table == "given") and self.rule not in ("pc", "ord"):
            raise UserError(f"tied and given tables are for pc and ord, not for {self.rule}")
        if (self.path_balance or self.repair) and self.rule == "ord":
            raise UserError("path_balance and repair are for rules that have one order: pc, mix, sum")
        if self.readings == "maps" and self.rule != "ord":
            raise UserError(f"readings=maps is for ord, not for {self.rule}")
        if self.between_from == "settling" and self.toy.between == "nothing":
            raise UserError("between_from=settling needs toy.between: what should happen between blocks from then on?")
        if self.lengths and not (self.tied and self.rule == "pc" and self.toy.steps in self.lengths):
            raise UserError("lengths need rule=pc, tied=True, and the task's own steps among them")


RULES: dict[str, DiscoverConfig] = {
    "pc": DiscoverConfig("pc", explore_steps=1500, settle_steps=1500, entropy_until=0.7),
    "mix": DiscoverConfig("mix", explore_steps=1500, settle_steps=1500, entropy_until=0.7),
    "ord": DiscoverConfig("ord"),
}


def digits_settling(config: DiscoverConfig, between: Between = "digits at random") -> DiscoverConfig:
    """The same, but the state is written as digits between blocks at random, once the router is frozen."""
    return replace(config, toy=replace(config.toy, between=between), between_from="settling")


def selection_programs(config: DiscoverConfig) -> tuple[tuple[Program, ...], tuple[Program, ...]]:
    """The programs to train on and those to select on; none of the programs held out for good."""
    toy = config.toy
    known = split_programs(toy.task, toy.split, toy.split_number, toy.num_held_out).trained
    inner = split_programs(toy.task, toy.split, toy.split_number, config.num_validation, among=known)
    return inner.trained, inner.held_out


def programs_of_length(config: DiscoverConfig, length: int) -> tuple[Program, ...]:
    """The programs of another length to train on: all, or on a split by function all that compute nothing held out."""
    toy = config.toy
    task = Task(toy.primitives, length)
    if toy.split == "programs":
        return task.programs
    known = set(selection_programs(config)[0])
    kept_apart = {toy.task.outcome(program) for program in toy.task.programs if program not in known}
    return tuple(program for program in task.programs if task.outcome(program) not in kept_apart)
