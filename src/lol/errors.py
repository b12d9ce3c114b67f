"""The one exception for mistakes a user can make, and the one mistake that any text may hold."""


class UserError(ValueError):
    """A mistake in the input; the message names the fix. The CLI prints it and exits with 2."""


def is_whole_text(text: str) -> bool:
    """Whether a text is all characters: bytes that are no UTF-8 reach Python as surrogates, which tokenizers refuse."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
