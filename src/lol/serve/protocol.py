"""OpenAI's completions protocol as types, with the fields that take and return a path.

A field that is not known, or not supported with the value it has, is an error: nothing is ignored silently.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from lol.errors import UserError, is_whole_text

# OpenAI's own bounds, but for logprobs, where it stops at 5.
MAX_STOPS = 4
MAX_LOGPROBS = 20

# Fields of OpenAI's that this server lacks, and the values with which they ask for nothing; clients send those unasked.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
}

# What a field of several forms takes, in place of one error message per form.
FORMS = {
    "prompt": "prompt must be a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "stop must be a text or a list of texts",
    "path": "path must be a list with one block per depth, a list per depth with one block per window (-1 leaves the "
    "router free), or the list of windows that an answer carries as its path",
    "path_weight": 'path_weight must be "router" or a number',
}


def _is_unicode(text: str) -> str:
    if not is_whole_text(text):
        raise UserError("a text holds half of a surrogate pair, which is no character: send whole ones")
    return text


# JSON can write what no tokenizer reads.
Text = Annotated[str, AfterValidator(_is_unicode)]
# What fits into a tensor; the model says which tokens and blocks it has.
Number = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """`stream_options` of a request."""

    include_usage: bool = False


class PathWindow(_Strict):
    """One window of a path. An answer fills in everything; a request needs depth, window and expert, and ignores the
    others, which follow from them."""

    depth: Annotated[int, Field(ge=0)]
    window: Annotated[int, Field(ge=0)]
    """Its number at this depth, in order of position."""
    start: int | None = None
    """Its first token; the prompt's first token, BOS included, is 0."""
    end: int | None = None
    """The token after its last."""
    expert: Number
    """The block."""
    weight: float | None = None
    """The weight of its update."""


class CompletionRequest(_Strict):
    """The body of `POST /v1/completions`."""

    model: str | None = None
    prompt: Text | list[Text] | list[Number] | list[list[Number]] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    n: Annotated[int, Field(ge=1)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = False
    stop: Text | list[Text] | None = None
    seed: int | None = None
    user: str | None = None
    """A label of the client's, without effect, as at OpenAI."""
    best_of: Any = None
    suffix: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    path: list[Number] | list[list[Number]] | list[PathWindow] | None = None
    """Extension: the blocks to run."""
    path_weight: Literal["router"] | float | None = None
    """Extension: the weight of a forced block's update; "router" is the router's own probability of it."""
    return_path: bool = False
    """Extension: let every choice carry the path it took."""

    @field_validator("stop")
    @classmethod
    def _stops_are_few(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise UserError(f"stop holds {len(stops)} texts: give at most {MAX_STOPS}")
        if "" in stops:
            raise UserError("a stop text is empty: leave it out, or give at least one character")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> "CompletionRequest":
        for name, neutral in NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise UserError(f"{name} is not supported here: leave it out")
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options needs a stream: set stream to true, or leave it out")
        if self.path_weight is not None and self.path is None:
            raise UserError("path_weight is the weight of forced blocks: give a path, or leave it out")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Logprobs(BaseModel):
    """Log-probabilities of a choice's tokens: entry i of each list belongs to token i."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    """Where the token's text begins in the choice's text (decided here: a stream counts over all of its chunks)."""


class Usage(BaseModel):
    """Tokens of a request; each prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    """A text, or in a stream the next piece of one."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    path: list[PathWindow] | None = None
    """Set where the request asks for it; in a stream by the chunk that has the finish_reason."""


class Completion(BaseModel):
    """An answer, or in a stream one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[Choice]
    usage: Usage | None = None

    def to_json(self) -> str:
        """As on the wire; `path` only where one was asked for."""
        absent = {place: {"path"} for place, choice in enumerate(self.choices) if choice.path is None}
        return self.model_dump_json(exclude={"choices": absent})
