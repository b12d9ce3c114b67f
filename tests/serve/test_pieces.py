"""Pieces of growing text: joined they are the text, and none says too much."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lol.serve.pieces import BROKEN, StopStrings, TokenNames, TokenText
from model_cases import bounded


def byte_level() -> PreTrainedTokenizerFast:
    """A byte is a token, and 256 is the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece does it: words with a mark for the space, which the first word of a text loses, and bytes."""
    vocabulary = {"<unk>": 0, "</s>": 1, "▁the": 2, "▁a": 3, "a": 4, "the": 5}
    vocabulary |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


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


@bounded(200)
@given(
    parts=st.lists(st.text("ab", max_size=3), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_stop_strings_against_the_whole_text(parts: list[str], stops: list[str]) -> None:
    text = "".join(parts)
    filter_ = StopStrings(stops)
    given_ = []
    for part in parts:
        given_.append(filter_.add(part))
        if filter_.stopped:
            break
    if not filter_.stopped:
        given_.append(filter_.end())
    # Character by character: the first stop string that is complete ends the text; of several, the longest.
    expected = text
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            expected = text[: end - max(map(len, complete))]
            break
    assert "".join(given_) == expected
    assert filter_.stopped == (expected != text or any(stop in text for stop in stops))


def test_text_is_held_back_no_longer_than_needed() -> None:
    filter_ = StopStrings(["end."])
    assert [filter_.add(part) for part in ("the e", "n", "ds, en", "d", ".x")] == ["the ", "", "ends, ", "", ""]
    assert filter_.stopped


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_tokens_have_names_of_their_own(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    names = TokenNames(tokenizer)
    all_names = [names.name(token) for token in range(len(tokenizer))]
    if name == "byte level":
        assert len(set(all_names)) == len(all_names)
        assert [all_names[token] for token in tokenizer.encode("a <", add_special_tokens=False)] == ["a", " ", "<"]
        assert all_names[256] == "<|eos|>"
        assert all(BROKEN not in text for text in all_names)
    else:
        assert all_names[2:6] == [" the", " a", "a", "the"]
        assert all_names[6 + 0xE2] == "<0xE2>"
    assert names.name(10_000) == "<10000>"


def test_the_models_tokens_are_named_alike_alone_and_in_text(served) -> None:
    torch.manual_seed(1)
    ids = torch.randint(3, 280, (30,)).tolist()
    names = TokenNames(served.tokenizer)
    whole = [names.name(token) for token in ids if BROKEN not in served.tokenizer.decode([token])]
    assert all(text in served.tokenizer.decode(ids) for text in whole)
