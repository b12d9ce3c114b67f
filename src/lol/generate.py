"""Text from a trained model, token by token: a document that grows in its cache, and the windows that begin in it.

`generate_text` is the whole text, `stream_text` the same in pieces; a `Document` may be written on again and again, and
only its new tokens are run. For beams, batches and other samplers there is transformers' own `model.generate`, whose
greedy and sampled text this is, seed by seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.core import broadcast_path
from lol.model.lm import LoLForCausalLM
from lol.model.outputs import Routing


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many.

    Raises:
        UserError: a number that cannot work.
    """

    max_new_tokens: int = 100
    """Write at most so many tokens; the end of the document ends it earlier."""
    temperature: int | float = 0.8
    """0 takes the most probable token every time."""
    top_k: int = 50
    """Sample among so many most probable tokens."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 1)):
            value = getattr(self, name)
            if not value >= least:
                raise UserError(f"{name} must be at least {least}, not {value}")

    def choose(self, scores: Float[Tensor, "V"], generator: torch.Generator) -> int:
        """A token, of the scores (logits) of all."""
        if self.temperature == 0:
            return int(scores.argmax())
        scores = scores / self.temperature
        least = scores.topk(min(self.top_k, len(scores))).values[-1]
        probabilities = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=generator))


@dataclass(frozen=True)
class Window:
    """A window as it begins: its block is decided, most of its tokens are still to come."""

    depth: int
    """0-based."""
    number: int
    """In the document, counted at its depth from 0."""
    start: int
    """Position of its first token."""
    end: int | None
    """Position behind its last token, if the document gets so far. `None`: it is as long as the document."""
    expert: int
    """The block that it runs."""
    weight: float
    """Of the block's update."""


@dataclass(frozen=True)
class Piece:
    """One token of a text that is being written."""

    token: int
    position: int
    """In the document, from 0."""
    text: str
    """What it adds to the text. Where tokens share a character, the last of them has it."""
    given: bool
    """Whether it is of the text that was given rather than written."""
    windows: tuple[Window, ...]
    """Windows that are known since the piece before. A given token tells the windows that begin with it; a written one
    those that begin with the token before it, which was run to choose it. The last token written is not run."""


class Document:
    """A text that grows: its cache, its place, its random numbers.

    Use it from one thread. Iterators of `write` may be left between two pieces; the next `write` goes on from there.
    """

    def __init__(
        self,
        model: LoLForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        *,
        path: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ):
        """Begin a document.

        Args:
            model: In eval mode.
            tokenizer: Its own.
            path: As `self.path`.
            generator: Source of the samples, on the model's device. Default: one of seed 0.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.generator = generator or torch.Generator(model.device).manual_seed(0)
        self.path = path
        self.ended = False
        """Whether the model has ended the document. There is nothing to write after that."""
        self.num_tokens = 0
        """Tokens so far, the one that is not run yet included."""
        self._cache = DynamicCache(config=model.config)
        self._unrun: list[int] = []
        self._scores: Tensor | None = None
        self._decoder = _Decoder(tokenizer)
        self._ends = _end_ids(model, tokenizer)

    @property
    def path(self) -> list[int] | None:
        """One block per depth that every window is to run that begins from now on; -1 leaves a depth to the router,
        `None` all of them. Windows that have begun keep their block.

        Raises:
            UserError: when set to a path that does not fit the model.
        """
        return self._path

    @path.setter
    def path(self, path: Sequence[int] | None) -> None:
        if path is not None:
            config = self.model.config
            broadcast_path(torch.tensor(list(path)), 1, config.num_routed_depths, config.num_experts, 1)
        self._path = None if path is None else list(path)

    def write(self, text: str = "", sampling: Sampling | None = None) -> Iterator[Piece]:
        """Add a text to the document and let the model go on from it.

        Args:
            text: Of the first one the tokenizer makes the beginning of a document; a later one is added as it stands,
                cut into tokens by itself. Empty: the model goes on.
            sampling: Default: `Sampling()`.

        Returns:
            The pieces, those of the given text first. Nothing is run before the first is asked for.

        Raises:
            UserError: the document has ended, or there is no token to begin with.
        """
        if self.ended:
            raise UserError("the document has ended: begin a new one")
        ids = self.tokenizer(text, add_special_tokens=self.num_tokens == 0, verbose=False)["input_ids"]
        if not ids and not self.num_tokens:
            raise UserError("there is nothing to go on from: give a prompt, or a tokenizer that begins documents (BOS)")
        return self._pieces(list(ids), sampling or Sampling())

    def _pieces(self, ids: list[int], sampling: Sampling) -> Iterator[Piece]:
        first = self.num_tokens
        windows = self._run(ids)
        for place, token in enumerate(ids):
            position = first + place
            begun = tuple(window for window in windows if window.start <= position)
            windows = windows[len(begun) :]
            yield Piece(token, position, self._decoder.add(token), True, begun)
        for number in range(sampling.max_new_tokens):
            if number:
                windows = self._run([])
            assert self._scores is not None
            token = sampling.choose(self._scores, self.generator)
            self._unrun = [token]
            self.num_tokens += 1
            self.ended = token in self._ends
            text = self._decoder.add(token)
            if self.ended or number == sampling.max_new_tokens - 1:
                text += self._decoder.rest()
            yield Piece(token, self.num_tokens - 1, text, False, tuple(windows))
            if self.ended:
                return

    @torch.no_grad()
    def _run(self, ids: list[int]) -> list[Window]:
        """Run what is not run yet, and these; returns the windows that begin, first token first."""
        tokens = self._unrun + ids
        if not tokens:
            return []
        start = self.num_tokens - len(self._unrun)
        given = torch.tensor([tokens], device=self.model.device)
        output = self.model(given, cache=self._cache, path=self.path, logits_to_keep=1)
        scores = output.logits[0, -1].float()
        if not bool(scores.isfinite().all()):
            raise UserError("the model's scores are not finite: it has diverged; take an earlier checkpoint")
        self._scores, self._unrun = scores, []
        self.num_tokens = start + len(tokens)
        windows = [window for window in _read_windows(self.model.config, output.routing) if window.start >= start]
        return sorted(windows, key=lambda window: window.start)


def stream_text(
    model: LoLForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: int | float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    path: Sequence[int] | None = None,
) -> Iterator[Piece]:
    """Continue a prompt, which counts as the beginning of a document, piece by piece.

        for piece in stream_text(model, tokenizer, "The ", max_new_tokens=40):
            print(piece.text, end="", flush=True)

    Args:
        max_new_tokens: Generate at most so many tokens; the end of the document ends it earlier.
        temperature: 0 takes the most probable token every time.
        top_k: Sample among so many most probable tokens.
        seed: Decides the sample: the text is that of `model.generate` after `torch.manual_seed(seed)`.
        path: One block per depth that every window is to run; -1 leaves a depth to the router.

    Returns:
        The pieces of prompt and continuation. Mistakes are raised here, not by the first piece; closing the iterator
        stops the model.

    Raises:
        UserError: a number that cannot work, or a path that does not fit the model.
    """
    sampling = Sampling(max_new_tokens, temperature, top_k)
    generator = torch.Generator(model.device).manual_seed(seed)
    return Document(model, tokenizer, path=path, generator=generator).write(prompt, sampling)


def generate_text(
    model: LoLForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: int | float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    path: Sequence[int] | None = None,
) -> str:
    """Prompt and continuation: the text of `stream_text`, whose arguments and errors these are."""
    pieces = stream_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        path=path,
    )
    return "".join(piece.text for piece in pieces)


def _read_windows(config: LoLConfig, routing: Routing) -> Iterator[Window]:
    """The windows of a pass over one row, those that began earlier too."""
    assert routing.experts is not None
    assert routing.weights is not None
    assert routing.first_window is not None
    size = config.core_window
    weights, first = routing.weights[0].tolist(), routing.first_window[0].tolist()
    for depth, experts in enumerate(routing.experts[0].tolist()):
        shift = config.window_shift(depth)
        for place, expert in enumerate(experts):
            number = first[depth] + place
            start, end = (0, None) if size is None else (max(number * size - shift, 0), (number + 1) * size - shift)
            if expert >= 0:
                yield Window(depth, number, start, end, expert, weights[depth][place])


def _end_ids(model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The tokens that end a document: the model's own, else the tokenizer's."""
    config = model.generation_config
    given = None if config is None else config.eos_token_id
    given = tokenizer.eos_token_id if given is None else given
    listed = given if isinstance(given, list) else [given]
    return {int(token) for token in listed if token is not None}


class _Decoder:
    """The text of tokens as they come, such that the pieces together are the text of all.

    A character may be cut over several tokens. Its beginning decodes to one U+FFFD at the end of the text, and nothing
    before that changes any more; so that one is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        # Some decoders drop the space in front of the first token, so the token before stands in front.
        self.before: list[int] = []
        self.waiting: list[int] = []
        self.shown = 0

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self.waiting.append(token)
        text = self._text()
        certain = text.removesuffix("\ufffd")
        piece, self.shown = certain[self.shown :], max(self.shown, len(certain))
        if certain == text:
            self.before, self.waiting, self.shown = self.waiting if text else self.before, [], 0
        return piece

    def rest(self) -> str:
        """What is held back, for nothing more may come."""
        text = self._text()
        piece, self.shown = text[self.shown :], len(text)
        return piece

    def _text(self) -> str:
        return self._decode(self.before + self.waiting)[len(self._decode(self.before)) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
