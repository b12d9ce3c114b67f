"""Sources of documents: what is read from each, in which order, what is refused and how; and the split."""

import hashlib
import io
import os
import pickle
import subprocess
import sys
from itertools import chain

import pyarrow
import pyarrow.parquet
import pytest
from datasets import IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from lol.data.text import cut_text, open_documents, split_documents
from lol.errors import UserError

TEXTS = [f"document {k}\nwith a – dash, {'x' * k}" for k in range(9)]


def texts_of(documents) -> list[str]:
    return [row["text"] for row in documents]


def paragraphs(count: int) -> str:
    return "".join(f"Paragraph {k} says something of its own.\n\n" for k in range(count))


# What each source holds


def test_rows_are_the_same_documents_from_every_kind_of_file(write_rows, tmp_path):
    jsonl = open_documents(str(write_rows("rows/a.jsonl", TEXTS)))
    parquet = open_documents(str(write_rows("columns/a.parquet", TEXTS)))
    folder = open_documents(str(tmp_path / "rows"))
    hub_jsonl = open_documents(f"hf:{tmp_path / 'rows'}")
    hub_parquet = open_documents(f"hf:{tmp_path / 'columns'}:default:train")
    expected = [{"text": text, "group": hashlib.sha256(text.encode()).hexdigest()} for text in TEXTS]
    for documents in (jsonl, parquet, folder, hub_jsonl, hub_parquet):
        assert isinstance(documents, IterableDataset)
        assert list(documents) == expected
        assert list(documents) == expected, "a second pass differs from the first"


def test_every_file_of_a_hub_data_set_is_read(write_rows, tmp_path):
    for k in range(3):
        write_rows(f"hub/train-{k}.parquet", TEXTS[3 * k : 3 * k + 3])
    documents = open_documents(f"hf:{tmp_path / 'hub'}")
    assert documents.num_shards == 3
    assert texts_of(documents) == TEXTS


def test_hub_split_without_a_configuration(write_rows, tmp_path):
    write_rows("hub/train.jsonl", TEXTS[:5])
    write_rows("hub/test.jsonl", TEXTS[5:])
    assert texts_of(open_documents(f"hf:{tmp_path / 'hub'}")) == TEXTS[:5]
    assert texts_of(open_documents(f"hf:{tmp_path / 'hub'}::test")) == TEXTS[5:]


def test_another_text_column(write_rows, tmp_path):
    write_rows("a/a.jsonl", TEXTS, column="body")
    write_rows("b/b.parquet", TEXTS, column="body")
    for source in (f"{tmp_path}/a", f"{tmp_path}/b", f"hf:{tmp_path}/a", f"hf:{tmp_path}/b"):
        assert texts_of(open_documents(source, text_column="body")) == TEXTS


def test_folder_holds_its_text_files_whole_and_its_rows(tmp_path, write_rows):
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    (tmp_path / "b.md").write_text("# b\r\nline")
    (tmp_path / "sub" / "a.py").write_text(paragraphs(200))
    (tmp_path / "sub" / "empty.txt").write_text(" \n")
    (tmp_path / "sub" / ".hidden" / "no.txt").write_text("hidden folder")
    (tmp_path / ".no.txt").write_text("hidden file")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\xff")
    write_rows("c.jsonl", ["row"])
    rows = list(open_documents(str(tmp_path)))
    assert [row["text"] for row in rows] == ["# b\nline", "row", paragraphs(200)]
    assert [row["group"] for row in rows] == ["b.md", hashlib.sha256(b"row").hexdigest(), "sub/a.py"]


def test_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for k in sorted(range(60), key=lambda k: k * 37 % 60):
        (tmp_path / f"{k:03}.txt").write_text(f"file {k}")
    assert texts_of(open_documents(str(tmp_path))) == [f"file {k}" for k in range(60)]


def test_a_folder_of_many_files_is_read_as_a_whole_and_in_few_shards(tmp_path):
    for k in range(150):
        (tmp_path / f"{k:03}.txt").write_text(f"file {k}")
    documents = open_documents(str(tmp_path))
    assert documents.num_shards <= 64
    assert sorted(texts_of(documents)) == sorted(f"file {k}" for k in range(150))
    by_shard = [texts_of(documents.shard(documents.num_shards, k, contiguous=False)) for k in range(64)]
    assert sorted(chain.from_iterable(by_shard)) == sorted(texts_of(documents))


def test_blank_and_null_rows_are_no_documents(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.jsonl").write_text('{"text": ""}\n\n{"text": null}\n{"text": " \\n"}\n{"text": "yes"}\n')
    column = pyarrow.array(["", None, " \n", "yes"])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    for source in (tmp_path / "a" / "a.jsonl", tmp_path / "a.parquet", f"hf:{tmp_path / 'a'}"):
        assert texts_of(open_documents(str(source))) == ["yes"]


def test_text_file_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "book"
    path.write_text(paragraphs(100))
    documents = texts_of(open_documents(str(path), document_chars=500))
    assert "".join(documents) == paragraphs(100)
    assert len(documents) > 5
    for document in documents:
        assert len(document) >= 500
        assert document.endswith("\n\n")


def test_text_file_is_read_without_its_byte_order_mark(tmp_path):
    path = tmp_path / "bom.txt"
    path.write_bytes("\ufeffText".encode())
    assert texts_of(open_documents(str(path))) == ["Text"]


def test_document_chars_decides_the_number_of_documents(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(paragraphs(300))
    numbers = [len(texts_of(open_documents(str(path), document_chars=chars))) for chars in (100, 1000, 10**6)]
    assert numbers[0] > numbers[1] > numbers[2] == 1


@given(
    st.text(st.sampled_from("ab \n"), max_size=400),
    st.integers(1, 60),
)
def test_cut_documents_join_to_the_text(text, chars):
    documents = list(cut_text(io.StringIO(text).readline, chars))
    assert "".join(documents) == text
    if len(text) >= chars:
        assert all(len(document) >= chars for document in documents)
    # a document has patience for 4·chars, one more line of at most that length, and takes in a rest below chars
    assert all(len(document) < 9 * chars for document in documents)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [("b" * 9, ["a" * 10 + "\n\n" + "b" * 9]), ("b" * 10, ["a" * 10 + "\n\n", "b" * 10])],
)
def test_a_rest_belongs_to_the_last_document_if_it_is_too_short(rest, expected):
    assert list(cut_text(io.StringIO("a" * 10 + "\n\n" + rest).readline, 10)) == expected


@pytest.mark.parametrize("end", ["\n", ""])
def test_text_without_blank_lines_is_cut_at_line_ends_or_within_lines(end):
    text = ("word " * 20 + end) * 100
    documents = list(cut_text(io.StringIO(text).readline, 100))
    assert "".join(documents) == text
    assert len(documents) > 20
    if end:
        assert all(document.endswith(end) for document in documents)


def test_documents_can_be_sent_to_a_spawned_worker(write_rows, tmp_path):
    write_rows("a/a.jsonl", TEXTS * 10)
    for source in (str(tmp_path / "a"), f"hf:{tmp_path / 'a'}"):
        train, _ = split_documents(open_documents(source), 0.5)
        assert texts_of(pickle.loads(pickle.dumps(train))) == texts_of(train)


# The split


def test_split_is_complete_disjoint_and_by_group(tmp_path):
    for k in range(200):
        (tmp_path / f"{k}.txt").write_text(f"text {k}")
    documents = open_documents(str(tmp_path))
    train, held_out = split_documents(documents, 0.25)
    kept, out = ({row["group"] for row in side} for side in (train, held_out))
    assert kept | out == {row["group"] for row in documents}
    assert not kept & out
    assert 25 <= len(out) <= 75
    # the rule as it is documented, worked out apart
    assert out == {
        name for name in kept | out if int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 2**64 < 0.25
    }


def test_split_does_not_depend_on_order_or_on_other_documents(write_rows):
    texts = [f"text {k}" for k in range(100)]
    split = split_documents(open_documents(str(write_rows("a.jsonl", texts))), 0.3)
    other = split_documents(open_documents(str(write_rows("b.jsonl", [*texts[::-1], *"abcdefghijk"]))), 0.3)
    for side, with_others in zip(split, other, strict=True):
        assert set(texts_of(side)) == set(texts_of(with_others)) & set(texts)


def test_equal_rows_fall_on_one_side(write_rows):
    texts = [f"text {k % 20}" for k in range(100)]
    train, held_out = split_documents(open_documents(str(write_rows("a.jsonl", texts))), 0.3)
    assert not set(texts_of(train)) & set(texts_of(held_out))
    assert len(texts_of(train)) + len(texts_of(held_out)) == 100


def test_a_larger_fraction_holds_out_the_same_groups_and_more(write_rows):
    documents = open_documents(str(write_rows("a.jsonl", [f"text {k}" for k in range(100)])))
    small, large = (set(texts_of(split_documents(documents, fraction)[1])) for fraction in (0.1, 0.4))
    assert small < large


@pytest.mark.slow
def test_split_is_the_same_in_another_process(write_rows):
    path = str(write_rows("a.jsonl", [f"text {k}" for k in range(60)]))
    code = (
        "import sys; from lol.data.text import open_documents, split_documents;"
        "print([r['text'] for r in split_documents(open_documents(sys.argv[1]), 0.3)[1]])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", code, path]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(texts_of(split_documents(open_documents(path), 0.3)[1]))


@pytest.mark.parametrize(
    ("texts", "fraction", "message"),
    [
        (["only one"], 0.01, r"no held-out document is left.*raise it"),
        (["only one"], 0.9999, r"no training document is left.*lower it"),
        (TEXTS, 0.0, r"must lie between 0 and 1"),
        (TEXTS, 1.0, r"must lie between 0 and 1"),
    ],
)
def test_split_without_two_sides_is_refused(write_rows, texts, fraction, message):
    documents = open_documents(str(write_rows("a.jsonl", texts)))
    with pytest.raises(UserError, match=message):
        split_documents(documents, fraction)


# What is refused


def test_missing_path():
    with pytest.raises(UserError, match=r"no/where: no such file or folder .*hf:NAME"):
        open_documents("no/where")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", ["", " \n\n \n"])
def test_empty_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="there is no text in it"):
        open_documents(str(tmp_path / name))


def test_folder_without_text_files_names_what_would_count(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\0")
    with pytest.raises(UserError, match=r"no text file in this folder.*\.jsonl.*\.txt"):
        open_documents(str(tmp_path))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00bin", b"text and a zero\x00byte", b"gr\xfc\xdfe"])
def test_binary_file(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    for source in (path, tmp_path):
        with pytest.raises(UserError, match=r"a\.txt: (not UTF-8 text|a binary file)"):
            open_documents(str(source))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut off', r"a\.jsonl, line 3: not JSON .*mend or remove"),
        ('["text"]', r"a\.jsonl, line 3: not a JSON object"),
        ('{"text": 3}', r"a\.jsonl, line 3: the column 'text' holds int, not text"),
        ('{"body": "b", "title": "t"}', r"a\.jsonl, line 3: there is no column 'text'.*of: body, title"),
    ],
)
def test_broken_jsonl_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n')
    documents = open_documents(str(path))
    with pytest.raises(UserError, match=message):
        list(documents)


def test_jsonl_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"line 2: not JSON"):
        list(open_documents(str(path)))


def test_missing_column_names_those_that_exist(write_rows, tmp_path):
    path = write_rows("a/a.parquet", TEXTS, column="body")
    for source in (str(path), f"hf:{tmp_path / 'a'}"):
        with pytest.raises(UserError, match=r"no column 'text'.*of: body, number"):
            open_documents(source)


def test_column_that_is_not_text(write_rows, tmp_path):
    path = write_rows("a/a.parquet", TEXTS)
    for source in (str(path), f"hf:{tmp_path / 'a'}"):
        with pytest.raises(UserError, match=r"'number' holds int, not text"):
            open_documents(source, text_column="number")


def test_broken_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet"):
        open_documents(str(path))


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="root may read every file")
def test_unreadable_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(UserError, match="check its permissions"):
        open_documents(str(path))


@pytest.mark.parametrize("source", ["hf:", "hf::config", "hf:a:b:c:d"])
def test_hub_name_that_cannot_be_parsed(source):
    with pytest.raises(UserError, match="write hf:NAME"):
        open_documents(source)


@pytest.mark.parametrize("suffix", [":nonesuch", "::nonesuch"])
def test_hub_configuration_or_split_that_does_not_exist(write_rows, tmp_path, suffix):
    write_rows("a/train.jsonl", TEXTS)
    with pytest.raises(UserError, match=r"cannot be opened .*nonesuch.*hf:NAME::SPLIT"):
        open_documents(f"hf:{tmp_path / 'a'}{suffix}")


def test_document_chars_of_zero(tmp_path):
    with pytest.raises(UserError, match="document_chars is 0"):
        open_documents(str(tmp_path), document_chars=0)


def test_a_loading_script_in_a_folder_is_not_run(tmp_path, write_rows):
    write_rows("corpus/train.jsonl", TEXTS)
    marker = tmp_path / "ran"
    (tmp_path / "corpus" / "corpus.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(UserError, match="scripts are no longer supported"):
        open_documents(f"hf:{tmp_path / 'corpus'}")
    assert len(texts_of(open_documents(str(tmp_path / "corpus")))) == len(TEXTS) + 1
    assert not marker.exists()
