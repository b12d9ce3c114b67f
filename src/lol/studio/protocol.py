"""What the page asks, as types with bounds, and the answers that are not made in another file.

A field that is not known is an error: nothing is ignored silently.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lol.paths.saved import NAME, SavedPath
from lol.serve.protocol import Number
from lol.studio import limits
from lol.studio.models import Model
from lol.studio.runs import RunSummary

FORMS = {
    "path": "path must be null, a list with one block per depth, or a list per depth with one block per window (-1 "
    "leaves the router free)",
    "path_weight": "path_weight must be null (the router's own probability) or a number",
}


# A text of bounded length is counted, and half of a surrogate pair is then refused.
Text = Annotated[str, Field(max_length=limits.MAX_TEXT_CHARACTERS)]
Id = Annotated[str, Field(max_length=1000)]
_Row = Annotated[list[Number], Field(max_length=2 * limits.MAX_TEXT_TOKENS)]
_PerDepth = Annotated[list[Number], Field(min_length=1, max_length=limits.MAX_DEPTHS)]
Blocks = _PerDepth | Annotated[list[_Row], Field(min_length=1, max_length=limits.MAX_DEPTHS)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TraceRequest(_Strict):
    model: Id
    text: Text
    path: Blocks | None = None
    path_weight: Weight | None = None


class BranchRequest(_Strict):
    path: Blocks | None = None
    path_weight: Weight | None = None


class GenerateRequest(_Strict):
    model: Id
    text: Text
    branches: Annotated[list[BranchRequest], Field(min_length=1, max_length=limits.MAX_BRANCHES)]
    max_new_tokens: Annotated[int, Field(ge=1, le=limits.MAX_NEW_TOKENS)] = 48
    temperature: Annotated[float, Field(ge=0, le=100)] = 0
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = 50
    top_p: Annotated[float, Field(ge=0, le=1)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    top: Annotated[int, Field(ge=0, le=limits.MAX_TOP)] = 8


class LayoutRequest(_Strict):
    num_tokens: Annotated[int, Field(ge=1, le=limits.MAX_LAID_TOKENS)]
    window_size: Annotated[int, Field(ge=1, le=2**20)]
    window_stride: Annotated[int, Field(ge=0, le=2**20)]
    num_depths: Annotated[int, Field(ge=1, le=64)]
    token: Annotated[int, Field(ge=0)] | None = None


class DialRequest(_Strict):
    hidden_size: Annotated[int, Field(ge=2, le=65_536)]
    num_attention_heads: Annotated[int, Field(ge=1, le=1024)]
    num_prelude_layers: Annotated[int, Field(ge=0, le=256)]
    num_coda_layers: Annotated[int, Field(ge=0, le=256)]
    num_routed_depths: Annotated[int, Field(ge=1, le=64)]
    num_experts: Annotated[int, Field(ge=1, le=64)]
    window_size: Annotated[int, Field(ge=1, le=2**20)]
    window_stride: Annotated[int, Field(ge=0, le=2**20)]
    vocab_size: Annotated[int, Field(ge=1, le=10_000_000)]
    context: Annotated[int, Field(ge=1, le=2**20)]
    dtype: Literal["float32", "bfloat16"] = "float32"


class SavedPathRequest(_Strict):
    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    model: Id = ""
    path: Blocks
    path_weight: Weight | None = None
    note: Annotated[str, Field(max_length=limits.MAX_NOTE)] = ""


@dataclass(frozen=True)
class Limits:
    max_text_tokens: int = limits.MAX_TEXT_TOKENS
    max_new_tokens: int = limits.MAX_NEW_TOKENS
    queue: int = limits.QUEUE
    max_saved_paths: int = limits.MAX_SAVED_PATHS


@dataclass(frozen=True)
class About:
    version: str
    models: list[Model]
    """The first is the default."""
    runs: bool
    """Whether there is a folder of runs."""
    results: bool
    paths: str
    """Where paths are saved, as it is written after `--paths`."""
    limits: Limits


@dataclass(frozen=True)
class Health:
    status: str
    running: int
    waiting: int


@dataclass(frozen=True)
class RunList:
    runs: list[RunSummary]


@dataclass(frozen=True)
class PathList:
    paths: list[SavedPath]


@dataclass(frozen=True)
class Deleted:
    name: str


@dataclass(frozen=True)
class ErrorDetail:
    message: str
    type: str
    param: str | None
    code: str | None


@dataclass(frozen=True)
class ErrorBody:
    error: ErrorDetail


EXPLAINED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "A mistake in the request; the message names the fix."},
    "5XX": {"model": ErrorBody, "description": "The line is full (503, Retry-After), or the server failed."},
}
