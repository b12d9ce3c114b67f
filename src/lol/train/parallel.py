"""One model on many processes: who takes part, how the weights are spread, and the sums over all of them.

The model is written for one process. `parallelize` spreads it with torch's own engines, and everything that a step adds
up is added up here: gradients are sums over ranks, never means, because the loss of each rank is already its share of
the mean over the targets of all ranks.

| mode | weights, gradients, moments | per forward and backward pass |
|---|---|---|
| ddp | whole on every rank | gradients are summed in buckets, in a step's last pass |
| fsdp2 | a slice on every rank | each unit is gathered, its gradient reduced to slices |
| hsdp | a slice on every rank of a node, nodes alike | the same inside a node, then a sum over nodes |

FSDP2's units: embedding, each prelude layer, the library, each coda layer, head (tied: one with the embedding), the
router of each mixture of experts; the rest (router, norm, depth embeddings, FiLM, injection) is the root's. The library
is called once per forward pass and stays gathered until its gradient is done: the number of collectives depends neither
on the depth nor on the path, and ranks whose windows choose different blocks cannot get out of step. (Decided here:
docs/architecture.md.)
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lol.errors import UserError
from lol.model.lm import LoLForCausalLM
from lol.model.moe import MoEBlock
from lol.train.config import Parallel, Precision


@dataclass(frozen=True)
class World:
    """The processes that train together, and this one's place among them. One process is a world of one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Processes on this machine."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def rows(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's rows of a batch: row i is that of rank i mod size."""
        return {name: tensor[self.rank :: self.size] for name, tensor in batch.items()}

    def add_up(self, *tensors: Tensor) -> list[Tensor]:
        """Each tensor summed over all ranks, by one collective. In float64, in which counts are exact to 2^53."""
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([tensor.detach().to(torch.float64).flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(own.shape).to(own.dtype) for part, own in zip(parts, tensors, strict=True)]

    def agree(self, own: str | None, choices: Sequence[str]) -> str | None:
        """The first of `choices` that some rank has as its `own`, on every rank; `None` if no rank has one."""
        if self.size == 1:
            return own
        [counts] = self.add_up(torch.tensor([own == choice for choice in choices], device=self.device).long())
        return next((choice for choice, count in zip(choices, counts.tolist(), strict=True) if count), None)

    def gather(self, own: Any) -> list[Any]:
        """What each rank has as its `own`, by rank, on every rank; any value that can be pickled."""
        if self.size == 1:
            return [own]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, own)
        return box

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, which alone calls it, on every rank; any value that can be pickled.

        Raises:
            UserError: `make` raised one; every rank does then.
        """
        if self.size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = make()
            except UserError as error:
                box[1] = str(error)
        dist.broadcast_object_list(box, src=0, device=self.device)
        if box[1] is not None:
            raise UserError(box[1])
        return box[0]


@contextmanager
def join_world(mode: Parallel) -> Iterator[World]:
    """The world that torchrun's environment describes, with its process group; without torchrun a world of one.

    A process group that is there already is used, and stays.

    Raises:
        UserError: torchrun started several processes, and `mode` does not say what to do with them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device=device)
        return
    rank, size, local_rank, local_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if mode == "none":
        if size > 1:
            raise UserError(f"{size} processes were started: say how they share, --parallel ddp, fsdp2 or hsdp")
        yield World(device=device)
        return
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} of this machine has no GPU of the {torch.cuda.device_count()}: start as many "
                "processes as there are GPUs (torchrun --nproc-per-node)"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(rank, size, local_rank, local_size, device)
    finally:
        if own_group:
            dist.destroy_process_group()


def parallelize(model: LoLForCausalLM, mode: Parallel, world: World, precision: Precision = "float32") -> nn.Module:
    """Spread the model over the world; the module to call for a training pass, whose gradients are summed over ranks.

    FSDP2 and HSDP change the model itself: its parameters become DTensors under the same names, so make the optimizer
    after this. Every rank must hold the same weights before.

    Args:
        model: On the world's device, in float32.
        mode: As the head of this file says; "none" and a world without process group change nothing.
        world: This process's.
        precision: With "bf16" the sharded modes gather weights in bfloat16 and reduce gradients in float32; master
            weights, the router and what else is the root's stay float32. The caller still runs under autocast.

    Raises:
        UserError: HSDP on a world that is not several machines with as many processes each.
    """
    if mode == "none" or not dist.is_initialized():
        return model
    if mode == "ddp":
        return _replicate(model)
    _shard(model, _mesh(mode, world), precision)
    return model


def _replicate(model: LoLForCausalLM) -> DistributedDataParallel:
    # Without noise, with truncated backprop or without router-only tokens some parameters have no gradient. The bias is
    # equal on all ranks because all move it by the same load.
    ddp = DistributedDataParallel(model, find_unused_parameters=True, forward_sync_buffers=False)
    # Looking for them makes DDP copy the logits, so that a caller may write into them; nobody here does.
    ddp._set_ddp_sink_clone(False)
    ddp.register_comm_hook(None, _sum_bucket)
    return ddp


def _sum_bucket(
    _state: None,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _mesh(mode: Parallel, world: World) -> DeviceMesh:
    kind = world.device.type
    if mode == "fsdp2":
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    if world.size % world.local_size:
        raise UserError(
            f"hsdp needs as many processes on every machine, not {world.size} in all and {world.local_size} here: use "
            "fsdp2, or start as many on each"
        )
    shape = (world.size // world.local_size, world.local_size)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def _shard(model: LoLForCausalLM, mesh: DeviceMesh, precision: Precision) -> None:
    body = model.model
    # Autocast decides what an operation's inputs become; the stream between the layers stays float32.
    plain = layer = ends = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision == "bf16":
        layer = replace(plain, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ends = replace(layer, output_dtype=torch.float32)
    if model.lm_head.weight is body.embed_tokens.weight:
        fully_shard([body.embed_tokens, model.lm_head], mesh=mesh, mp_policy=ends, reshard_after_forward=False)
    else:
        fully_shard(body.embed_tokens, mesh=mesh, mp_policy=ends, reshard_after_forward=False)
        fully_shard(model.lm_head, mesh=mesh, mp_policy=ends, reshard_after_forward=False)
    for block in (*body.prelude, *body.coda):
        if isinstance(block, MoEBlock):
            fully_shard(block.moe.router, mesh=mesh, mp_policy=plain)
        fully_shard(block, mesh=mesh, mp_policy=layer)
    # The shelf is views of the gathered weights: they must not be freed between the library's call and its gradient.
    if body.library is not None:
        fully_shard(body.library, mesh=mesh, mp_policy=layer, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=plain, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def passes_on(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """For one micro-batch's forward and backward pass. DDP sums gradients in a step's last one only; the sharded modes
    in each, for their whole gradients would take the memory that sharding is to save."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """What a forward pass of this precision runs under; routing, norms and attention on the CPU stay float32 in it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def release(model: nn.Module) -> None:
    """Give back what evaluation has gathered; a backward pass does that by itself."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Float[Tensor, ""]:
    """Scale the gradients so that the norm of all of them together is at most `limit`; returns the norm before.

    Where ranks hold slices, the norm is that of the whole gradient, by one collective.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    if not sharded:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    local = [gradient.to_local() for gradient in sharded]
    square = torch.nn.utils.get_total_norm(local).square()
    # Slices of one dimension of the mesh; along the other one they are copies.
    dist.all_reduce(square, group=sharded[0].device_mesh.get_group("shard"))
    norm = square.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in local:
        gradient.mul_(scale)
    return norm


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or what all ranks' slices make up: a collective, which every rank must take part in."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(tensor: Tensor, example: Tensor) -> Tensor:
    """This rank's slice of a tensor that every rank has whole, laid out as `example` is; no collective."""
    if not isinstance(example, DTensor):
        return tensor.to(example.device)
    tensor = tensor.to(example.to_local().device)
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)
