"""One text, token by token: what the model writes and says of each token, and the path that it takes.

A step loop on the model's own cache. Each pass tells its routing, so the path costs no second pass. It knows token ids
only; text, prompts and who asked are other files' concern.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.core import broadcast_path, fit_path
from lol.model.lm import LoLForCausalLM
from lol.model.outputs import Routing

# Given tokens are run in passes of so many: work can be given up between them, and the scores of only so many tokens
# are in memory at once.
CHUNK = 512

# Below this temperature one score is beyond the reach of the next, and a quotient may overflow.
_COLDEST = 1e-10


GivenPath: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "..."]
"""A path as callers give it: one block per depth, or per depth a row of one block per window."""


class ModelDiverged(UserError):
    """No text can be drawn from this model."""


def seeded(seed: int, device: torch.device) -> torch.Generator:
    """A generator that begins at a seed.

    Raises:
        UserError: a seed that does not fit.
    """
    if not 0 <= seed < 2**63:
        raise UserError(f"seed must be from 0 to 2^63 - 1, not {seed}")
    return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many. The order of the choices is that of transformers' `generate`.

    Raises:
        UserError: a number that cannot work.
    """

    max_new_tokens: int = 100
    """Write at most so many tokens; the end of the document ends it earlier."""
    temperature: int | float = 0.8
    """0 takes the most probable token every time."""
    top_k: int | None = 50
    """Sample among so many most probable tokens; `None`: among all."""
    top_p: int | float = 1.0
    """Sample among the most probable tokens that have this much probability together; always the first of them."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise UserError(f"{name} must be at least {least}, not {value}")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top_p must be from 0 to 1, not {self.top_p}")

    def choose(self, scores: Float[Tensor, "V"], generator: torch.Generator) -> int:
        """A token, of the scores (logits) of all; the generator is on their device."""
        if self.temperature < _COLDEST:
            return int(scores.argmax())
        scores = scores / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, len(scores))).values[-1]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ordered, ids = scores.sort(descending=True, stable=True)
            shares = ordered.softmax(-1)
            unwanted = shares.cumsum(-1) - shares >= self.top_p
            unwanted[0] = False
            scores = scores.index_fill(0, ids[unwanted], -torch.inf)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))


@dataclass(frozen=True)
class Window:
    """A window that has begun, and so has its block. The names are those of the table of `record_paths`."""

    depth: int
    """0-based."""
    window: int
    """Its number at this depth, from 0."""
    start: int
    """Position of its first token in the text."""
    end: int | None
    """Position behind its last token, if the text gets so far. `None`: it is as long as the text."""
    expert: int
    """The block that it runs."""
    weight: float
    """Of the block's update."""
    probabilities: tuple[float, ...] | None = None
    """The router's of each block, without balancing bias, whatever is forced. `None` where nobody asked, and where the
    model has no router."""


@dataclass(frozen=True)
class Token:
    """A token of a text."""

    id: int
    position: int
    """In the text, from 0."""
    windows: tuple[Window, ...]
    """Windows that are known since the token before, first token first. A given token tells the windows that begin with
    it; a written one those that begin with the token before it, which was run to choose it."""
    logprob: float | None = None
    """Natural logarithm of its probability, before temperature, top_k and top_p. `None` for a text's first token, and
    where nobody asked."""
    top: tuple[tuple[int, float], ...] | None = None
    """The most probable tokens in its place with their log-probabilities, best first; `None` as above."""


class Decoding:
    """A text and what the model makes of it: given tokens are `read`, others written, in any order.

    Its iterators may be left anywhere, and the next one goes on from there. A token that was written last is not run.
    """

    def __init__(
        self,
        model: LoLForCausalLM,
        *,
        path: GivenPath | None = None,
        path_weight: float | None = None,
        generator: torch.Generator | None = None,
        num_top: int | None = None,
        with_probabilities: bool = False,
    ):
        """Begin a text.

        Args:
            model: In eval mode.
            path: As `self.path`.
            path_weight: Weight of a forced block's update; `None` takes the router's own probability of it.
            generator: Source of the samples, on the model's device. Default: one of seed 0.
            num_top: Give log-probabilities, and the so many best tokens of each place; `None` gives neither.
            with_probabilities: Let windows tell the router's probabilities.
        """
        self.model = model
        self.path_weight = path_weight
        self.generator = generator or seeded(0, model.device)
        self.num_top = num_top
        self.with_probabilities = with_probabilities
        self.num_run = 0
        """Tokens that were run."""
        self.path = path
        self._cache = DynamicCache(config=model.config)
        self._unrun: list[int] = []
        self._scores: Float[Tensor, "V"] | None = None
        self._windows: dict[tuple[int, int], Window] = {}
        self._untold: list[Window] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those included that are not run yet."""
        return self.num_run + len(self._unrun)

    @property
    def path(self) -> Int[Tensor, "..."] | None:
        """The blocks that windows which begin from now on have to run: one per depth, (D,) or (D, 1), for every window,
        or one per window, (D, K), windows from K on being free. -1 leaves a window to the router, `None` all of them.
        Rows of a list may differ in length: shorter ones are filled with -1. Windows that have begun keep their block.

        Raises:
            UserError: when set to a path that does not fit the model.
        """
        return self._path

    @path.setter
    def path(self, path: GivenPath | None) -> None:
        self._path = None if path is None else lay_path(path, self.model.config)

    def read(self, ids: Sequence[int] = (), scored: bool = False) -> Iterator[list[Token]]:
        """Add tokens to the text and run all that are not run yet; after each pass, the tokens of `ids` it has run.

        Args:
            ids: Of the vocabulary (`check_ids`).
            scored: Give these tokens log-probabilities, if `num_top` asks for any; that costs the scores of all places.

        Raises:
            ModelDiverged: the model's scores are not finite.
        """
        scored = scored and self.num_top is not None
        first = self.num_tokens
        self._unrun += ids
        while self._unrun:
            passed, start, before = self._unrun[:CHUNK], self.num_run, self._scores
            scores = self._run(passed, every_place=scored)
            places = [before, *scores[:-1]] if scored else [None] * len(passed)
            told = zip(passed, range(start, self.num_run), places, strict=True)
            yield [self._token(id_, position, place) for id_, position, place in told if position >= first]

    def write(self, sampling: Sampling) -> Iterator[Token]:
        """Let the model go on. A token is run only when the next one is wanted; a text has to have one to begin with.

        Raises:
            ModelDiverged: the model's scores are not finite.
        """
        for _ in range(sampling.max_new_tokens):
            for _ in self.read():
                pass
            assert self._scores is not None
            id_ = sampling.choose(self._scores, self.generator)
            self._unrun.append(id_)
            yield self._token(id_, self.num_run, None if self.num_top is None else self._scores)

    def logprobs(self) -> Float[Tensor, "V"]:
        """Log-probabilities of the token behind those that were run, of which there has to be one, before temperature,
        top_k and top_p."""
        assert self._scores is not None
        return self._scores.log_softmax(-1)

    def windows(self) -> list[Window]:
        """The path of the tokens that were run, in order of depth and window; no `end` is behind the last of them."""
        ends = {key: self.num_run if window.end is None else window.end for key, window in self._windows.items()}
        return [replace(self._windows[key], end=min(ends[key], self.num_run)) for key in sorted(ends)]

    @torch.no_grad()
    def _run(self, ids: list[int], every_place: bool) -> Float[Tensor, "_ V"]:
        """Run the next tokens; scores of what follows each of them, or only the last."""
        config = self.model.config
        num_run = self.num_run + len(ids)
        output = self.model(
            torch.tensor([ids], device=self.model.device),
            cache=self._cache,
            path=None if self.path is None else fit_path(self.path, config.windows_in(num_run)),
            path_weight=self.path_weight,
            logits_to_keep=0 if every_place else 1,
            output_router_logits=self.with_probabilities,
        )
        scores = output.logits[0].float()
        if not bool(scores.isfinite().all()):
            raise ModelDiverged("the model's scores are not finite: it has diverged; take an earlier checkpoint")
        self.num_run, self._unrun, self._scores = num_run, self._unrun[len(ids) :], scores[-1]
        logits = output.router_logits if self.with_probabilities else None
        for window in _begun_windows(config, output.routing, logits, self._windows):
            self._windows[window.depth, window.window] = window
            self._untold.append(window)
        self._untold.sort(key=lambda window: window.start)
        return scores

    def _token(self, id_: int, position: int, scores: Float[Tensor, "V"] | None) -> Token:
        """A token with the windows up to its place, and what these scores say of it."""
        windows = tuple(window for window in self._untold if window.start <= position)
        self._untold = self._untold[len(windows) :]
        if scores is None:
            return Token(id_, position, windows)
        logprobs = scores.log_softmax(-1)
        best, ids = logprobs.topk(min(self.num_top or 0, len(logprobs)))
        top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
        return Token(id_, position, windows, float(logprobs[id_]), top)


def lay_path(path: GivenPath, config: LoLConfig) -> Int[Tensor, "..."]:
    """A path as a tensor, (D,) or (D, K), checked; shorter rows are filled with -1.

    Raises:
        UserError: the model cannot run it.
    """
    if not isinstance(path, Tensor) and path and any(isinstance(row, Sequence) for row in path):
        if not all(isinstance(row, Sequence) for row in path):
            raise UserError("path mixes blocks and rows of blocks: give one block per depth, or a row for each depth")
        rows = cast(Sequence[Sequence[int]], path)
        width = max(map(len, rows))
        path = [[*row, *[-1] * (width - len(row))] for row in rows]
    blocks = torch.as_tensor(path, dtype=torch.long)
    check_path(blocks, config)
    return blocks


def check_path(path: Int[Tensor, "..."], config: LoLConfig) -> None:
    """Raise `UserError` for a path that the model cannot run, however many windows it names."""
    broadcast_path(path, 1, config.num_routed_depths, config.num_experts, path.shape[-1])


def end_ids(model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The tokens that end a document: the model's own, else the tokenizer's."""
    config = model.generation_config
    given = None if config is None else config.eos_token_id
    given = tokenizer.eos_token_id if given is None else given
    listed = given if isinstance(given, list) else [given]
    return {int(token) for token in listed if token is not None}


def _begun_windows(
    config: LoLConfig,
    routing: Routing,
    logits: tuple[Tensor, ...] | None,
    known: Mapping[tuple[int, int], Window],
) -> Iterator[Window]:
    """The windows of a pass over one row that are not known yet, by depth and number; with the router's logits, told
    its probabilities."""
    assert routing.experts is not None
    assert routing.weights is not None
    assert routing.first_window is not None
    size = config.core_window
    weights, first = routing.weights[0].tolist(), routing.first_window[0].tolist()
    for depth, experts in enumerate(routing.experts[0].tolist()):
        shift = config.window_shift(depth)
        for place, expert in enumerate(experts):
            number = first[depth] + place
            if expert < 0 or (depth, number) in known:
                continue
            start, end = (0, None) if size is None else (max(number * size - shift, 0), (number + 1) * size - shift)
            shares = None if logits is None else tuple(logits[depth][0, place].float().softmax(-1).tolist())
            yield Window(depth, number, start, end, expert, weights[depth][place], shares)
