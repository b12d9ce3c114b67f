"""Tensors on the disk, whole or in slices, and how they come back into tensors that are whole or in slices themselves.

Whole tensors lie in safetensors files by name. Slices are written by torch's distributed checkpoint in its safetensors
form, a file per rank with the offsets of its slices in the header:

    FOLDER/shard-00001-model-00001-of-00001.safetensors     rank 0's slices, and what ranks have alike
    FOLDER/shard-00002-model-00001-of-00001.safetensors     rank 1's

That form and not torch's other one, whose index is pickled. No rank ever holds more than its slices, in writing or in
reading: a rank of another number of ranks reads what overlaps its own. (Decided here.)
"""

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lol.errors import UserError
from lol.train.parallel import World, spread_like


class WholeFiles:
    """The tensors of safetensors files.

    Raises:
        UserError: a file cannot be read.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.kinds: dict[str, Tensor] = {}
        """By name, tensors of the saved shapes and dtypes. They are windows on the files: only `fill` reads values."""
        for file in files:
            self.kinds |= read_tensors(file)

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the saved values into `targets`, each whole or this rank's slice; no collective."""
        for name, target in targets.items():
            target.copy_(spread_like(self.kinds[name], target))


class Shards:
    """Those tensors of a folder of slices whose names begin with `prefix`, by what follows it.

    Raises:
        UserError: a file cannot be read.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        try:
            saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        except (SafetensorError, OSError) as error:
            raise UserError(f"a file of {folder} is truncated or no safetensors file ({error})") from error
        self.kinds: dict[str, Tensor] = {
            name.removeprefix(prefix): torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")
            for name, kind in saved.items()
            if name.startswith(prefix) and isinstance(kind, TensorStorageMetadata)
        }
        """By name, tensors of the saved shapes and dtypes without values."""

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the saved values into `targets`, each whole or this rank's slice; no collective."""
        if not targets:
            return
        with warnings.catch_warnings():
            # Each rank reads by itself, for the files are known to be whole; torch warns of that on a single process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(
                {f"{self._prefix}{name}": target for name, target in targets.items()},
                storage_reader=HuggingFaceStorageReader(str(self._folder)),
                no_dist=True,
            )


Saved = WholeFiles | Shards


def is_sliced(tensors: Iterable[Tensor]) -> bool:
    """Whether ranks hold slices of any of the tensors."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def write_shards(folder: Path, tensors: Mapping[str, Tensor], world: World) -> dict[str, dict[str, Any]]:
    """Write each rank's slices into its own file, flushed to the disk; every rank must call this.

    Returns:
        On every rank, of all files by name in the folder: "bytes" and "sha256".

    Raises:
        OSError: on every rank, if one of them could not write; it names the ranks.
    """
    # safetensors wants rows one after another; a moment may lie as its weight lies.
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save(dense, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        failures = {rank: failure[0] for rank, failure in error.failures.items()}
        if not all(isinstance(failure, OSError) for failure in failures.values()):
            raise
        raise OSError("; ".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items()))) from error
    # Its own files: what others have written may reach this machine later.
    own = {file.name: file_sum(file) for file in folder.glob(f"shard-{world.rank + 1:05d}-*")}
    return {name: entry for sums in world.gather(own) for name, entry in sums.items()}


def file_sum(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file, as complete.json has them."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, as windows on it.

    Raises:
        UserError: the file is truncated or something else.
    """
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is truncated or no safetensors file ({error}); use another checkpoint") from error
