"""A toy run: a function of its configuration and seed, from the first weights to the record of what came out."""

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from rich.progress import track
from torch import Tensor
from transformers import set_seed

from lol.data.order import generator_named
from lol.experiments.toy.config import ToyConfig
from lol.experiments.toy.model import Mixture, ToyModel, ToyOutput
from lol.experiments.toy.records import written
from lol.experiments.toy.task import BASE, NUM_DIGITS, Program, Split, split_programs
from lol.paths.agreement import count_uses, depth_concentration, mode_path, purity, separation
from lol.train.balance import balance_by_document, update_bias
from lol.train.optim import learning_rate_at

NUM_EXAMPLES = 4096
"""Fresh examples of each accuracy. (Article.)"""
_LAST_TEMPERATURE = 0.1


@dataclass(frozen=True)
class Examples:
    """Digits, the program of each row, and what it makes of them."""

    digits: Int[Tensor, "B N"]
    program: Int[Tensor, "B S"]
    target: Int[Tensor, "B N"]


def draw(config: ToyConfig, programs: tuple[Program, ...], count: int, generator: torch.Generator) -> Examples:
    """Random digits under random programs of these."""
    digits = torch.randint(BASE, (count, NUM_DIGITS), generator=generator)
    which = torch.randint(len(programs), (count,), generator=generator)
    program = torch.tensor(programs)[which]
    return Examples(digits, program, config.task.run_each(digits, program))


def given_path(config: ToyConfig, program: Int[Tensor, "B S"]) -> Int[Tensor, "B S"] | None:
    """The blocks that the routing gives to programs; `None` where the router chooses."""
    step, primitives = torch.arange(config.steps), len(config.primitives)
    match config.routing:
        case "fixed":
            return (step % config.num_blocks).expand_as(program)
        case "by primitive":
            return program
        case "by step and primitive":
            return program + step * primitives
        case "relabelled per step":
            # The article says that the later steps' maps differ from the first's: here each step turns it by one.
            return (program + step) % primitives
        case "by program":
            number = (program * primitives ** step.flip(0)).sum(-1)
            generator = generator_named("toy: a path for every program")
            paths = torch.randint(config.num_blocks, (primitives**config.steps, config.steps), generator=generator)
            return paths[number]
        case _:
            return None


class Training:
    """A model, its optimizer and the draws that they see; one thread gives the same bits again."""

    def __init__(self, config: ToyConfig, seed: int):
        self.config = config
        self.split = split_programs(config.task, config.split, config.split_number, config.num_held_out)
        set_seed(seed)
        self.model = ToyModel(config)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.generator = generator_named(f"toy {seed}")
        self.step = 0

    def take_step(self) -> None:
        """Train on one batch."""
        config, model, step = self.config, self.model, self.step
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config.train_steps, config.optim)
        examples = draw(config, self.split.trained, config.batch_size, self.generator)
        output = forward_in_training(model, examples, step, self.generator)
        loss = F.cross_entropy(output.logits.transpose(1, 2), examples.target)
        if config.sequence_aux:
            loss = loss + config.sequence_aux * sequence_balance(output)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if model.router is not None and config.router_training == "top-1":
            load = F.one_hot(output.experts, config.num_blocks).sum(0)
            update_bias(model.expert_bias, load, config.balance, step, config.train_steps)
        self.step += 1


def train(config: ToyConfig, seed: int) -> tuple[ToyModel, Split]:
    """Train a model, and say which programs it saw."""
    training = Training(config, seed)
    for _ in shown(config.train_steps, "training"):
        training.take_step()
    return training.model.eval(), training.split


def shown(steps: int, what: str) -> Iterable[int]:
    """The numbers of the steps; on a terminal a bar says how many are done, and the time left."""
    return track(range(steps), what, transient=True, refresh_per_second=2, disable=not sys.stdout.isatty())


def forward_in_training(model: ToyModel, examples: Examples, step: int, generator: torch.Generator) -> ToyOutput:
    """The pass of a training step, with the router's noise. (Article, "Experiment 2".)"""
    config = model.toy
    path, noise, mixture = given_path(config, examples.program), None, None
    shape = (config.steps, len(examples.digits), config.num_blocks)
    if config.router_training == "gumbel":
        left = 1 - step / max(1, config.train_steps - 1)
        uniform = torch.rand(shape, generator=generator).clamp_(min=1e-20)
        mixture = Mixture(_LAST_TEMPERATURE + (1 - _LAST_TEMPERATURE) * left, -(-uniform.log()).log())
    elif path is None:
        noise = torch.randn(shape, generator=generator)
        mixture = Mixture() if config.router_training == "soft" else None
    return model(examples.digits, examples.program, path=path, noise=noise, mixture=mixture)


def sequence_balance(output: ToyOutput) -> Float[Tensor, ""]:
    """The library's sequence balance loss, each example a document and each step a window; the mean over examples."""
    probability = torch.stack(output.router_logits, dim=1).softmax(-1)
    counted = F.one_hot(output.experts, probability.shape[-1]).to(probability.dtype)
    example = torch.arange(len(counted)).repeat_interleave(counted.shape[1])
    return balance_by_document(probability.flatten(0, 1), counted.flatten(0, 1), example).mean()


@torch.no_grad()
def evaluate(model: ToyModel, programs: tuple[Program, ...], seed: int, **how: Any) -> tuple[Tensor, Examples, Tensor]:
    """Fresh examples of these programs: which come out with all digits right, the examples, the blocks that ran."""
    config = model.toy
    examples = draw(config, programs, NUM_EXAMPLES, generator_named(f"toy evaluation {seed}"))
    path = given_path(config, examples.program)
    forced = how.pop("mode", None)
    if forced is not None:
        path = forced[torch.arange(config.steps), examples.program]
    output = model(examples.digits, examples.program, path=path, **how)
    return (output.logits.argmax(-1) == examples.target).all(-1), examples, output.experts


def percent(right: Bool[Tensor, "N"]) -> float:
    """The share that is right."""
    return round(100 * right.float().mean().item(), 2)


def describe(
    config: ToyConfig,
    programs: tuple[Program, ...],
    right: Bool[Tensor, "B"],
    examples: Examples,
    experts: Int[Tensor, "B S"],
) -> dict[str, Any]:
    """What a record says of examples of these programs: accuracies, uses of the blocks, how they follow the program."""
    uses = count_uses(experts, examples.program, config.num_blocks, len(config.primitives))
    of_program = {program: (examples.program == torch.tensor(program)).all(-1) for program in programs}
    return {
        "accuracy": percent(right),
        "by_program": {written(program): percent(right[own]) for program, own in of_program.items()},
        "uses": uses.tolist(),
        "separation": separation(uses),
        "purity": purity(uses).tolist(),
        "depth_concentration": depth_concentration(uses),
    }


def run(config: ToyConfig, seed: int) -> tuple[dict[str, Any], ToyModel]:
    """Train, measure, and return the record (JSON values, accuracies in percent) and what was trained."""
    began = time.process_time()
    model, split = train(config, seed)
    record: dict[str, Any] = {"config": asdict(config), "seed": seed, "torch": torch.__version__}
    for side, programs in (("trained", split.trained), ("held_out", split.held_out)):
        right, examples, experts = evaluate(model, programs, seed)
        record[side] = describe(config, programs, right, examples, experts)
    if model.router is not None:
        mode = mode_path(torch.tensor(record["trained"]["uses"]))
        right, *_ = evaluate(model, split.held_out, seed, mode=mode)
        record["held_out"]["mode_path_accuracy"] = percent(right)
    if config.router_training != "top-1":
        mixture = Mixture(1.0 if config.router_training == "soft" else _LAST_TEMPERATURE)
        for side, programs in (("trained", split.trained), ("held_out", split.held_out)):
            right, *_ = evaluate(model, programs, seed, mixture=mixture)
            record[side]["soft_accuracy"] = percent(right)
    record["cpu_seconds"] = round(time.process_time() - began, 1)
    return record, model
