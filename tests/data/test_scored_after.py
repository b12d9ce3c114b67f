"""Learning only what follows a word: labels in packed rows, and who counts them."""

import dataclasses
import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from lol.data.collate import collate_packed
from lol.data.packing import PackedDocuments, held_out_rows
from lol.data.text import open_documents
from lol.data.tokenizer import load_tokenizer, word_tokenizer
from lol.errors import UserError
from lol.model.lm import count_targets
from lol.train.config import EvalConfig
from lol.train.evaluate import evaluate
from lol.train.session import prepare
from lol.train.step import draw_batches, take_step
from small_run import small_config

WORDS = ("one", "two", "three", "four", "is", "up", "down")
TEXTS = ["one two is two one", "three is three", "four four four is", "two one three is three one two is two"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    rows = [{"text": text, "way": WORDS[5 + k % 2]} for k, text in enumerate(TEXTS * 20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    word_tokenizer(WORDS).save_pretrained(tmp_path / "words")
    return file


@pytest.mark.parametrize("length", [6, 9, 40])
def test_labels_are_the_ids_behind_the_word_in_each_part(corpus, length):
    tokenizer = word_tokenizer(WORDS)
    documents = open_documents(str(corpus), router_only_column="way")
    packed = PackedDocuments(documents, tokenizer, length, scored_after="is", shuffle_buffer=3)
    plain = PackedDocuments(documents, tokenizer, length, shuffle_buffer=3)
    marker, scored = tokenizer.convert_tokens_to_ids("is"), 0
    for row, other in islice(zip(packed, plain, strict=True), 60):
        assert {name: tensor.tolist() for name, tensor in other.items()} == {
            name: tensor.tolist() for name, tensor in row.items() if name != "labels"
        }
        seen, expected = False, []
        columns = (row[name].tolist() for name in ("input_ids", "position_ids", "router_only_ids"))
        for id_, position, hidden in zip(*columns, strict=True):
            seen = seen and position > 0
            expected.append(id_ if seen and hidden < 0 else -100)
            seen = seen or id_ == marker
        assert row["labels"].tolist() == expected
        assert count_targets(row) == sum(label >= 0 for label in expected)
        assert collate_packed([row])["labels"].tolist() == [expected]
        scored += count_targets(row)
    assert scored > 0


def test_the_word_has_to_be_one_token(corpus, tokenizer):
    documents = open_documents(str(corpus))
    with pytest.raises(UserError, match="no single token"):
        PackedDocuments(documents, tokenizer, 8, scored_after="a word that it never saw")
    with pytest.raises(UserError, match="no single token"):
        held_out_rows(documents, word_tokenizer(WORDS), 8, 1, "one two")
    with pytest.raises(UserError, match=r"eval\.ngrams"):
        dataclasses.replace(small_config(corpus, data={"scored_after": "is"}), eval=EvalConfig(ngrams=True))


def test_a_run_learns_and_measures_what_follows_the_word(corpus, tmp_path):
    data = {"tokenizer": str(tmp_path / "words"), "router_only_column": "way", "held_out_source": str(corpus)}
    model = {"router_only_tokens": True, "router_noise_max": 0.0}
    data |= {"scored_after": "is"}
    config = small_config(corpus, model=model, data=data, growth={"initial_depth": None})
    session = prepare(config, tmp_path / "run", None)
    batches = draw_batches(session, iter(session.loader))
    assert "labels" in batches[0]

    def loss_of(rows) -> float:
        """Mean over the labels of all rows, from the logits alone."""
        given = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        labels = given.pop("labels")[:, 1:]
        with torch.no_grad():
            scores = session.model(**given).logits[:, :-1].log_softmax(-1)
        return float(-scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels >= 0].mean())

    session.model.eval()
    expected = loss_of(batches)
    held_out = [{name: tensor[None] for name, tensor in row.items()} for row in session.held_out]
    measured = evaluate(session.model, session.held_out, 2, config.model.num_routed_depths)
    assert measured.loss == pytest.approx(loss_of(held_out), abs=1e-5)
    session.model.train()
    assert take_step(session, batches)["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_tokenizer_of_words(tmp_path):
    own = word_tokenizer(WORDS)
    own.save_pretrained(tmp_path / "words")
    again = load_tokenizer(tmp_path / "words")
    for tokenizer in (own, again):
        assert tokenizer("two  is\tup")["input_ids"] == [0, 4, 7, 8]
        assert tokenizer.decode([4, 7, 8]) == "two is up"
        with pytest.raises(Exception, match="UNK"):
            tokenizer("five")
    for words in (["one", "one"], ["one two"], [""], ["<|eos|>"]):
        with pytest.raises(UserError, match=r"no single word|given twice"):
            word_tokenizer(words)
