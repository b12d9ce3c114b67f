"""What one server accepts, and what `lol serve` is told on the command line; imports no web library."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Limits:
    """Bounds of a request (decided here); what lies outside is refused with a message that names the bound."""

    max_prompt_tokens: int = 32_768
    """Tokens in a prompt."""
    max_new_tokens: int = 4096
    """The largest `max_tokens` of a request."""
    max_choices: int = 64
    """Prompts times `n` in one request."""
    queue: int = 32
    """Requests that may wait; they run one after the other, and one more is told to come back later."""


@dataclass(frozen=True)
class Serve:
    """Serve a model over HTTP as OpenAI's completions API, with paths.

    Example: lol serve --model runs/demo --port 8000
    """

    model: Path
    """A run folder (its newest checkpoint), a checkpoint, or a folder written by transformers."""
    host: str = "127.0.0.1"
    """Address to listen at; one that other machines can reach needs a token."""
    port: int = 8000
    """0 takes a free one; the line that is printed names it."""
    token: str | None = None
    """What clients have to send as their API key. Other users of this machine can read flags: better set LOL_TOKEN."""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = Limits()
    """Bounds of a request."""
