"""Checkpoints: written whole or not at all, checked before use, loaded without pickle.

    RUN/checkpoints/step-00000100/   a transformers folder: config.json, model.safetensors, the tokenizer's files, and
        optimizer.safetensors        the optimizer's state tensors, "{parameter}.{key}"
        training.json                step, the optimizer's groups, the trainer's state (state.py)
        training.safetensors         that state's tensors
        complete.json                size and SHA-256 of every other file; written last
        shards/                      where ranks hold slices, in place of model.safetensors and optimizer.safetensors: a
                                     file per rank, "weights.{name}" and "optimizer.{parameter}.{key}" (shards.py)

A checkpoint is written in ".partial-step-…", flushed to the disk, and renamed. A name "step-…" therefore always
belonged to a whole checkpoint; the sums find what happened to the files afterwards. One process at a time may save in a
run: run_folder.py's lock.
"""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lol.errors import UserError
from lol.train.parallel import World
from lol.train.restore import check_config, named_weights, restore_optimizer, restore_weights, split_optimizer
from lol.train.run_folder import CHECKPOINTS
from lol.train.shards import Saved, Shards, WholeFiles, file_sum, is_sliced, read_tensors, write_shards
from lol.train.state import decode_state, encode_state

MANIFEST = "complete.json"
_OPTIMIZER, _TRAINING, _TENSORS = "optimizer.safetensors", "training.json", "training.safetensors"
_SHARDS = "shards"
_WEIGHT, _MOMENT = "weights.", "optimizer."
_FORMAT = 1
_PARTIAL, _REPLACED = ".partial-", ".replaced-"
_NAME = re.compile(r"(?:\.replaced-)?step-(\d+)")
# The tokenizer, the configuration and the JSON beside the tensors: room for them when the disk is asked.
_SMALL_FILES = 16 * 2**20

_log = logging.getLogger(__name__)


def save_checkpoint(
    run: Path,
    step: int,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    keep: int,
    world: World | None = None,
) -> Path:
    """Write RUN/checkpoints/step-{step:08d} and return it; a kill at any moment leaves the previous one as the newest.

    step: optimizer steps done. state: everything else a resumed run needs, in what `state.encode_state` takes, of which
    rank 0's is written. keep: how many checkpoints up to this step stay, at least 1; older ones go after this one is on
    the disk.
    world: every rank must call this, and returns when the checkpoint is on the disk. Where ranks hold slices each
    writes its own; else rank 0 writes all.

    Raises UserError when the disk is full or cannot be written, on every rank; what was there before is untouched then.
    """
    if keep < 1:
        raise UserError(f"keep={keep} would delete the checkpoint just written; keep at least 1")
    world = world or World()
    folder = run / CHECKPOINTS
    final = folder / f"step-{step:08d}"
    partial = folder / f"{_PARTIAL}{final.name}"
    weights = named_weights(model)
    optimizer_tree, moments = split_optimizer(model, optimizer)
    # A tied weight counts once: it is written once.
    needed = _SMALL_FILES + sum(tensor.nbytes for tensor in [*_once(weights).values(), *moments.values()])

    def begin() -> None:
        with _clear_errors(final, run, needed):
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f"{_PARTIAL}*"):
                shutil.rmtree(leftover)
            if shutil.disk_usage(folder).free < needed:
                raise OSError("too little free space")
            partial.mkdir()

    def finish(sums: Mapping[str, Mapping[str, Any]]) -> None:
        tree, tensors = encode_state({"step": step, "optimizer": optimizer_tree, "state": dict(state)})
        with _clear_errors(final, run, needed):
            if sums:
                _save_config(model, partial)
            else:
                _save_whole(model, weights, moments, partial)
            tokenizer.save_pretrained(partial)
            save_file(tensors, partial / _TENSORS)
            (partial / _TRAINING).write_text(json.dumps({"format": _FORMAT, **tree}, allow_nan=False), encoding="utf-8")
            _seal(partial, sums)
            _put_in_place(partial, final)
        _delete_old(folder, step, keep)

    try:
        world.from_main(begin)
        sums: dict[str, dict[str, Any]] = {}
        if is_sliced(weights.values()):
            named = {f"{_WEIGHT}{name}": tensor for name, tensor in _once(weights).items()}
            named |= {f"{_MOMENT}{name}": tensor for name, tensor in moments.items()}
            with _clear_errors(final, run, needed):
                written = write_shards(partial / _SHARDS, named, world)
            sums = {f"{_SHARDS}/{name}": entry for name, entry in written.items()}
        world.from_main(lambda: finish(sums))
    finally:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def _save_whole(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], moments: Mapping[str, torch.Tensor], folder: Path
) -> None:
    with no_progress_bar():
        # As the state dict names them; transformers would rename some models' weights to an older format's names.
        model.save_pretrained(folder, state_dict=weights, save_original_format=False)
    # Dense copies: safetensors refuses tensors that share memory or lie transposed as their weight does.
    dense = {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in moments.items()
    }
    save_file(dense, folder / _OPTIMIZER)


def _save_config(model: PreTrainedModel, folder: Path) -> None:
    """What `save_pretrained` writes beside the weights."""
    model.config.dtype = model.dtype
    # `fully_shard` has put a class of its own before the model's.
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


@contextlib.contextmanager
def _clear_errors(final: Path, run: Path, needed: int) -> Iterator[None]:
    """Failed writes as `UserError` with the way out."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = f"the checkpoint {final} could not be written ({error}). It needs about {_megabytes(needed)}"
        with contextlib.suppress(OSError):
            reason += f" and {_megabytes(shutil.disk_usage(run).free)} are free"
        raise UserError(
            f"{reason}. Make room there, or move the run to a folder that can be written and --resume it; earlier "
            "checkpoints are untouched"
        ) from error


def _once(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tied weight under its first name only."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    return {name: tensor for name, tensor in weights.items() if first[id(tensor)] == name}


def newest_checkpoint(run: Path, warn: Callable[[str], None] = _log.warning) -> Path | None:
    """The newest whole checkpoint of a run, None without one. Every file is read and its sum compared.

    warn is called with one line for each newer checkpoint that is passed over, and names its damaged file.
    """
    for path in _checkpoints(run / CHECKPOINTS):
        problem = find_damage(path)
        if problem is None:
            return path
        warn(f"checkpoint {path} is damaged and is passed over: {problem}")
    return None


def checkpoint_step(path: Path) -> int:
    """Optimizer steps done in the checkpoint, from its folder's name. Raises UserError for a folder of another name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path} is not a checkpoint folder; give RUN/{CHECKPOINTS}/step-…")
    return int(match[1])


def load_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, world: World | None = None
) -> dict[str, Any]:
    """Put model and optimizer, in place, into the checkpoint's state bit for bit; return the trainer's state, equal.

    Names, shapes and dtypes of all weights, the configuration, and the optimizer's class and groups must be the same;
    how many ranks wrote it need not be. Every rank of `world` must call this. Tensors of the returned state are on the
    CPU.

    Raises UserError for a folder that is no checkpoint, a missing, truncated or altered file, and a model or optimizer
    that differs (each difference is named). Model and optimizer are unchanged then.
    """
    problem = (world or World()).from_main(lambda: find_damage(path))
    if problem is not None:
        raise UserError(
            f"checkpoint {path} cannot be used: {problem}. Use another one, or start again in another --run"
        )
    check_config(path, model)
    training = json.loads((path / _TRAINING).read_bytes())
    if training.get("format") != _FORMAT:
        raise UserError(
            f"{path} was written by a newer lol (format {training.get('format')}); update library-of-layers"
        )
    moments = Shards(path / _SHARDS, _MOMENT) if has_shards(path) else WholeFiles([path / _OPTIMIZER])
    # Copies: what is read are windows on the file, which a later save deletes.
    tensors = {name: tensor.clone() for name, tensor in read_tensors(path / _TENSORS).items()}
    training = decode_state({key: training[key] for key in ("optimizer", "state")}, tensors)
    apply_weights = restore_weights(path, model, saved_weights(path))
    apply_optimizer = restore_optimizer(path, model, optimizer, training["optimizer"], moments)
    apply_weights()
    apply_optimizer()
    return training["state"]


def has_shards(path: Path) -> bool:
    """Whether the checkpoint was written in slices. transformers cannot read such a folder."""
    return (path / _SHARDS).is_dir()


def saved_weights(path: Path) -> Saved:
    """The weights of a checkpoint, or of any folder of safetensors that transformers has written.

    Raises UserError for a file that cannot be read, and where there is none.
    """
    if has_shards(path):
        return Shards(path / _SHARDS, _WEIGHT)
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{path} holds no weights: save the model there with save_pretrained, as safetensors")
    return WholeFiles(files)


def _seal(folder: Path, sums: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write the manifest, last, and bring all to the disk. `sums`: the files that ranks have written and flushed."""
    listed = dict(sums or {})
    # safetensors makes its files private; the rest of the folder follows the umask.
    mode = (folder / _TRAINING).stat().st_mode & 0o777
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = file.relative_to(folder).as_posix()
        if name not in listed:
            file.chmod(mode)
            listed[name] = file_sum(file)
            _flush(file)
    # No newline at the end: a manifest cut anywhere is not JSON.
    (folder / MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": listed}, indent=1), encoding="utf-8")
    for path in (folder / MANIFEST, *(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
        _flush(path)


def _put_in_place(partial: Path, final: Path) -> None:
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        # A folder cannot be renamed onto a full one. Between the two renames the old one counts under its other name.
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _flush(final.parent)


def _delete_old(folder: Path, step: int, keep: int) -> None:
    upto = [path for path in _checkpoints(folder) if checkpoint_step(path) <= step]
    # By size alone: reading every old checkpoint at each save would be slow.
    whole = [path for path in upto if not path.name.startswith(_REPLACED) and find_damage(path, sums=False) is None]
    # A later step than this one is a damaged checkpoint that was passed over on resume, and would stay the newest.
    later = [path for path in _checkpoints(folder) if checkpoint_step(path) > step and find_damage(path) is not None]
    for path in [*(path for path in upto if path not in whole[:keep]), *later]:
        # Renamed first, so that a kill here leaves no half checkpoint under a checkpoint's name.
        doomed = folder / f"{_PARTIAL}{path.name.removeprefix('.')}"
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            _log.warning("the old checkpoint %s could not be deleted: %s", path, error)


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (checkpoint_step(path), not path.name.startswith(".")), reverse=True)


def find_damage(path: Path, sums: bool = True) -> str | None:
    """What is wrong with a checkpoint, naming the file; None when nothing is. Without sums, sizes only."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        listed = json.loads((path / MANIFEST).read_bytes())["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
    except FileNotFoundError:
        return f"it is no complete checkpoint, {MANIFEST} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    required = {_TRAINING, _TENSORS, "config.json"}
    if not any(name.startswith(f"{_SHARDS}/") for name in expected):
        required.add(_OPTIMIZER)
    for name in required - expected.keys():
        return f"{MANIFEST} does not list {name}"
    for name, (size, sha256) in expected.items():
        try:
            actual = (path / name).stat().st_size
            if actual != size:
                return f"{name} has {actual:,} bytes instead of {size:,}"
            if sums and file_sum(path / name)["sha256"] != sha256:
                return f"{name} was altered, its checksum differs"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar of its own while it saves or loads."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
