"""Words for tokens, and text that grows without anything of a stop string."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerFast

from lol.data.token_text import BROKEN


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
