"""Names of tokens, and stop strings that never show."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lol.data.token_text import BROKEN
from lol.serve.pieces import StopStrings, TokenNames
from model_cases import bounded
from token_cases import TOKENIZERS


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
