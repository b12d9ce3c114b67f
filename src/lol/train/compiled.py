"""`--compile`: torch.compile for what of the model is the same computation in every step.

| part | |
|---|---|
| layers of prelude and coda | each as a whole, without a graph break; one compilation serves all of them |
| mixtures of experts | attention and norms of such layers; the experts' runs are as long as the tokens decide |
| routed depths | the norms' and the SwiGLU gate's elementwise work, for any number of tokens |
| router, dispatch, attention in windows, head | not at all: shapes follow the path, so each path would need its own |

Compiled is what is inside of a layer's `forward`: hooks, slices and activation checkpointing stay around it. A shape is
compiled by itself, once, so a resumed run computes it by the same kernels. (Decided here.)
"""

import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from lol.errors import UserError
from lol.model.layers import Block, rms_normalize, swiglu
from lol.model.lm import LoLForCausalLM
from lol.model.moe import MoEBlock

BACKEND = "inductor"


def compile_blocks(model: LoLForCausalLM) -> None:
    """Compile the model's blocks in place, at their first call; after `parallelize`.

    Raises:
        UserError: there is no C++ compiler, which torch.compile needs.
    """
    _check_compiler()
    body = model.model
    for layer in (*body.prelude, *body.coda):
        assert isinstance(layer, Block | MoEBlock)
        layer.compute = _compile(layer.compute, dynamic=False)
    body.dispatch.normalize = _compile(rms_normalize, dynamic=True)
    body.dispatch.gate = _compile(swiglu, dynamic=True)


def _compile(function: Callable[..., Any], dynamic: bool) -> Any:
    return torch.compile(function, backend=BACKEND, dynamic=dynamic)


def _check_compiler() -> None:
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"--compile needs a C++ compiler, and {compiler} is not to be found: install it (Debian: apt install g++), "
            "name another one in CXX, or leave --compile out"
        )
