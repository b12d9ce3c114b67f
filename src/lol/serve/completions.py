"""From a request to the pieces of its answer: prompts, limits and path are checked, then every choice is decoded.

A streamed answer is the pieces, any other is their sum, so both are the same text.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lol.data.token_text import TokenText
from lol.data.tokenizer import encode_prompt
from lol.decoding import Decoding, Sampling, Token, Window, end_ids, lay_path
from lol.errors import UserError
from lol.model.base import check_ids
from lol.model.lm import LoLForCausalLM
from lol.serve.errors import NotFound
from lol.serve.limits import Limits
from lol.serve.pieces import StopStrings, TokenNames
from lol.serve.protocol import Choice, Completion, CompletionRequest, Logprobs, PathWindow, Usage


class ModelNotFound(NotFound):
    """A request names a model that is not served."""

    param = "model"
    code = "model_not_found"


@dataclass(frozen=True)
class Served:
    """The model of this server."""

    name: str
    model: LoLForCausalLM
    tokenizer: PreTrainedTokenizerFast
    limits: Limits = field(default_factory=Limits)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens that end a text."""
        return end_ids(self.model, self.tokenizer)


@dataclass(frozen=True)
class Plan:
    """A request that can be run."""

    served: Served
    request: CompletionRequest
    prompts: tuple[tuple[int, ...], ...]
    path: Int[Tensor, "D _"] | None
    seed: int
    names: TokenNames
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, choices: list[Choice], usage: Usage | None = None) -> Completion:
        """An answer or a chunk of it, under this request's name."""
        return Completion(id=self.id, created=self.created, model=self.served.name, choices=choices, usage=usage)

    def usage(self, completion_tokens: int) -> Usage:
        prompt_tokens = sum(map(len, self.prompts))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


@dataclass(frozen=True)
class Piece:
    """What one pass of the model added to a choice; possibly nothing yet."""

    choice: Choice
    new_tokens: int

    @property
    def is_empty(self) -> bool:
        choice = self.choice
        return not (choice.text or choice.finish_reason or (choice.logprobs and choice.logprobs.tokens))


def plan(request: CompletionRequest, served: Served) -> Plan:
    """Make a request ready to run.

    Raises:
        UserError: what the model or the limits of this server do not allow; the message names the fix.
    """
    if request.model not in (None, served.name):
        raise ModelNotFound(f"there is no model {request.model!r} here: ask for {served.name!r}, or leave model out")
    limits = served.limits
    if (request.max_tokens or 0) > limits.max_new_tokens:
        raise UserError(f"max_tokens is {request.max_tokens}: this server gives at most {limits.max_new_tokens}")
    num_choices = _num_prompts(request) * (request.n or 1)
    if num_choices > limits.max_choices:
        raise UserError(
            f"{num_choices} texts are asked for (prompts times n): this server gives at most {limits.max_choices}"
        )
    return Plan(
        served=served,
        request=request,
        prompts=tuple(_read_prompts(request, served)),
        path=_read_path(request, served),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        names=TokenNames(served.tokenizer),
    )


def run(plan: Plan) -> Iterator[Piece]:
    """All choices, one after the other: prompt by prompt, and sample by sample."""
    number = plan.request.n or 1
    for index in range(len(plan.prompts) * number):
        yield from _run_choice(plan, index, plan.prompts[index // number], sample=index % number)


def gather(plan: Plan, pieces: Sequence[Piece]) -> Completion:
    """The whole answer."""
    of_choice: dict[int, list[Choice]] = {}
    for piece in pieces:
        of_choice.setdefault(piece.choice.index, []).append(piece.choice)
    usage = plan.usage(sum(piece.new_tokens for piece in pieces))
    return plan.completion([_join(parts) for parts in of_choice.values()], usage)


def _join(parts: list[Choice]) -> Choice:
    """The pieces of a choice as one; the last says how it ended."""
    logprobs = None
    if parts[-1].logprobs is not None:
        given = [vars(part.logprobs) for part in parts]
        logprobs = Logprobs(**{name: [entry for lists in given for entry in lists[name]] for name in given[0]})
    return parts[-1].model_copy(update={"text": "".join(part.text for part in parts), "logprobs": logprobs})


def _num_prompts(request: CompletionRequest) -> int:
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _read_prompts(request: CompletionRequest, served: Served) -> Iterator[tuple[int, ...]]:
    """Token ids of each prompt. A text is the beginning of a document, as everywhere in this package; ids are taken as
    they are."""
    given = "" if request.prompt is None else request.prompt
    prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    longest = served.limits.max_prompt_tokens
    for prompt in prompts:
        ids = encode_prompt(served.tokenizer, prompt) if isinstance(prompt, str) else prompt
        ids = tuple(cast(list[int], ids))
        if not ids:
            raise UserError("a prompt of token ids is empty: give at least one id")
        if len(ids) > longest:
            raise UserError(f"a prompt has {len(ids)} tokens: this server reads at most {longest}")
        check_ids(torch.tensor(ids), served.model.config.vocab_size)
        yield ids


def _read_path(request: CompletionRequest, served: Served) -> Int[Tensor, "D _"] | None:
    """The forced blocks, whichever form they were given in. As in the model's `path`, one column holds for all windows;
    more are one per window."""
    given = request.path
    if given is None:
        return None
    config = served.model.config
    if not given:
        raise UserError(f"path is empty: give {config.num_routed_depths} blocks, one per depth, or leave it out")
    if isinstance(given[0], PathWindow):
        windows = cast(list[PathWindow], given)
        deepest = max(window.depth for window in windows)
        if deepest >= config.num_routed_depths:
            raise UserError(f"path names depth {deepest}: the model has depths 0 to {config.num_routed_depths - 1}")
        longest = served.limits.max_prompt_tokens + served.limits.max_new_tokens
        last = max(window.window for window in windows)
        if last >= config.windows_in(longest):
            raise UserError(f"path names window {last}: no text here has more than {config.windows_in(longest)}")
        # A window alone is no path for all of them, so there are two at least.
        path = torch.full((config.num_routed_depths, max(last + 1, 2)), -1)
        for window in windows:
            path[window.depth, window.window] = window.expert
    else:
        rows = cast(list[list[int]], given if isinstance(given[0], list) else [[block] for block in given])
        return lay_path(rows, config)
    return lay_path(path, config)


class _Writer:
    """Text and log-probabilities of one choice, as far as they are settled."""

    def __init__(self, plan: Plan, context: Sequence[int]):
        self.names = plan.names
        self.with_logprobs = plan.request.logprobs is not None
        self.decoder = TokenText(plan.served.tokenizer, context)
        self.stops = StopStrings(plan.request.stops)
        self._text = ""
        self._length = 0
        self._tokens: list[tuple[Token, int]] = []

    def add(self, token: Token, stoppable: bool = True) -> bool:
        """Take a token in; whether it completes a stop string. The prompt's tokens cannot."""
        text = self.decoder.add(token.id)
        self._tokens.append((token, self.decoder.start))
        self._append(self.stops.add(text) if stoppable else text)
        return self.stops.stopped

    def add_end(self, token: Token) -> bool:
        """Take the token in that ends the text and has none itself."""
        stopped = self.end_of_tokens()
        self._tokens.append((token, self.decoder.length))
        return stopped

    def end_of_tokens(self) -> bool:
        """No token with text follows; whether what was held back completes a stop string."""
        if not self.stops.stopped:
            self._append(self.stops.add(self.decoder.end()))
        return self.stops.stopped

    def end(self) -> bool:
        """Nothing follows; whether the text ended with a stop string."""
        if not self.end_of_tokens():
            self._append(self.stops.end())
        return self.stops.stopped

    def take(self, is_last: bool = False) -> tuple[str, Logprobs | None]:
        """What was settled since the last call. Tokens behind a stop string are left out."""
        text, self._text = self._text, ""
        keep_all = is_last and not self.stops.stopped
        settled = sum(keep_all or offset < self._length for _, offset in self._tokens)
        tokens, self._tokens = self._tokens[:settled], self._tokens[settled:]
        return text, self._logprobs(tokens) if self.with_logprobs else None

    def _append(self, text: str) -> None:
        self._text += text
        self._length += len(text)

    def _logprobs(self, tokens: list[tuple[Token, int]]) -> Logprobs:
        logprobs = Logprobs()
        for token, offset in tokens:
            best = None
            if token.logprob is not None:
                best = {self.names.name(id_): _finite(value) for id_, value in token.top or ()}
                best.setdefault(self.names.name(token.id), _finite(token.logprob))
            logprobs.tokens.append(self.names.name(token.id))
            logprobs.token_logprobs.append(None if token.logprob is None else _finite(token.logprob))
            logprobs.top_logprobs.append(best)
            logprobs.text_offset.append(offset)
        return logprobs


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


def _start(plan: Plan, sample: int) -> Decoding:
    """A text of its own: the seed and the number of the sample decide what is drawn."""
    request, model = plan.request, plan.served.model
    seed = np.random.SeedSequence([plan.seed % 2**64, sample]).generate_state(1, np.uint64)
    return Decoding(
        model,
        path=plan.path,
        path_weight=None if request.path_weight in (None, "router") else float(cast(float, request.path_weight)),
        generator=torch.Generator(model.device).manual_seed(int(seed[0])),
        num_top=request.logprobs,
    )


def _write(decoding: Decoding, request: CompletionRequest) -> Iterator[Token]:
    most = 16 if request.max_tokens is None else request.max_tokens
    if most:
        temperature = 1.0 if request.temperature is None else request.temperature
        top_p = 1.0 if request.top_p is None else request.top_p
        yield from decoding.write(Sampling(most, temperature, top_k=None, top_p=top_p))


def _run_choice(plan: Plan, index: int, prompt: tuple[int, ...], sample: int) -> Iterator[Piece]:
    request, served = plan.request, plan.served
    decoding = _start(plan, sample)
    writer = _Writer(plan, context=() if request.echo else prompt)
    for tokens in decoding.read(prompt, scored=bool(request.echo)):
        for token in tokens if request.echo else ():
            writer.add(token, stoppable=False)
        yield _piece(index, writer.take(), new_tokens=0)

    reason: Literal["stop", "length"] = "length"
    for token in _write(decoding, request):
        is_end = token.id in served.end_ids
        stopped = writer.add_end(token) if is_end else writer.add(token)
        yield _piece(index, writer.take(), new_tokens=1)
        if is_end or stopped:
            reason = "stop"
            break
    if writer.end():
        reason = "stop"
    path = [_tell(window) for window in decoding.windows()] if request.return_path else None
    yield _piece(index, writer.take(is_last=True), new_tokens=0, reason=reason, path=path)


def _tell(window: Window) -> PathWindow:
    names = ("depth", "window", "start", "end", "expert", "weight")
    return PathWindow(**{name: getattr(window, name) for name in names})


def _piece(
    index: int,
    settled: tuple[str, Logprobs | None],
    new_tokens: int,
    reason: Literal["stop", "length"] | None = None,
    path: list[PathWindow] | None = None,
) -> Piece:
    text, logprobs = settled
    choice = Choice(index=index, text=text, logprobs=logprobs, finish_reason=reason, path=path)
    return Piece(choice, new_tokens)
