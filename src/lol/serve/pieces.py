"""Text that grows token by token: whole characters only, and nothing of a stop string.

Both filters hold back what is not settled yet, so the pieces that they let through, joined, are the text.
"""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerFast

BROKEN = "\ufffd"
# A character is at most four bytes, so at most three stand at the end for one that is not whole yet.
_UNSETTLED = 3
# Tokens of a context in which whole characters are looked for.
_CONTEXT = 8


class TokenText:
    """Text of tokens, held back while its last character is not whole. Special tokens have no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, context: Sequence[int] = ()):
        """
        Args:
            context: Tokens in front of the first one, whose text is not given again.
        """
        self.tokenizer = tokenizer
        self.length = 0
        """Characters that were let through."""
        self.start = 0
        """Where the text of the last token begins; that of a token within a character, where the character does."""
        # Tokens of whole characters, decoded in front of new ones: some decoders drop the space of a text's first
        # token. A context that ends within a character has none; the character's other half cannot be given back.
        tails = (list(context)[-size:] for size in range(1, min(len(context), _CONTEXT) + 1))
        self._before = next((tail for tail in tails if (text := self._decode(tail)) and BROKEN not in text), [])
        self._waiting: list[int] = []
        self._given = 0

    def add(self, token: int) -> str:
        """The text that this token settles."""
        before = self._new_text()
        self._waiting.append(token)
        text = self._new_text()
        self.start = max(self.start, self.length - self._given + _new_from(before, text))
        whole = len(text.rstrip(BROKEN))
        settled = text[: max(whole, len(text) - _UNSETTLED)]
        piece = self._give(settled)
        if text and len(settled) == len(text):
            self._before, self._waiting, self._given = self._waiting, [], 0
        return piece

    def end(self) -> str:
        """What is left when no token follows."""
        return self._give(self._new_text())

    def _give(self, settled: str) -> str:
        piece = settled[self._given :]
        self._given += len(piece)
        self.length += len(piece)
        return piece

    def _new_text(self) -> str:
        before, text = self._decode(self._before), self._decode(self._before + self._waiting)
        # Byte-fallback decoders give up a whole run of bytes while its last character is not whole.
        return text[len(before) :] if text.startswith(before) else self._decode(self._waiting)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _new_from(before: str, text: str) -> int:
    """Where a text differs from what it was with a token less."""
    if text == before:
        # The token goes on with a character, or has no text.
        return len(text) - text.endswith(BROKEN)
    pairs = zip(before, text, strict=False)
    return next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(before), len(text)))


class StopStrings:
    """Lets text through up to the stop string that is complete first, and nothing that might become part of one."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def add(self, text: str) -> str:
        """The text that is now sure to be none of a stop string's."""
        text, self._held = self._held + text, ""
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self.stops if stop in text]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What is left when no text follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of the text that a stop string begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class TokenNames:
    """How single tokens are called in logprobs: by their text; where that is no whole character, or none, by their
    piece of the vocabulary, so that tokens keep names of their own."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        # In front of each token stands a letter: some decoders drop the space of the first token.
        self._letter = tokenizer.encode("a", add_special_tokens=False)
        self.name = lru_cache(maxsize=100_000)(self._name)

    def _name(self, token: int) -> str:
        text = self._decode([*self._letter, token])[len(self._decode(self._letter)) :]
        if text and BROKEN not in text:
            return text
        return str(self.tokenizer.convert_ids_to_tokens(token) or f"<{token}>")

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
