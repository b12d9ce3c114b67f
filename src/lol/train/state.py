"""Training state as JSON and tensors, and back exactly; the state of the random generators.

A checkpoint must load without pickle, so everything beside the weights goes through `encode_state`: a tree of plain
Python values becomes JSON, its tensor leaves go to a safetensors file. What JSON has no word for is an object with one
key that starts with "$":

    {"$tuple": [...]}   {"$dict": [[key, value], ...]}   {"$float": "7ff8000000000000"}   {"$bytes": base64}
    {"$tensor": name}   {"$array": [dtype, shape, base64]}   {"$scalar": [dtype, base64]}
"""

import base64
import random
import struct
import sys
from typing import Any

import torch

JSON = Any
"""What `json.dumps(..., allow_nan=False)` takes."""


def encode_state(value: Any) -> tuple[JSON, dict[str, torch.Tensor]]:
    """Split a tree into JSON and the tensors it names; `decode_state` puts it together again, equal in value and type.

    The tree holds dict (any key that is itself encodable and hashable), list, tuple, int, float (bit-exact, infinities
    and NaN payloads too), str, bytes, bool, None, dense torch tensors, numpy arrays and numpy scalars. Subclasses of
    these are refused, for they would come back as another type. The tensors are copies on the CPU without gradient.

    Raises TypeError that names the place in the tree for anything else. (Format: decided here.)
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(value, "", tensors), tensors


def decode_state(tree: JSON, tensors: dict[str, torch.Tensor]) -> Any:
    """Inverse of `encode_state`. Raises KeyError when a named tensor is missing, ValueError for an unknown tag."""
    if isinstance(tree, list):
        return [decode_state(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {key: decode_state(item, tensors) for key, item in tree.items()}
    body = tree[tag]
    if tag == "$tuple":
        return tuple(decode_state(item, tensors) for item in body)
    if tag == "$dict":
        return {decode_state(key, tensors): decode_state(item, tensors) for key, item in body}
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(body))[0]
    if tag == "$bytes":
        return base64.b64decode(body)
    if tag == "$tensor":
        return tensors[body]
    if tag == "$array":
        import numpy

        dtype, shape, data = body
        return numpy.ndarray(shape, dtype, base64.b64decode(data)).copy()
    if tag == "$scalar":
        import numpy

        dtype, data = body
        return numpy.ndarray((), dtype, base64.b64decode(data))[()]
    raise ValueError(f"unknown tag {tag!r} in the saved training state; it was written by a newer version of lol")


def _encode(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> JSON:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        # repr of a finite float is exact; JSON has no infinity and no NaN, and a NaN carries 52 bits of its own.
        if value - value == 0:
            return value
        return {"$float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [_encode(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_encode(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{place}/{key}", tensors) for key, item in value.items()}
        return {
            "$dict": [
                [_encode(key, f"{place}/key", tensors), _encode(item, f"{place}/{key}", tensors)]
                for key, item in value.items()
            ]
        }
    if kind is torch.Tensor:
        return _encode_tensor(value, place, tensors)
    encoded = _encode_numpy(value)
    if encoded is None:
        raise TypeError(
            f"the training state holds a {kind.__module__}.{kind.__qualname__} at {place or '/'}, "
            "which has no exact form on disk"
        )
    return encoded


def _encode_tensor(value: torch.Tensor, place: str, tensors: dict[str, torch.Tensor]) -> JSON:
    if value.layout != torch.strided or value.is_quantized or value.dtype in (torch.complex32, torch.complex128):
        raise TypeError(
            f"the training state holds a {value.layout} tensor of {value.dtype} at {place or '/'}; "
            "safetensors has no such type"
        )
    # The number keeps two places apart whose keys print alike; the copy is there because safetensors refuses tensors
    # that share memory.
    name = f"{len(tensors)}:{place.lstrip('/')}"
    dense = value.detach().resolve_conj().resolve_neg()
    tensors[name] = dense.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {"$tensor": name}


def _encode_numpy(value: Any) -> JSON | None:
    # A value of numpy's can only exist where numpy is imported, so the package itself need not import it.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic) or value.dtype.kind not in "biufc":
        return None
    data = base64.b64encode(value.tobytes()).decode()
    if type(value) is numpy.ndarray:
        return {"$array": [value.dtype.str, list(value.shape), data]}
    if isinstance(value, numpy.generic):
        return {"$scalar": [value.dtype.str, data]}
    return None


def rng_state() -> dict[str, Any]:
    """State of the global generators: Python's, torch's on the CPU, numpy's if imported, CUDA's if in use.

    Goes through `encode_state` unchanged. Generators that somebody made for themselves (the loader's, a step's own)
    are not in it. (Decided here.)
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    # Asking for the state would start CUDA and take memory on a machine whose GPU this run does not use.
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the global generators where `rng_state` found them. CUDA devices that this machine lacks are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    for device, device_state in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)
