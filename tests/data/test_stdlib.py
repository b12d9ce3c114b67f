"""The standard library as a corpus: enough of it, of what kind, and split by module."""

import pytest

from lol.data.stdlib import stdlib_files
from lol.data.text import open_documents, split_documents


def test_modules_that_everybody_has_are_in_it():
    modules = {module for module, _ in stdlib_files()}
    assert {"json", "email", "asyncio", "argparse", "typing"} <= modules
    assert len(modules) > 150


def test_files_are_named_by_their_top_level_module():
    groups = {"/".join(path.parts[-2:]): module for module, path in stdlib_files()}
    assert groups["json/decoder.py"] == "json"
    assert groups["email/charset.py"] == "email"


def test_tests_tables_and_installed_packages_are_left_out():
    for module, path in stdlib_files():
        assert not {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"} & set(path.parts)
        assert module != "encodings"
        assert not path.name.startswith("_sysconfigdata")


def test_order_is_that_of_the_paths():
    paths = [path.as_posix() for _, path in stdlib_files()]
    assert paths == sorted(paths, key=lambda path: path)
    assert stdlib_files() == stdlib_files()


@pytest.mark.slow
def test_split_is_by_module_and_has_enough_on_both_sides():
    documents = open_documents("stdlib")
    train, held_out = (
        {row["group"]: row["text"] for row in side} for side in split_documents(documents, held_out_fraction=0.05)
    )
    assert not train.keys() & held_out.keys()
    assert train.keys() | held_out.keys() == {module for module, path in stdlib_files() if path.read_bytes().strip()}
    assert len(held_out) >= 3
