"""One optimizer step: forward and backward passes over its micro-batches, clipping, the optimizer, the balance."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lol.data.order import generator_named
from lol.data.packing import Row
from lol.errors import UserError
from lol.model.lm import count_targets
from lol.train.balance import auxiliary_coefficient, batch_loss, document_losses, update_biases
from lol.train.config import TrainConfig
from lol.train.nonfinite import explain_non_finite
from lol.train.optim import learning_rate_at
from lol.train.parallel import autocast, clip_gradients, passes_on
from lol.train.peak_memory import peak_memory
from lol.train.session import Session


def draw_batches(session: Session, rows: Iterator[Row]) -> list[Row]:
    """The micro-batches of a step: all rows of all ranks, or of a run that shards by documents this rank's.

    Raises:
        UserError: the data, on this rank or, where each reads its own, on any.
    """
    number = session.config.accumulation
    if session.config.data.shard_by == "rows":
        return list(islice(rows, number))
    return session.world.together(lambda: list(islice(rows, number)))


def take_step(session: Session, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """One optimizer step over the micro-batches, as if they were one batch. Returns its record for the log.

    Every rank computes its own rows; what is counted and summed is that of all ranks.

    Args:
        session: The run, which is a step further then.
        batches: As `draw_batches` gives them.
    """
    config, model, plan, step = session.config, session.model, session.plan, session.step
    world, passes = session.world, len(batches) * session.world.size
    depth = plan.depth(step)
    learning_rate = learning_rate_at(step, plan.steps, config.optim)
    for group in session.optimizer.param_groups:
        group["lr"] = learning_rate
    batches, targets, documents = _own_rows(session, batches)
    loss, entropy = torch.zeros((), device=model.device), torch.zeros((), device=model.device)
    load = torch.zeros(depth, config.model.num_experts, dtype=torch.long, device=model.device)
    moe_load = None
    own = [{name: tensor.to(model.device) for name, tensor in batch.items()} for batch in batches]

    def run_pass(index: int) -> tuple[Any, Tensor]:
        return _forward(session, own[index], index, depth, targets, documents, passes)

    for index in range(len(batches)):
        with passes_on(session.module, last=index == len(batches) - 1):
            output, total = run_pass(index)
            total.backward()
        loss += output.loss.detach()
        load += output.routing.load
        if output.moe_routing is not None:
            moe_load = output.moe_routing.load if moe_load is None else moe_load + output.moe_routing.load
        entropy += _router_entropy(output) / passes
    # A column for each rank, zero but for its own: the sum is all of them, of which the highest is logged.
    memory = torch.zeros(2, world.size, dtype=torch.long, device=model.device)
    memory[:, world.rank] = torch.tensor(peak_memory(world.device))
    loss, load, entropy, memory, *moe_loads = world.add_up(
        loss, load, entropy, memory, *([] if moe_load is None else [moe_load])
    )
    moe_load = moe_loads[0] if moe_loads else None
    host_bytes, gpu_bytes = memory.amax(1).tolist()
    norm = clip_gradients(model.parameters(), config.optim.clip_norm or float("inf"))
    if not torch.isfinite(loss) or not torch.isfinite(norm):
        raise UserError(explain_non_finite(session, own, run_pass, loss.item(), norm.item()))
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=True)
    update_biases(model.model, load, moe_load, config.balance, step, plan.steps)
    session.step += 1
    session.tokens += config.tokens_per_step
    session.flops += plan.flops(step)
    record = {
        "event": "train",
        "step": session.step,
        "loss": loss.item(),
        "tokens": session.tokens,
        "flops": session.flops,
        "depth": depth,
        "learning_rate": learning_rate,
        "grad_norm": norm.item(),
        "load": load.tolist(),
        "router_entropy": entropy.item(),
        "peak_memory_bytes": host_bytes,
    } | ({"peak_gpu_memory_bytes": gpu_bytes} if gpu_bytes else {})
    return record if moe_load is None else record | {"moe_load": moe_load.tolist()}


def _own_rows(
    session: Session, batches: Sequence[Mapping[str, Tensor]]
) -> tuple[Sequence[Mapping[str, Tensor]], int, int]:
    """This rank's rows of the micro-batches; targets and documents of all ranks' rows."""
    world = session.world
    targets = sum(map(count_targets, batches))
    documents = sum(int((batch["position_ids"] == 0).sum()) for batch in batches)
    if session.config.data.shard_by == "rows":
        return [world.rows(batch) for batch in batches], targets, documents
    [counts] = world.add_up(torch.tensor([targets, documents], device=world.device))
    return batches, *counts.tolist()


def _forward(
    session: Session, own: Mapping[str, Tensor], index: int, depth: int, targets: int, documents: int, passes: int
) -> tuple[Any, Tensor]:
    """The forward pass of this rank's rows of a micro-batch: the output, and its share of the step's whole loss."""
    config = session.config
    with autocast(config.precision, session.world.device):
        output = session.module(
            **({"labels": own["input_ids"]} | dict(own)),
            num_depths=depth,
            backprop_depth=config.growth.backprop_depth,
            first_window_full_backprop=config.growth.first_window_full_backprop,
            generator=noise_generator(config.seed, session.step, index, session.world.rank),
            output_router_logits=True,
            num_items_in_batch=targets,
        )
        return output, output.loss + _balance_loss(output, config, documents, passes)


def _balance_loss(output: Any, config: TrainConfig, documents: int, passes: int) -> Tensor | float:
    """The auxiliary loss of a forward pass, its share of the step's; the global one is that of each pass by itself."""
    coefficient = auxiliary_coefficient(config.balance)
    if coefficient == 0 or not (output.router_logits or output.moe_router_logits):
        return 0.0
    if config.balance.strategy == "aux_loss":
        return coefficient * batch_loss(output, config.balance) / passes
    return coefficient * document_losses(output, config.balance).sum() / documents


@torch.no_grad()
def _router_entropy(output: Any) -> Tensor | float:
    """Mean entropy in nats of the router's distribution over the windows."""
    if not output.router_logits:
        return 0.0
    logits = torch.stack(output.router_logits, dim=1)[output.routing.experts >= 0]
    log_probability = logits.log_softmax(-1)
    return -(log_probability.exp() * log_probability).sum(-1).mean()


def noise_generator(seed: int, step: int, batch: int, rank: int) -> torch.Generator:
    """The router's noise is a function of the seed and the place in the run, so a resumed run draws the same."""
    place = f"router noise {seed} {step} {batch}" + (f" {rank}" if rank else "")
    return generator_named(place)
