"""Checkpoints: written whole or not at all, checked before use, loaded without pickle.

    RUN/checkpoints/step-00000100/   a transformers folder: config.json, model.safetensors, the tokenizer's files, and
        optimizer.safetensors        the optimizer's state tensors, "{parameter}.{key}"
        training.json                step, the optimizer's groups, the trainer's state (state.py)
        training.safetensors         that state's tensors
        complete.json                size and SHA-256 of every other file; written last

A checkpoint is written in ".partial-step-…", flushed to the disk, and renamed. A name "step-…" therefore always
belonged to a whole checkpoint; the sums find what happened to the files afterwards. One process at a time may save in a
run: run_folder.py's lock.
"""

import contextlib
import hashlib
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
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lol.errors import UserError
from lol.train.restore import check_config, restore_optimizer, restore_weights, split_optimizer, whole_weights
from lol.train.run_folder import CHECKPOINTS
from lol.train.state import decode_state, encode_state

MANIFEST = "complete.json"
_OPTIMIZER, _TRAINING, _TENSORS = "optimizer.safetensors", "training.json", "training.safetensors"
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
    writes: bool = True,
) -> Path:
    """Write RUN/checkpoints/step-{step:08d} and return it; a kill at any moment leaves the previous one as the newest.

    step: optimizer steps done. state: everything else a resumed run needs, in what `state.encode_state` takes.
    keep: how many checkpoints up to this step stay, at least 1; older ones go after this one is on the disk.
    writes: False on all ranks but one. Where ranks hold slices of the weights every rank must call this, for the folder
    holds them whole: it is the same whatever the number of ranks that write it or read it.

    Raises UserError when the disk is full or cannot be written; what was there before is untouched then.
    """
    if keep < 1:
        raise UserError(f"keep={keep} would delete the checkpoint just written; keep at least 1")
    folder = run / CHECKPOINTS
    final = folder / f"step-{step:08d}"
    partial = folder / f"{_PARTIAL}{final.name}"
    weights = whole_weights(model, keep=writes)
    optimizer_tree, optimizer_tensors = split_optimizer(model, optimizer, keep=writes)
    if not writes:
        return final
    tree, tensors = encode_state({"step": step, "optimizer": optimizer_tree, "state": dict(state)})
    needed = _SMALL_FILES + sum(
        tensor.nbytes for part in (weights, optimizer_tensors, tensors) for tensor in part.values()
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        if shutil.disk_usage(folder).free < needed:
            raise OSError("too little free space")
        partial.mkdir()
        with no_progress_bar():
            # As the state dict names them; transformers would rename some models' weights to an older format's names.
            model.save_pretrained(partial, state_dict=weights, save_original_format=False)
        tokenizer.save_pretrained(partial)
        save_file(optimizer_tensors, partial / _OPTIMIZER)
        save_file(tensors, partial / _TENSORS)
        (partial / _TRAINING).write_text(json.dumps({"format": _FORMAT, **tree}, allow_nan=False), encoding="utf-8")
        _seal(partial)
        _put_in_place(partial, final)
    except (OSError, SafetensorError) as error:
        reason = f"the checkpoint {final} could not be written ({error}). It needs about {_megabytes(needed)}"
        with contextlib.suppress(OSError):
            reason += f" and {_megabytes(shutil.disk_usage(run).free)} are free"
        raise UserError(
            f"{reason}. Make room there, or move the run to a folder that can be written and --resume it; earlier "
            "checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _delete_old(folder, step, keep)
    return final


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


def load_checkpoint(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put model and optimizer, in place, into the checkpoint's state bit for bit; return the trainer's state, equal.

    Names, shapes and dtypes of all weights, the configuration, and the optimizer's class and groups must be the same.
    Tensors of the returned state are on the CPU.

    Raises UserError for a folder that is no checkpoint, a missing, truncated or altered file, and a model or optimizer
    that differs (each difference is named). Model and optimizer are unchanged then.
    """
    problem = find_damage(path)
    if problem is not None:
        raise UserError(
            f"checkpoint {path} cannot be used: {problem}. Use another one, or start again in another --run"
        )
    check_config(path, model)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        weights |= _load_tensors(file)
    optimizer_tensors = _load_tensors(path / _OPTIMIZER)
    training = json.loads((path / _TRAINING).read_bytes())
    if training.get("format") != _FORMAT:
        raise UserError(
            f"{path} was written by a newer lol (format {training.get('format')}); update library-of-layers"
        )
    training = decode_state({key: training[key] for key in ("optimizer", "state")}, _load_tensors(path / _TENSORS))
    apply_weights = restore_weights(path, model, weights)
    apply_optimizer = restore_optimizer(path, model, optimizer, training["optimizer"], optimizer_tensors)
    apply_weights()
    apply_optimizer()
    return training["state"]


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        # Copies: the loaded tensors are windows on the file, which a later save deletes.
        return {name: tensor.clone() for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is truncated or no safetensors file ({error}); use another checkpoint") from error


def _seal(folder: Path) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    # safetensors makes its files private; the rest of the folder follows the umask.
    mode = (folder / _TRAINING).stat().st_mode & 0o777
    listed = {}
    for file in files:
        file.chmod(mode)
        listed[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
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
    for name in {_TRAINING, _TENSORS, _OPTIMIZER, "config.json"} - expected.keys():
        return f"{MANIFEST} does not list {name}"
    for name, (size, sha256) in expected.items():
        try:
            actual = (path / name).stat().st_size
            if actual != size:
                return f"{name} has {actual:,} bytes instead of {size:,}"
            if sums and _sha256(path / name) != sha256:
                return f"{name} was altered, its checksum differs"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
