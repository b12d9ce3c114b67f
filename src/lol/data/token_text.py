"""The text of tokens as they come: whole characters only, and the parts together are the text of all."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

BROKEN = "\ufffd"
# A character is at most four bytes, so at most three stand at the end for one that is not whole yet.
_UNSETTLED = 3
# Tokens of a context in which whole characters are looked for.
_CONTEXT = 8


class TokenText:
    """Text of tokens, held back while its last character is not whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, context: Sequence[int] = (), skip_special: bool = True):
        """
        Args:
            context: Tokens in front of the first one, whose text is not given again.
            skip_special: Whether special tokens have no text.
        """
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self.length = 0
        """Characters that were let through."""
        self.start = 0
        """Where the text of the last token begins; that of a token within a character, where the character does."""
        # Tokens of whole characters, decoded in front of new ones: some decoders drop the space of a text's first
        # token. A context that ends within a character has none; the character's other half cannot be given back.
        tails = (list(context)[-size:] for size in range(1, min(len(context), _CONTEXT) + 1))
        self._before = next((tail for tail in tails if (text := self._decode(tail)) and BROKEN not in text), [])
        self._waiting: list[int] = []
        self._text = ""
        self._given = 0

    def add(self, token: int) -> str:
        """The text that this token settles; where tokens share a character, the last of them has it."""
        self._waiting.append(token)
        before, self._text = self._text, self._text_waiting()
        text = self._text
        self.start = max(self.start, self.length - self._given + _new_from(before, text))
        whole = len(text.rstrip(BROKEN))
        settled = text[: max(whole, len(text) - _UNSETTLED)]
        piece = self._give(settled)
        if text and len(settled) == len(text):
            self._before, self._waiting, self._text, self._given = self._waiting, [], "", 0
        return piece

    def end(self) -> str:
        """What is left when no token follows."""
        return self._give(self._text)

    def _give(self, settled: str) -> str:
        piece = settled[self._given :]
        self._given += len(piece)
        self.length += len(piece)
        return piece

    def _text_waiting(self) -> str:
        before, text = self._decode(self._before), self._decode(self._before + self._waiting)
        # Byte-fallback decoders give up a whole run of bytes while its last character is not whole.
        return text[len(before) :] if text.startswith(before) else self._decode(self._waiting)

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=self.skip_special, clean_up_tokenization_spaces=False)
        return str(text)


def _new_from(before: str, text: str) -> int:
    """Where a text differs from what it was with a token less."""
    if text == before:
        # The token goes on with a character, or has no text.
        return len(text) - text.endswith(BROKEN)
    pairs = zip(before, text, strict=False)
    return next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(before), len(text)))
