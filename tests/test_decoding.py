"""The token loop: passes of a bounded size, log-probabilities, paths per window, and choices among scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lol import LoLForCausalLM, decoding, record_paths
from lol.decoding import Decoding, Sampling
from lol.train.loading import load_model

GREEDY = Sampling(6, temperature=0)
IDS = torch.randint(3, 280, (30,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def model(trained: Path) -> LoLForCausalLM:
    """Windows of 8 tokens, shifted by 4, at 4 depths of 3 blocks, spread over them by hand."""
    model, _ = load_model(trained)
    with torch.no_grad():
        model.model.router.weight.mul_(300)
    return model


def logprobs_of(model: LoLForCausalLM, ids: list[int], **options) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), **options).logits[0].log_softmax(-1)


@pytest.mark.parametrize("scored", [False, True])
def test_bounded_passes_say_what_one_says(model: LoLForCausalLM, monkeypatch: pytest.MonkeyPatch, scored: bool):
    """Their borders lie inside of windows and between them."""
    monkeypatch.setattr(decoding, "CHUNK", 7)
    text = Decoding(model, num_top=3)
    passes = list(text.read(IDS, scored))
    assert [len(tokens) for tokens in passes] == [7, 7, 7, 7, 2]
    given = [token for tokens in passes for token in tokens]
    written = list(text.write(GREEDY))
    tokens = given + written
    ids = [token.id for token in tokens]
    assert ids[:30] == IDS
    assert [token.position for token in tokens] == list(range(36))
    expected = logprobs_of(model, ids)
    for token in tokens[1:] if scored else written:
        place = expected[token.position - 1]
        assert token.logprob == pytest.approx(float(place[token.id]), abs=1e-4)
        assert [value for _, value in token.top] == pytest.approx(place.topk(3).values.tolist(), abs=1e-4)
        assert all(value == pytest.approx(float(place[id_]), abs=1e-4) for id_, value in token.top)
    unscored = given[:1] if scored else given
    assert {(token.logprob, token.top) for token in unscored} == {(None, None)}
    assert [token.id for token in written] == [int(place.argmax()) for place in expected[29:-1]]


def test_the_path_is_the_record_of_what_was_run(model: LoLForCausalLM, monkeypatch: pytest.MonkeyPatch):
    """However it was cut into passes, and whichever windows still go on."""
    monkeypatch.setattr(decoding, "CHUNK", 7)
    columns = ["depth", "window", "start", "end", "expert"]
    for size in (1, 4, 13, 30):
        text = Decoding(model)
        told = [window for tokens in text.read(IDS[:size]) for token in tokens for window in token.windows]
        table = record_paths(model, [IDS[:size]])
        path = text.windows()
        assert [tuple(vars(window)[name] for name in columns) for window in path] == list(
            table[columns].itertuples(index=False, name=None)
        )
        assert [window.weight for window in path] == pytest.approx(table["weight"].tolist(), abs=1e-4)
        assert [(w.depth, w.window) for w in path] == sorted((w.depth, w.window) for w in told)


def test_blocks_per_window_and_their_weight(model: LoLForCausalLM):
    """A path may name windows that are still to come; those it does not name are free."""
    path = torch.tensor([[0, 1, 2, 0, -1], [1, 1, -1, 2, 2], [-1] * 5, [2, 0, 1, 2, 0]])
    text = Decoding(model, path=path, path_weight=0.25)
    list(text.read(IDS))
    list(text.write(Sampling(20, temperature=0)))
    named = 0
    for window in text.windows():
        block = int(path[window.depth, window.window]) if window.window < 5 else -1
        if block >= 0:
            named += 1
            assert (window.expert, window.weight) == (block, 0.25)
        else:
            assert window.weight != 0.25
    assert named == 13
    assert max(window.window for window in text.windows()) > 4


def test_reading_may_be_left_between_two_passes(model: LoLForCausalLM, monkeypatch: pytest.MonkeyPatch):
    """What was not read yet is read before the next token is written, and its windows are told then."""
    monkeypatch.setattr(decoding, "CHUNK", 7)
    whole, left = Decoding(model), Decoding(model)
    list(whole.read(IDS))
    reading = left.read(IDS)
    told = [window for token in next(reading) for window in token.windows]
    reading.close()
    assert (left.num_run, left.num_tokens) == (7, 30)
    written = list(left.write(GREEDY))
    assert [token.id for token in written] == [token.id for token in whole.write(GREEDY)]
    told += [window for token in written for window in token.windows]
    assert [(w.depth, w.window) for w in sorted(told, key=lambda w: (w.depth, w.window))] == [
        (w.depth, w.window) for w in left.windows()
    ]
    assert (left.num_run, left.num_tokens) == (35, 36)


# --- Choices

SCORES = torch.tensor([1.0, 3.0, 2.0, 3.0 - 1e-6, -30.0])


def chosen(**options) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {Sampling(1, **options).choose(SCORES, generator) for _ in range(300)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0}, {1}),
        ({"temperature": 1.0, "top_k": None}, {0, 1, 2, 3}),
        ({"temperature": 100.0, "top_k": None}, {0, 1, 2, 3, 4}),
        ({"temperature": 100.0, "top_k": 3}, {1, 2, 3}),
        ({"temperature": 1.0, "top_k": None, "top_p": 0.0}, {1}),
        ({"temperature": 1.0, "top_k": None, "top_p": 0.5}, {1, 3}),
        # After top_k, the shares are those of what it left.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.49}, {1}),
        ({"temperature": 1e-320}, {1}),
        ({"temperature": 1e-9, "top_k": None}, {1}),
    ],
    ids=str,
)
def test_choices(options: dict, expected: set[int]):
    assert chosen(**options) == expected
