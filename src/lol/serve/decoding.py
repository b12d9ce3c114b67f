"""One text, token by token: what the model says of each token, and the path that it takes.

A step loop on the model's own cache. Each pass's routing is kept, so the path costs no second pass. It knows token ids
only; text, stop strings and who asked are other files' concern.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from lol.model.config import LoLConfig
from lol.model.core import broadcast_path
from lol.model.lm import LoLForCausalLM
from lol.model.outputs import Routing

# A prompt is read in passes of so many tokens: it can be given up between them, and the scores of only so many tokens
# are in memory at once.
CHUNK = 512


class ModelDiverged(RuntimeError):
    """No text can be drawn from this model."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Draw among the most probable tokens that have this much probability together; always the first of them."""
    seed: int = 0
    """Decides the draws, together with `sample`."""
    sample: int = 0
    """Number of the sample: those of one prompt and seed differ."""


@dataclass(frozen=True)
class Token:
    """A token of the prompt or of the text that follows it."""

    id: int
    logprob: float | None = None
    """Natural logarithm of its probability, before temperature and top_p. `None` for a text's first token, and where
    nobody asked."""
    top: tuple[tuple[int, float], ...] | None = None
    """The most probable tokens in its place with their log-probabilities, best first."""


@dataclass(frozen=True)
class RanWindow:
    """A window that ran, and what it ran. The names are those of the table of `record_paths`."""

    depth: int
    window: int
    start: int
    """Its first token; the prompt's first token is 0."""
    end: int
    """The token after its last so far."""
    expert: int
    weight: float


@dataclass(frozen=True)
class ForcedPath:
    """Blocks that windows have to run."""

    blocks: Int[Tensor, "D K"]
    """-1 leaves a window to the router; windows from K on are free."""
    every_window: bool
    """K is 1, and the one column holds for all windows."""
    weight: float | None = None
    """Weight of a forced block's update; `None` takes the router's own probability of it."""

    def up_to(self, width: int) -> Int[Tensor, "D _"]:
        """The blocks as a pass wants them whose text has at most `width` windows at a depth."""
        if self.every_window:
            return self.blocks
        blocks = self.blocks[:, :width]
        return torch.nn.functional.pad(blocks, (0, width - blocks.shape[1]), value=-1)


class Decoding:
    """A prompt and what the model makes of it: first `prefill`, then as many `steps` as are wanted, then `windows`."""

    def __init__(
        self,
        model: LoLForCausalLM,
        prompt: Sequence[int],
        sampling: Sampling,
        path: ForcedPath | None = None,
        num_top: int | None = None,
    ):
        """
        Args:
            prompt: At least one token id.
            num_top: Give log-probabilities, and the so many best tokens of each place; `None` gives neither.
        """
        self.model = model
        self.prompt = list(prompt)
        self.sampling = sampling
        self.path = path
        self.num_top = num_top
        self.cache = DynamicCache(config=model.config)
        self.num_read = 0
        self.next_scores: Float[Tensor, "V"] | None = None
        self.ran: dict[tuple[int, int], tuple[int, float]] = {}
        seed = np.random.SeedSequence([sampling.seed % 2**64, sampling.sample]).generate_state(1, np.uint64)
        self.generator = torch.Generator().manual_seed(int(seed[0]))

    def prefill(self, scored: bool = False) -> Iterator[list[Token]]:
        """Read the prompt; after each pass, the tokens it has read.

        Args:
            scored: Give the prompt's tokens log-probabilities too; they cost the scores of every place.
        """
        scored = scored and self.num_top is not None
        for start in range(0, len(self.prompt), CHUNK):
            ids = self.prompt[start : start + CHUNK]
            before = self.next_scores
            scores = self._read(ids, every_place=scored)
            if not scored:
                yield [Token(id_) for id_ in ids]
                continue
            first = Token(ids[0]) if before is None else self._score(ids[0], before)
            yield [first, *(self._score(id_, place) for id_, place in zip(ids[1:], scores, strict=False))]

    def steps(self) -> Iterator[Token]:
        """Draw tokens without end. A token is read only when the next one is wanted.

        Raises:
            ModelDiverged: the model's scores are not finite.
        """
        while True:
            assert self.next_scores is not None
            scores = self.next_scores
            if not bool(torch.isfinite(scores).all()):
                raise ModelDiverged("the model's scores are not finite: it has diverged; serve an earlier checkpoint")
            id_ = draw(scores, self.sampling, self.generator)
            yield self._score(id_, scores) if self.num_top is not None else Token(id_)
            self._read([id_], every_place=False)

    def windows(self) -> list[RanWindow]:
        """The path of the tokens that were read, in order of depth and window. The last drawn token is not read."""
        config = self.model.config
        size = config.core_window or self.num_read
        return [
            RanWindow(
                depth=depth,
                window=window,
                start=max(window * size - config.window_shift(depth), 0),
                end=min((window + 1) * size - config.window_shift(depth), self.num_read),
                expert=expert,
                weight=weight,
            )
            for (depth, window), (expert, weight) in sorted(self.ran.items())
        ]

    def _read(self, ids: list[int], every_place: bool) -> Float[Tensor, "_ V"]:
        """Run the next tokens; scores of what follows each of them, or only the last."""
        config = self.model.config
        self.num_read += len(ids)
        blocks = None if self.path is None else self.path.up_to(config.windows_in(self.num_read))
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([ids], device=self.model.device),
                cache=self.cache,
                path=blocks,
                path_weight=None if self.path is None else self.path.weight,
                logits_to_keep=0 if every_place else 1,
            )
            scores = output.logits[0].float().cpu()
        self._keep(output.routing)
        self.next_scores = scores[-1]
        return scores

    def _keep(self, routing: Routing) -> None:
        assert routing.experts is not None and routing.weights is not None  # noqa: PT018
        assert routing.first_window is not None
        first = routing.first_window[0].tolist()
        rows = zip(routing.experts[0].tolist(), routing.weights[0].tolist(), strict=True)
        for depth, (experts, weights) in enumerate(rows):
            for place, (expert, weight) in enumerate(zip(experts, weights, strict=True)):
                if expert >= 0:
                    self.ran[depth, first[depth] + place] = (expert, weight)

    def _score(self, id_: int, scores: Float[Tensor, "V"]) -> Token:
        assert self.num_top is not None
        logprobs = scores.log_softmax(-1)
        best, ids = logprobs.topk(min(self.num_top, len(logprobs)))
        top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
        return Token(id_, float(logprobs[id_]), top)


def draw(scores: Float[Tensor, "V"], sampling: Sampling, generator: torch.Generator) -> int:
    """The next token's id."""
    if sampling.temperature == 0:
        return int(scores.argmax())
    # Less the largest first: no temperature, however small, then makes an infinity of it.
    probabilities = ((scores - scores.max()).double() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, ids = probabilities.sort(descending=True, stable=True)
        unwanted = ordered.cumsum(-1) - ordered >= sampling.top_p
        unwanted[0] = False
        probabilities = probabilities.index_fill(0, ids[unwanted], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def check_path(path: ForcedPath, config: LoLConfig) -> None:
    """Raise `UserError` for a path that the model cannot run."""
    broadcast_path(path.blocks, 1, config.num_routed_depths, config.num_experts, path.blocks.shape[1])
