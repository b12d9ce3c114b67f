"""Text in pieces: the text of transformers' `generate`, the windows of `record_paths`, and documents that go on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from lol import LoLForCausalLM, UserError, force_path, record_paths
from lol.data.tokenizer import train_tokenizer
from lol.generate import Document, Piece, Sampling, Window, generate_text, stream_text
from lol.train.loading import load_model

PROMPT = "naïve library of layers 日本"
NEW = 16


@pytest.fixture(scope="module")
def loaded(trained: Path) -> tuple[LoLForCausalLM, PreTrainedTokenizerFast]:
    """Windows of 8 tokens, shifted by 4, at 4 depths of 3 blocks, spread over them by hand."""
    model, tokenizer = load_model(trained)
    with torch.no_grad():
        model.model.router.weight.mul_(300)
    return model, tokenizer


def ids_of(pieces: list[Piece]) -> list[int]:
    return [piece.token for piece in pieces]


def written(model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, **options) -> list[int]:
    """What transformers writes."""
    inputs = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(options.pop("seed", 0))
    return model.generate(**inputs, **options)[0].tolist()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"temperature": 0}, {"do_sample": False}),
        ({"temperature": 0.8}, {"do_sample": True, "temperature": 0.8, "top_k": 50}),
        ({"temperature": 2.0, "top_k": 3, "seed": 7}, {"do_sample": True, "temperature": 2.0, "top_k": 3, "seed": 7}),
        (
            {"temperature": 1.5, "top_k": None, "top_p": 0.7},
            {"do_sample": True, "temperature": 1.5, "top_k": 0, "top_p": 0.7},
        ),
        ({"temperature": 0, "path": [2, -1, 0, 1]}, {"do_sample": False, "path": [2, -1, 0, 1]}),
    ],
    ids=["greedy", "sampled", "sampled otherwise", "of a nucleus", "forced"],
)
def test_the_pieces_are_the_text_of_generate(loaded, ours: dict, theirs: dict):
    model, tokenizer = loaded
    pieces = list(stream_text(model, tokenizer, PROMPT, max_new_tokens=NEW, **ours))
    ids = written(model, tokenizer, PROMPT, max_new_tokens=NEW, **theirs)
    assert ids_of(pieces) == ids
    assert [piece.position for piece in pieces] == list(range(len(ids)))
    text = "".join(piece.text for piece in pieces)
    assert text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert text.startswith(PROMPT)
    given = [piece.token for piece in pieces if piece.given]
    assert given == tokenizer(PROMPT)["input_ids"] == ids[: len(given)]


def test_the_text_is_that_of_its_pieces(loaded):
    options = {"max_new_tokens": 6, "temperature": 2.0, "top_k": None, "top_p": 0.9, "seed": 5, "path": [2, -1, 0, 1]}
    assert generate_text(*loaded, "a b", **options) == "".join(
        piece.text for piece in stream_text(*loaded, "a b", **options)
    )


@pytest.mark.parametrize("path", [None, [2, -1, 0, 1]], ids=["free", "forced"])
def test_the_windows_are_those_of_the_record(loaded, path: list[int] | None):
    """Every window of the tokens that were run, told once and in order, at the latest with its second token."""
    model, tokenizer = loaded
    pieces = list(stream_text(model, tokenizer, PROMPT, max_new_tokens=NEW, path=path))
    told = [(piece, window) for piece in pieces for window in piece.windows]
    with force_path(model, path or [-1] * 4):
        # The last token was not run.
        table = record_paths(model, [ids_of(pieces)[:-1]])
    columns = ["depth", "window", "start", "expert"]
    recorded = sorted(table[columns].itertuples(index=False, name=None))
    assert sorted((w.depth, w.window, w.start, w.expert) for _, w in told) == recorded
    weights = {(line.depth, line.window): line.weight for line in table.itertuples()}
    for piece, window in told:
        assert window.weight == pytest.approx(weights[window.depth, window.window], abs=1e-4)
        assert window.end - (window.window * 8 - window.depth % 2 * 4) == 8
        assert piece.position - window.start == (0 if piece.given else 1)
    assert [w.start for _, w in told] == sorted(w.start for _, w in told)
    assert len({w.expert for _, w in told}) > 1


def test_a_document_is_one_window_with_full_attention(loaded):
    _, tokenizer = loaded
    full = LoLForCausalLM(type(loaded[0].config)(**loaded[0].config.to_dict() | {"core_attention": "full"})).eval()
    pieces = list(stream_text(full, tokenizer, "a", max_new_tokens=20))
    told = [window for piece in pieces for window in piece.windows]
    assert [(w.depth, w.window, w.start, w.end) for w in told] == [(depth, 0, 0, None) for depth in range(4)]


def test_a_text_goes_on_and_only_new_tokens_are_run(loaded):
    model, tokenizer = loaded
    document = Document(model, tokenizer)
    run = []
    handle = model.register_forward_pre_hook(lambda _module, args: run.append(args[0].shape[1]))
    pieces = []
    for text in ("library of", " layers", "", "é"):
        pieces += document.write(text, Sampling(5, temperature=0))
    handle.remove()
    ids = ids_of(pieces)
    # Everything but the last token, each once.
    assert sum(run) == len(ids) - 1 == document.num_tokens - 1
    assert run[1:5] == [1] * 4
    # Where the model wrote, it wrote what the whole text before makes most probable.
    for piece in pieces:
        if not piece.given:
            assert model(torch.tensor([ids[: piece.position]])).logits[0, -1].argmax() == piece.token
    assert [piece.position for piece in pieces] == list(range(len(ids)))
    windows = sorted((w.depth, w.window, w.expert) for piece in pieces for w in piece.windows)
    table = record_paths(model, [ids[:-1]])
    assert windows == sorted(table[["depth", "window", "expert"]].itertuples(index=False, name=None))


def test_a_path_holds_from_where_it_is_set(loaded):
    model, tokenizer = loaded
    document = Document(model, tokenizer)
    pieces = list(document.write("library of layers", Sampling(10)))
    begins = document.num_tokens - 1
    document.path = [2, 2, 2, -1]
    pieces += document.write("", Sampling(20))
    until = document.num_tokens - 1
    document.path = None
    pieces += document.write("", Sampling(20))
    windows = [window for piece in pieces for window in piece.windows]
    forced = [w for w in windows if begins <= w.start < until and w.depth < 3]
    assert len(forced) >= 6
    assert {w.expert for w in forced} == {2}
    free = [w for w in windows if (w.start < begins or w.start >= until) and w.depth < 3]
    assert {w.expert for w in free} != {2}


@pytest.mark.parametrize("after", [1, 3, 4, 5, 7])
def test_an_iterator_may_be_left_anywhere(loaded, after: int):
    """Also within the prompt. What comes then is what would have come."""
    model, tokenizer = loaded
    whole = list(Document(model, tokenizer).write("abc", Sampling(5, temperature=0)))
    document = Document(model, tokenizer)
    first = document.write("abc", Sampling(5, temperature=0))
    begun = list(itertools.islice(first, after))
    first.close()
    rest = list(document.write("", Sampling(5, temperature=0)))
    skipped = 4 - after if after < 4 else 0
    ids = ids_of(begun) + ids_of(whole)[after : after + skipped] + ids_of(rest)
    assert ids[: len(whole)] == ids_of(whole)


def test_the_end_of_the_document_ends_the_text(loaded):
    model, tokenizer = loaded
    ids = written(model, tokenizer, "abc", max_new_tokens=9, do_sample=False)
    model.generation_config.eos_token_id, before = ids[6], model.generation_config.eos_token_id
    try:
        document = Document(model, tokenizer)
        pieces = list(document.write("abc", Sampling(9, temperature=0)))
        assert ids_of(pieces) == ids[: ids.index(ids[6], 4) + 1]
        assert document.ended
        with pytest.raises(UserError, match="begin a new one"):
            document.write("more")
        model.generation_config.eos_token_id = [1, ids[6]]
        assert ids_of(list(Document(model, tokenizer).write("abc", Sampling(9, temperature=0)))) == ids_of(pieces)
    finally:
        model.generation_config.eos_token_id = before


def test_a_text_that_is_refused_leaves_the_document_as_it_was(loaded):
    model, tokenizer = loaded
    document = Document(model, tokenizer)
    pieces = list(document.write("abc", Sampling(5, temperature=0)))
    large = train_tokenizer(["zebra quagga okapi aardvark pangolin"] * 9, 290)
    document.tokenizer = large
    with pytest.raises(UserError, match="outside of the vocabulary"):
        list(document.write("zebra quagga okapi aardvark pangolin"))
    document.tokenizer = tokenizer
    pieces += document.write("", Sampling(5, temperature=0))
    assert ids_of(pieces) == written(model, tokenizer, "abc", max_new_tokens=10, do_sample=False)


def test_characters_come_whole(loaded):
    """The bytes of a character come as tokens of their own."""
    model, tokenizer = loaded
    document = Document(model, tokenizer)
    pieces = list(document.write("é日🙂é", Sampling(1)))
    assert [piece.text for piece in pieces if piece.given] == ["", "", "é", "", "", "日", "", "", "", "🙂", "", "é"]


def test_a_character_that_is_cut_by_the_end_is_shown(loaded):
    model, tokenizer = loaded
    half = tokenizer("é")["input_ids"][1]
    document = Document(model, tokenizer)
    next(document.write("a", Sampling(1)))
    with torch.no_grad():
        document._decoding._scores = torch.zeros(280)
        document._decoding._scores[half] = 99
    piece = list(document.write("", Sampling(1, temperature=0)))[-1]
    assert (piece.token, piece.text) == (half, "\ufffd")


def test_mistakes_are_raised_at_once(loaded):
    model, tokenizer = loaded
    for given, message in (
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1, not 1.5"),
        ({"top_p": float("nan")}, "top_p must be from 0 to 1"),
        ({"path": [0, 1]}, "path has 2 depths, but 4 are run"),
        ({"path": [0, 1, 2, 3]}, "blocks 0 to 2"),
    ):
        with pytest.raises(UserError, match=message):
            stream_text(model, tokenizer, "a", **({"max_new_tokens": 1} | given))
    bare = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(["a b c"], 259).backend_tokenizer)
    bare.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match="nothing to go on from"):
        stream_text(model, bare, "", max_new_tokens=1)


def test_a_model_that_diverged_is_named(trained: Path):
    model, tokenizer = load_model(trained)
    model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="diverged"):
        generate_text(model, tokenizer, "a", max_new_tokens=1)


def test_windows_are_plain_values():
    assert Window(0, 1, 8, 16, 2, 0.5) == Window(depth=0, window=1, start=8, end=16, expert=2, weight=0.5)
