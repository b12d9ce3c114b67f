"""Tokenizers: exact round trips, the one convention about BOS and EOS, and what load_tokenizer refuses."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lol.data.stdlib import stdlib_files
from lol.data.tokenizer import encode_documents, encode_prompt, load_tokenizer, train_tokenizer, word_tokenizer
from lol.errors import UserError

SOURCE = [path.read_text() for _, path in stdlib_files()[:12]]


def save_foreign(folder, ending: str, **special: str) -> str:
    """A word-level tokenizer as others make them, with a post-processor of its own."""
    vocabulary = {token: k for k, token in enumerate(["[UNK]", "<s>", "</s>", "the", "cat", "sat"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single=ending, special_tokens=[("<s>", 1), ("</s>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special).save_pretrained(folder)
    return str(folder)


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_any_text_comes_back_exactly(tokenizer, texts):
    for text, ids in zip(texts, encode_documents(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids[1:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_lone_bytes_and_every_plane_of_unicode_come_back(tokenizer):
    text = "".join(chr(c) for c in (*range(256), 0x4E2D, 0x1F600, 0x10FFFF)) + " \r\n\t  two"
    (ids,) = encode_documents(tokenizer, [text])
    assert tokenizer.decode(ids[1:-1]) == text


def test_training_gives_the_size_asked_for_and_the_special_tokens():
    trained = train_tokenizer(SOURCE, 600)
    assert len(trained) == 600
    assert trained.convert_ids_to_tokens([0, 1, 2]) == ["<|bos|>", "<|eos|>", "<|pad|>"]
    assert (trained.bos_token_id, trained.eos_token_id, trained.pad_token_id) == (0, 1, 2)


def test_little_text_yields_fewer_tokens():
    assert 259 <= len(train_tokenizer(["ab"], 5000)) < 300


def test_training_is_a_function_of_the_texts():
    first, second = (train_tokenizer(iter(SOURCE), 500).backend_tokenizer.to_str() for _ in range(2))
    assert first == second
    assert first != train_tokenizer(SOURCE[:3], 500).backend_tokenizer.to_str()


@pytest.mark.slow
def test_training_is_the_same_in_another_process():
    code = (
        "from lol.data.stdlib import stdlib_files; from lol.data.tokenizer import train_tokenizer; import sys;"
        "t = [p.read_text() for _, p in stdlib_files()[:12]];"
        "sys.stdout.buffer.write(train_tokenizer(t, 500).backend_tokenizer.to_str().encode())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    assert there.stdout.decode() == train_tokenizer(SOURCE, 500).backend_tokenizer.to_str()


def test_training_reads_a_bounded_sample(monkeypatch):
    monkeypatch.setattr("lol.data.tokenizer.SAMPLE_CHARS", 1000)
    read = []

    def texts():
        for k in range(5):
            read.append(k)
            yield "spam " * 100

    train_tokenizer(texts(), 260)
    assert read == [0, 1]


def test_a_document_is_bos_tokens_eos_and_a_prompt_its_beginning(tokenizer):
    text = "the cat sat"
    (document,) = encode_documents(tokenizer, [text])
    assert document[0] == tokenizer.bos_token_id
    assert document[-1] == tokenizer.eos_token_id
    assert tokenizer(text)["input_ids"] == document[:-1]
    assert tokenizer("")["input_ids"] == [tokenizer.bos_token_id]


def test_text_that_looks_like_a_special_token_is_text(tokenizer):
    (ids,) = encode_documents(tokenizer, ["a<|eos|>b<|bos|><|pad|>"])
    assert not {0, 1, 2} & set(ids[1:-1])
    assert tokenizer.decode(ids[1:-1]) == "a<|eos|>b<|bos|><|pad|>"


def test_no_documents(tokenizer):
    assert encode_documents(tokenizer, []) == []


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded("the cat")["input_ids"] == tokenizer("the cat")["input_ids"]
        assert encode_documents(loaded, ["the dog é"]) == encode_documents(tokenizer, ["the dog é"])
        assert len(loaded) == len(tokenizer)
        assert loaded.pad_token_id == 2


@pytest.mark.parametrize("own_ending", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("has_bos", [True, False])
def test_any_tokenizer_is_set_to_the_convention(tmp_path, own_ending, has_bos):
    special = {"eos_token": "</s>"} | ({"bos_token": "<s>"} if has_bos else {})
    loaded = load_tokenizer(save_foreign(tmp_path / "a", own_ending, **special))
    start = 1 if has_bos else 2
    assert encode_documents(loaded, ["the cat", "sat"]) == [[start, 3, 4, 2], [start, 5, 2]]
    assert loaded("the cat")["input_ids"] == [start, 3, 4]
    loaded.save_pretrained(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b")("the cat")["input_ids"] == [start, 3, 4]


def test_a_models_own_tokenizer_class_keeps_the_convention(tmp_path):
    folder = save_foreign(tmp_path / "a", "<s> $A </s>", bos_token="<s>", eos_token="</s>")
    config = tmp_path / "a" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "add_eos_token": True, "add_bos_token": False}))
    loaded = load_tokenizer(folder)
    assert loaded("the cat")["input_ids"] == [1, 3, 4]


def test_tokenizer_without_eos(tmp_path):
    folder = save_foreign(tmp_path, "$A", bos_token="<s>")
    with pytest.raises(UserError, match=r'no EOS token.*add "eos_token"'):
        load_tokenizer(folder)


def test_raw_tokenizer_without_eos_cannot_encode_documents(tmp_path):
    raw = AutoTokenizer.from_pretrained(save_foreign(tmp_path, "$A"))
    with pytest.raises(UserError, match="use load_tokenizer"):
        encode_documents(raw, ["the cat"])


def test_no_such_folder_is_not_looked_for_on_the_hub():
    with pytest.raises(UserError, match=r"gpt2: no such folder.*lol tokenizer"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_folder_without_a_usable_tokenizer(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"no tokenizer can be loaded from it.*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_code_that_comes_with_a_tokenizer_is_not_run(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(
        f"open({str(marker)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError):
        load_tokenizer(tmp_path)
    assert not marker.exists()


def test_vocabulary_without_room_for_every_byte():
    with pytest.raises(UserError, match="at least 259"):
        train_tokenizer(["text"], 258)


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_text_to_train_on(texts):
    with pytest.raises(UserError, match="no text to train a tokenizer on"):
        train_tokenizer(texts, 300)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=8))
def test_trained_on_anything_it_can_write_anything(texts):
    trained = train_tokenizer([*texts, "."], 280)
    for text, ids in zip(texts, encode_documents(trained, texts), strict=True):
        assert trained.decode(ids[1:-1]) == text


def test_words_that_a_word_tokenizer_lacks_are_refused_with_the_fix() -> None:
    tokenizer = word_tokenizer(["left", "right"])
    assert encode_prompt(tokenizer, "left right") == [tokenizer.bos_token_id, 3, 4]
    assert encode_prompt(tokenizer, "right", begins=False) == [4]
    with pytest.raises(UserError, match="use the words that the model was trained on"):
        encode_prompt(tokenizer, "left up")
