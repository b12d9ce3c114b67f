"""Open a trained model for use, to export or to start from: a run folder, a checkpoint, or any folder that transformers
has written."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lol.data.tokenizer import load_tokenizer
from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.train.checkpoint import (
    MANIFEST,
    find_damage,
    has_shards,
    newest_checkpoint,
    no_progress_bar,
    saved_weights,
)
from lol.train.restore import check_config, restore_weights
from lol.train.run_folder import CHECKPOINTS


def load_model(folder: Path) -> tuple[LoLForCausalLM, PreTrainedTokenizerFast]:
    """Load model and tokenizer, in eval mode. Of a run folder, the newest whole checkpoint.

    Raises:
        UserError: there is no model in the folder, it is of another architecture, or its weights are damaged.
    """
    path = find_model(folder)
    if has_shards(path):
        model = LoLForCausalLM(LoLConfig.from_pretrained(path, local_files_only=True))
        restore_weights(path, model, saved_weights(path))()
        return model.eval(), load_tokenizer(path)
    try:
        with no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"the weights in {path} cannot be loaded ({error}): use another checkpoint") from error
    model, report = loaded
    odd = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
    if odd:
        raise UserError(
            f"the weights in {path} do not fit its config.json, for example {odd[0]}: use another checkpoint"
        )
    return model.eval(), load_tokenizer(path)


def export_model(folder: Path, out: Path) -> None:
    """Write the model that `load_model` would load as a transformers folder: weights, configuration, tokenizer and the
    file that opens it with `trust_remote_code=True`; nothing of training.

    Raises:
        UserError: there is no such model, `out` exists, or it cannot be written; nothing is left of it then.
    """
    if out.exists():
        raise UserError(f"{out} exists already: name a new folder as --out")
    model, tokenizer = load_model(folder)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        with no_progress_bar():
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(out)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{out} could not be written ({error}): make room there, or name another --out") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def start_from(path: Path, model: LoLForCausalLM) -> None:
    """Copy the weights and biases of a model's folder into `model`, whatever their floating-point type.

    Raises:
        UserError: configuration or tensors differ, but for `max_position_embeddings`; each difference is named.
    """
    check_config(path, model, may_differ=("max_position_embeddings",))
    restore_weights(path, model, saved_weights(path), cast=True)()


def find_model(folder: Path) -> Path:
    """What `find_checkpoint` finds, if it holds a model of this package.

    Raises:
        UserError: it holds none, or what it holds is not as it was written.
    """
    path = find_checkpoint(folder)
    _check_model_type(folder, path)
    return path


def load_config(folder: Path) -> LoLConfig:
    """The configuration of the model that `load_model` would load, without its weights.

    Raises:
        UserError: there is no model in the folder, or it is of another architecture.
    """
    path = find_model(folder)
    return LoLConfig.from_pretrained(path, local_files_only=True)


def find_checkpoint(folder: Path) -> Path:
    """The folder itself, or the newest whole checkpoint if it is a run's.

    Raises:
        UserError: there is no such folder, or what it holds is not as it was written.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; train a model first: lol train --recipe demo --run {folder}"
        )
    if not (folder / CHECKPOINTS).is_dir():
        problem = find_damage(folder) if (folder / MANIFEST).exists() else None
        if problem is not None:
            raise UserError(
                f"checkpoint {folder} is damaged: {problem}. Use another one; if it was you who changed it, delete its "
                f"{MANIFEST}"
            )
        return folder
    newest = newest_checkpoint(folder, warn=partial(print, file=sys.stderr))
    if newest is None:
        raise UserError(f"{folder} holds no whole checkpoint: let the run write one, or restore one")
    return newest


def _check_model_type(folder: Path, path: Path) -> None:
    config_file = path / "config.json"
    try:
        config = json.loads(config_file.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} holds no model: give a run folder, a checkpoint or a transformers folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{config_file} cannot be read ({error}): give the folder of a model") from error
    if not isinstance(config, dict):
        raise UserError(f"{config_file} is not a JSON object: give the folder of a model")
    if config.get("model_type") != LoLConfig.model_type:
        raise UserError(
            f"{folder} holds a model of type {config.get('model_type')!r}: give one that was trained with lol "
            f"(model_type {LoLConfig.model_type!r})"
        )
