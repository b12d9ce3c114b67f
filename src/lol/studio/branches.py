"""One text continued in several ways side by side: free, and with blocks forced.

All branches begin with the same text and the same seed, and advance by turns, a token each. What comes out is events,
with `None` where a pass of the model is done and nothing is to be told: the work may be given up at any of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lol.data.token_text import TokenText
from lol.decoding import Sampling, Token, seeded
from lol.serve.pieces import TokenNames
from lol.studio.models import Loaded
from lol.studio.trace import View, Window, begin, read_text


@dataclass(frozen=True)
class Branch:
    """What is forced on a continuation."""

    path: list[int] | list[list[int]] | None = None
    path_weight: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A token that could come next."""

    id: int
    text: str
    p: float


@dataclass(frozen=True)
class PromptEvent:
    """A branch has read the text."""

    branch: int
    tokens: int
    windows: list[Window]
    next: list[Candidate]
    divergence: float | None
    """Of the next token's distribution from the first branch's: KL(first ‖ this) in nats; `None` for the first."""
    type: Literal["prompt"] = "prompt"


@dataclass(frozen=True)
class TokenEvent:
    """A branch has written a token."""

    branch: int
    position: int
    id: int
    text: str
    p: float
    windows: list[Window]
    """Those that began since the token before."""
    next: list[Candidate]
    """What it was drawn from, before temperature, top_k and top_p."""
    type: Literal["token"] = "token"


@dataclass(frozen=True)
class EndEvent:
    """A branch has ended: with the document, or with the tokens that were asked for."""

    branch: int
    reason: Literal["stop", "length"]
    type: Literal["end"] = "end"


@dataclass(frozen=True)
class DoneEvent:
    """All branches have ended."""

    type: Literal["done"] = "done"


@dataclass(frozen=True)
class ErrorEvent:
    """Nothing follows, for something went wrong."""

    message: str
    type: Literal["error"] = "error"


Event = PromptEvent | TokenEvent | EndEvent | DoneEvent


def continue_text(
    loaded: Loaded, text: str, branches: Sequence[Branch], sampling: Sampling, seed: int, top: int
) -> Iterator[Event | None]:
    """The events of all branches.

    Args:
        loaded: The model.
        text: The beginning of a document.
        branches: What is forced on each.
        sampling: How tokens are chosen, and how many.
        seed: Decides the sample of every branch.
        top: So many most probable tokens are told in each place.

    Raises:
        UserError: a text or a path that the model cannot run, before the first event.
    """
    ids = read_text(loaded, text)
    most = len(ids) + sampling.max_new_tokens
    written = [_Written(loaded, number, branch, ids, seed, top, most) for number, branch in enumerate(branches)]
    # Everything that can be refused has been.
    yield None
    first: Float[Tensor, "V"] | None = None
    for own in written:
        tokens: list[Token] = []
        for told in own.decoding.read(ids):
            tokens += told
            yield None
        logprobs = own.decoding.logprobs()
        divergence = None if first is None else kl_divergence(first, logprobs)
        first = logprobs if first is None else first
        begun = own.view.all_of([window for token in tokens for window in token.windows])
        yield PromptEvent(own.number, len(ids), begun, candidates(logprobs, top, own.names), divergence)
    running = [(own, own.events(sampling)) for own in written]
    while running:
        for own, events in list(running):
            event = next(events, None)
            if event is None:
                running.remove((own, events))
                yield EndEvent(own.number, own.reason)
            else:
                yield event
    yield DoneEvent()


def kl_divergence(first: Float[Tensor, "V"], other: Float[Tensor, "V"]) -> float:
    """KL(first ‖ other) in nats, of log-probabilities."""
    first, other = first.double(), other.double()
    # The sum of rounded terms of equal distributions may lie below 0.
    return max(0.0, float((first.exp() * (first - other)).sum()))


def candidates(logprobs: Float[Tensor, "V"], top: int, names: TokenNames) -> list[Candidate]:
    """The most probable tokens, best first."""
    best, ids = logprobs.topk(min(top, len(logprobs)))
    return [Candidate(id_, names.name(id_), p) for id_, p in zip(ids.tolist(), best.exp().tolist(), strict=True)]


class _Written:
    """One branch as far as it has come."""

    def __init__(self, loaded: Loaded, number: int, branch: Branch, ids: Sequence[int], seed: int, top: int, most: int):
        model = loaded.model
        self.number = number
        self.names = loaded.names
        self.reason: Literal["stop", "length"] = "length"
        generator = seeded(seed, model.device)
        self.decoding = begin(loaded, branch.path, branch.path_weight, generator=generator, num_top=top)
        self.view = View(model.config, self.decoding.path, most)
        self._text = TokenText(loaded.tokenizer)
        for id_ in ids:
            self._text.add(id_)
        self._ends = loaded.ends

    def events(self, sampling: Sampling) -> Iterator[TokenEvent]:
        """The tokens that it writes."""
        for number, token in enumerate(self.decoding.write(sampling), start=1):
            ended = token.id in self._ends
            text = self._text.add(token.id)
            if ended or number == sampling.max_new_tokens:
                text += self._text.end()
            yield self._tell(token, text)
            if ended:
                self.reason = "stop"
                return

    def _tell(self, token: Token, text: str) -> TokenEvent:
        assert token.logprob is not None
        assert token.top is not None
        following = [(id_, logprob) for id_, logprob in token.top]
        chances = torch.tensor([token.logprob, *(logprob for _, logprob in following)]).exp().tolist()
        return TokenEvent(
            self.number,
            token.position,
            token.id,
            text,
            chances[0],
            self.view.all_of(token.windows),
            [Candidate(id_, self.names.name(id_), p) for (id_, _), p in zip(following, chances[1:], strict=True)],
        )
