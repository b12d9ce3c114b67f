"""Text of tokens as they come: joined it is the decoder's, and none says too much."""

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lol.data.token_text import BROKEN, TokenText
from model_cases import bounded
from token_cases import TOKENIZERS


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> tuple[list[str], list[int]]:
    text = TokenText(tokenizer)
    given_, starts = [], []
    for token in ids:
        given_.append(text.add(token))
        starts.append(text.start)
    return [*given_, text.end()], starts


@bounded(150)
@given(ids=st.lists(st.integers(0, 256), max_size=24))
def test_any_bytes_come_out_as_the_decoder_writes_them(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte level"]
    given_, starts = pieces(tokenizer, ids)
    assert "".join(given_) == tokenizer.decode(ids, skip_special_tokens=True)
    assert starts == sorted(starts)


@bounded(80)
@given(text=st.text(max_size=12), name=st.sampled_from(sorted(TOKENIZERS)))
def test_characters_come_whole(text: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    offset = 6 if name == "byte fallback" else 0
    ids = [offset + byte for byte in text.encode()] if offset else tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    given_, starts = pieces(tokenizer, ids)
    assert "".join(given_) == whole
    if BROKEN not in text and name == "byte level":
        assert BROKEN not in "".join(given_)
        # The bytes of a character begin where it does, and it comes with the last of them.
        expected = [place for place, character in enumerate(text) for _ in character.encode()]
        assert starts == expected
        assert [bool(piece) for piece in given_[:-1]] == [
            byte == len(character.encode()) - 1 for character in text for byte in range(len(character.encode()))
        ]


def test_a_continuation_keeps_its_first_space() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    assert tokenizer.decode([2, 3]) == "the a"
    text = TokenText(tokenizer, context=[2])
    assert text.add(3) + text.end() == " a"
    # A context that ends within a character does not eat the next one.
    text = TokenText(tokenizer, context=[6 + 0xE2])
    assert "".join([text.add(6 + byte) for byte in "é".encode()]) == "é"
