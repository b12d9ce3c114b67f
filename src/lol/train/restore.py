"""What of a model and an optimizer goes into a checkpoint, and how it comes back: strictly, in place, bit for bit.

The two `restore_…` functions check everything and return a function that then cannot fail, so that a checkpoint that
fits only in part changes nothing.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lol.errors import UserError
from lol.train.parallel import spread_like, whole

# Written by transformers about the file, not about the architecture; the dtype is compared tensor by tensor.
_NOT_ARCHITECTURE = {"_name_or_path", "architectures", "auto_map", "dtype", "transformers_version"}
_SHOWN = 8


def check_config(path: Path, model: PreTrainedModel) -> None:
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
            if before.get(field) != now.get(field)
        ],
        "give the configuration it was saved with",
    )


def restore_weights(path: Path, model: PreTrainedModel, saved: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """Compare names, shapes and dtypes; return the function that copies `saved` into the model's own tensors.

    Raises UserError that names what differs. A tied weight has several names in the model and one in the file.
    """
    names_of: dict[int, list[str]] = {}
    own = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    differences = [f"{name} is in the checkpoint only" for name in saved if name not in own]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for names in names_of.values():
        present = [name for name in names if name in saved]
        if not present:
            differences.append(f"{names[0]} is in this model only")
        for name in present:
            if _kind(saved[name]) == _kind(own[name]):
                copies.append((own[name], saved[name]))
            else:
                differences.append(
                    f"{name} is {_kind(saved[name])} in the checkpoint, {_kind(own[name])} in this model"
                )
    _refuse(path, differences, "give the model that was saved")

    def apply() -> None:
        with torch.no_grad():
            for target, source in copies:
                target.copy_(spread_like(source, target))

    return apply


def whole_weights(model: PreTrainedModel, keep: bool = True) -> dict[str, torch.Tensor]:
    """The state dict, with whole tensors where ranks hold slices; every rank must call this.

    Without `keep` it is empty: this rank only gives its slices. Tied weights stay one tensor.
    """
    gathered: dict[int, torch.Tensor] = {}
    result = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            own = tensor.detach()
            full = whole(own)
            # What was gathered leaves the device at once; what was whole already need not be copied.
            gathered[id(tensor)] = full if full is own or not keep else full.cpu()
        if keep:
            result[name] = gathered[id(tensor)]
    return result


def split_optimizer(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, keep: bool = True
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The optimizer as a tree (class, groups with their parameters' names, values that are no tensors) and tensors.

    A tensor is named "{parameter}.{key}": `model.norm.weight.exp_avg`. Where ranks hold slices every rank must call
    this; without `keep` the tensors are left out, for this rank only gives its slices. Raises ValueError for a
    parameter that is not the model's.
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
                full = whole(value.detach())
                # Dense copies: safetensors refuses tensors that share memory or lie transposed as their weight does.
                if keep:
                    dense = full.to("cpu", copy=True, memory_format=torch.contiguous_format)
                    tensors[f"{name}.{key}"] = dense
            else:
                values[name][key] = value
    return {"class": type(optimizer).__name__, "groups": groups, "values": values}, tensors


def restore_optimizer(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tree: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
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
    for index, (saved, group) in enumerate(zip(tree["groups"], optimizer.param_groups, strict=False)):
        own = _group_names(group, name_of)
        if saved["params"] != own:
            odd = sorted(set(saved["params"]).symmetric_difference(own))
            differences.append(f"parameter group {index} differs in {odd[0] if odd else 'the order of its parameters'}")
    state_of = {name: dict(values) for name, values in tree["values"].items()}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition(".")
        state_of[name][key] = tensor
    differences += [f"the optimizer's {name} is not in this model" for name in state_of if name not in parameter_of]
    _refuse(path, differences, "give the optimizer settings it was saved with")

    def apply() -> None:
        for saved, group in zip(tree["groups"], optimizer.param_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        on_device = {p for group in optimizer.param_groups if _counts_on_device(group) for p in group["params"]}
        optimizer.state.clear()
        for name, values in state_of.items():
            parameter = parameter_of[name]
            optimizer.state[parameter] = {
                key: _placed(key, value, parameter, parameter in on_device) for key, value in values.items()
            }

    return apply


def _placed(key: str, value: Any, parameter: torch.Tensor, counts_on_device: bool) -> Any:
    # torch's own rule: moments lie beside their parameter, step counters on the CPU unless a kernel reads them.
    if not isinstance(value, torch.Tensor) or (key == "step" and not counts_on_device):
        return value
    return spread_like(value, parameter) if value.shape == parameter.shape else value.to(parameter.device)


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
