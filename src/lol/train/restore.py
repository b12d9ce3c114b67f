"""What of a model and an optimizer goes into a checkpoint, and how it comes back: strictly, in place, bit for bit.

The two `restore_…` functions check everything and return a function that then cannot fail, so that a checkpoint that
fits only in part changes nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lol.errors import UserError
from lol.train.shards import Saved

# Written by transformers about the file, not about the architecture; the dtype is compared tensor by tensor.
_NOT_ARCHITECTURE = {"_name_or_path", "architectures", "auto_map", "dtype", "transformers_version"}
_SHOWN = 8


def check_config(path: Path, model: PreTrainedModel, may_differ: Sequence[str] = ()) -> None:
    """Raise UserError unless the checkpoint's config.json is the model's, naming model_type or the differing fields."""
    saved = json.loads((path / "config.json").read_bytes())
    wanted = model.config.model_type
    if saved.get("model_type") != wanted:
        raise UserError(
            f"{path} holds a model of type {saved.get('model_type')!r}, this one is {wanted!r}; "
            "give the model that was saved"
        )
    before = _fields(type(model.config).from_dict(saved).to_dict())
    now = _fields(model.config.to_dict())
    _refuse(
        path,
        [
            f"{field} is {before.get(field, 'absent')} in the checkpoint, {now.get(field, 'absent')} in this model"
            for field in sorted(before.keys() | now.keys())
            if before.get(field) != now.get(field) and field not in may_differ
        ],
        "give the configuration it was saved with",
    )


def restore_weights(path: Path, model: PreTrainedModel, saved: Saved, cast: bool = False) -> Callable[[], None]:
    """Compare names, shapes and dtypes; return the function that copies `saved` into the model's own tensors.

    With `cast` floating-point types may differ. A tied weight has several names in the model and one in the file.
    Raises UserError that names what differs.
    """
    names_of: dict[int, list[str]] = {}
    own = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    kinds = saved.kinds
    differences = [f"{name} is in the checkpoint only" for name in kinds if name not in own]
    targets: dict[str, torch.Tensor] = {}
    for names in names_of.values():
        present = [name for name in names if name in kinds]
        if not present:
            differences.append(f"{names[0]} is in this model only")
        for name in present:
            kind = kinds[name]
            if cast and kind.is_floating_point() and own[name].is_floating_point():
                kind = kind.to("meta", own[name].dtype)
            if _kind(kind) == _kind(own[name]):
                targets[name] = own[name]
            else:
                differences.append(
                    f"{name} is {_kind(kinds[name])} in the checkpoint, {_kind(own[name])} in this model"
                )
    _refuse(path, differences, "give the model that was saved")
    return lambda: saved.fill(targets)


def named_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict without gradients, as this rank holds it; tied weights stay one tensor under several names."""
    detached: dict[int, torch.Tensor] = {}
    return {
        name: detached.setdefault(id(tensor), tensor.detach())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def split_optimizer(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The optimizer as a tree (class, groups with their parameters' names, values that are no tensors) and tensors.

    A tensor is named "{parameter}.{key}": `model.norm.weight.exp_avg`. They are the optimizer's own, as this rank holds
    them. Raises ValueError for a parameter that is not the model's.
    """
    name_of = _parameter_names(model)
    groups = [{**group, "params": _group_names(group, name_of)} for group in optimizer.param_groups]
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = name_of[parameter]
        values[name] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = value.detach()
            else:
                values[name][key] = value
    return {"class": type(optimizer).__name__, "groups": groups, "values": values}, tensors


def restore_optimizer(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tree: Mapping[str, Any],
    saved: Saved,
) -> Callable[[], None]:
    """Compare class and groups; return the function that sets the optimizer's state and the groups' hyperparameters.

    Not through `Optimizer.load_state_dict`, which casts the moments to their parameter's dtype: a float32 moment of a
    bfloat16 weight would lose bits. Raises UserError that names what differs.
    """
    name_of = _parameter_names(model)
    parameter_of = {name: parameter for parameter, name in name_of.items()}
    differences = []
    if tree["class"] != type(optimizer).__name__:
        differences.append(
            f"the optimizer is {tree['class']} in the checkpoint, {type(optimizer).__name__} in this run"
        )
    if len(tree["groups"]) != len(optimizer.param_groups):
        differences.append(
            f"{len(tree['groups'])} parameter groups in the checkpoint, {len(optimizer.param_groups)} here"
        )
    for index, (before, group) in enumerate(zip(tree["groups"], optimizer.param_groups, strict=False)):
        own = _group_names(group, name_of)
        if before["params"] != own:
            odd = sorted(set(before["params"]).symmetric_difference(own))
            differences.append(f"parameter group {index} differs in {odd[0] if odd else 'the order of its parameters'}")
    state_of = {name: dict(values) for name, values in tree["values"].items()}
    differences += [f"the optimizer's {name} is not in this model" for name in state_of if name not in parameter_of]
    _refuse(path, differences, "give the optimizer settings it was saved with")

    def apply() -> None:
        for before, group in zip(tree["groups"], optimizer.param_groups, strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})
        on_device = {p for group in optimizer.param_groups if _counts_on_device(group) for p in group["params"]}
        targets: dict[str, torch.Tensor] = {}
        for full, kind in saved.kinds.items():
            name, _, key = full.rpartition(".")
            parameter = parameter_of[name]
            targets[full] = state_of[name][key] = _place_for(key, kind, parameter, parameter in on_device)
        saved.fill(targets)
        optimizer.state.clear()
        optimizer.state.update({parameter_of[name]: values for name, values in state_of.items()})

    return apply


def _place_for(key: str, kind: torch.Tensor, parameter: torch.Tensor, counts_on_device: bool) -> torch.Tensor:
    """An empty tensor of that kind. torch's own rule: moments lie beside their parameter, in slices where it does; step
    counters on the CPU unless a kernel reads them."""
    if key == "step" and not counts_on_device:
        return torch.empty(kind.shape, dtype=kind.dtype)
    if kind.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=kind.dtype, requires_grad=False)
    return torch.empty(kind.shape, dtype=kind.dtype, device=parameter.device)


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _parameter_names(model: PreTrainedModel) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _group_names(group: Mapping[str, Any], name_of: Mapping[torch.Tensor, str]) -> list[str]:
    if any(parameter not in name_of for parameter in group["params"]):
        raise ValueError("the optimizer holds a parameter that is not the model's; a checkpoint cannot name it")
    return [name_of[parameter] for parameter in group["params"]]


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(config, default=str))
    return {key: value for key, value in plain.items() if key not in _NOT_ARCHITECTURE}


def _refuse(path: Path, differences: list[str], fix: str) -> None:
    if differences:
        shown = differences[:_SHOWN] + [f"… and {len(differences) - _SHOWN} more"] * (len(differences) > _SHOWN)
        raise UserError(f"{path} does not fit: " + "; ".join(shown) + f". To load it, {fix}")
