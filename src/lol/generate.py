"""Text from a trained model, token by token: a document that grows in its cache, and the windows that begin in it.

`generate_text` is the whole text, `stream_text` the same in pieces; a `Document` may be written on again and again, and
only its new tokens are run. For beams, batches and other samplers there is transformers' own `model.generate`, whose
greedy and sampled text this is, seed by seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedTokenizerFast

from lol.data.token_text import TokenText
from lol.data.tokenizer import encode_prompt
from lol.decoding import Decoding, GivenPath, Sampling, Window, end_ids, seeded
from lol.errors import UserError
from lol.model.base import check_ids
from lol.model.lm import LoLForCausalLM

__all__ = ["Document", "Piece", "Sampling", "Window", "generate_text", "stream_text"]


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
        path: GivenPath | None = None,
        path_weight: float | None = None,
        generator: torch.Generator | None = None,
    ):
        """Begin a document.

        Args:
            model: In eval mode.
            tokenizer: Its own.
            path: As `self.path`.
            path_weight: Weight of a forced block's update; `None` takes the router's own probability of it.
            generator: Source of the samples, on the model's device. Default: one of seed 0.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.ended = False
        """Whether the model has ended the document. There is nothing to write after that."""
        self._decoding = Decoding(model, path=path, path_weight=path_weight, generator=generator)
        self._text = TokenText(tokenizer)
        self._ends = end_ids(model, tokenizer)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, those included that are not run yet."""
        return self._decoding.num_tokens

    @property
    def path(self) -> list[int] | list[list[int]] | None:
        """The blocks that windows which begin from now on are to run: one per depth, for every window, or per depth a
        row of one per window, windows behind its end being free. -1 leaves a window to the router, `None` all of them.
        With one block in every row it holds for every window. Windows that have begun keep their block.

        Raises:
            UserError: when set to a path that does not fit the model.
        """
        return None if self._decoding.path is None else self._decoding.path.tolist()

    @path.setter
    def path(self, path: GivenPath | None) -> None:
        self._decoding.path = path

    def write(self, text: str = "", sampling: Sampling | None = None) -> Iterator[Piece]:
        """Add a text to the document and let the model go on from it.

        Args:
            text: Of the first one the tokenizer makes the beginning of a document; a later one is added as it stands,
                cut into tokens by itself. Empty: the model goes on.
            sampling: Default: `Sampling()`.

        Returns:
            The pieces, those of the given text first. Nothing is run before the first is asked for.

        Raises:
            UserError: the document has ended, there is no token to begin with, or the model does not have a token.
        """
        if self.ended:
            raise UserError("the document has ended: begin a new one")
        ids = encode_prompt(self.tokenizer, text, begins=self.num_tokens == 0)
        if not ids and not self.num_tokens:
            raise UserError("there is nothing to go on from: give a prompt, or a tokenizer that begins documents (BOS)")
        check_ids(torch.tensor(ids, dtype=torch.long), self.model.config.vocab_size)
        return self._pieces(ids, sampling or Sampling())

    def _pieces(self, ids: list[int], sampling: Sampling) -> Iterator[Piece]:
        # All at once: what is left in the middle is in the document all the same.
        texts = [self._text.add(id_) for id_ in ids]
        for token, text in zip(chain.from_iterable(self._decoding.read(ids)), texts, strict=True):
            yield Piece(token.id, token.position, text, True, token.windows)
        for number, token in enumerate(self._decoding.write(sampling), start=1):
            self.ended = token.id in self._ends
            text = self._text.add(token.id)
            if self.ended or number == sampling.max_new_tokens:
                text += self._text.end()
            yield Piece(token.id, token.position, text, False, token.windows)
            if self.ended:
                return


def stream_text(
    model: LoLForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: int | float = 0.8,
    top_k: int | None = 50,
    top_p: int | float = 1.0,
    seed: int = 0,
    path: GivenPath | None = None,
    path_weight: float | None = None,
) -> Iterator[Piece]:
    """Continue a prompt, which counts as the beginning of a document, piece by piece.

        for piece in stream_text(model, tokenizer, "The ", max_new_tokens=40):
            print(piece.text, end="", flush=True)

    Args:
        max_new_tokens: Generate at most so many tokens; the end of the document ends it earlier.
        temperature: 0 takes the most probable token every time.
        top_k: Sample among so many most probable tokens; `None`: among all.
        top_p: Sample among the most probable tokens that have this much probability together.
        seed: Decides the sample: the text is that of `model.generate` after `torch.manual_seed(seed)`.
        path: One block per depth that every window is to run, or a row per depth of one block per window; -1 leaves a
            window to the router (`Document.path`).
        path_weight: Weight of a forced block's update; `None` takes the router's own probability of it.

    Returns:
        The pieces of prompt and continuation. Mistakes are raised here, not by the first piece; closing the iterator
        stops the model.

    Raises:
        UserError: a number that cannot work, or a path that does not fit the model.
    """
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p)
    generator = seeded(seed, model.device)
    return Document(model, tokenizer, path=path, path_weight=path_weight, generator=generator).write(prompt, sampling)


def generate_text(
    model: LoLForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: int | float = 0.8,
    top_k: int | None = 50,
    top_p: int | float = 1.0,
    seed: int = 0,
    path: GivenPath | None = None,
    path_weight: float | None = None,
) -> str:
    """Prompt and continuation: the text of `stream_text`, whose arguments and errors these are."""
    pieces = stream_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        path=path,
        path_weight=path_weight,
    )
    return "".join(piece.text for piece in pieces)
