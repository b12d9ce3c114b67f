"""The training state goes through JSON and safetensors and comes back equal in value, type and bits."""

import collections
import http
import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as numpy_strategies
import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torchdata.stateful_dataloader import StatefulDataLoader

from lol.train.state import decode_state, encode_state, rng_state, set_rng_state


def through_disk(value: Any, folder: Path) -> Any:
    tree, tensors = encode_state(value)
    save_file(tensors, folder / "tensors")
    (folder / "tree").write_text(json.dumps(tree, allow_nan=False))
    return decode_state(json.loads((folder / "tree").read_bytes()), load_file(folder / "tensors"))


def assert_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert len(one) == len(two)
        for (key, item), (other_key, other) in zip(one.items(), two.items(), strict=True):
            assert_same(key, other_key)
            assert_same(item, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for item, other in zip(one, two, strict=True):
            assert_same(item, other)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype
        assert one.shape == two.shape
        raw = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, two)]
        assert torch.equal(*raw)
    elif isinstance(one, numpy.ndarray | numpy.generic):
        assert one.dtype == two.dtype
        assert one.shape == two.shape
        assert one.tobytes() == two.tobytes()
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", two)
    else:
        assert one == two


any_float = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("d", struct.pack("Q", bits))[0]) | st.floats()
# Lone surrogates too: JSON's escapes carry them.
keys = st.text(st.characters(), max_size=4) | st.sampled_from(["$tensor", "$dict", "$", ""]) | st.integers()
keys |= (
    st.booleans() | st.none() | st.floats(allow_nan=False) | st.binary(max_size=3) | st.tuples(st.integers(), st.text())
)
dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.int8]
)
tensors = st.builds(
    lambda shape, dtype, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    dtypes,
    st.integers(0, 99),
)
numbers = numpy_strategies.integer_dtypes() | numpy_strategies.floating_dtypes() | numpy_strategies.boolean_dtypes()
arrays = numpy_strategies.arrays(numbers, numpy_strategies.array_shapes(min_dims=0, min_side=0, max_side=3))
scalars = numpy_strategies.from_dtype(numpy.dtype("float32")) | numpy_strategies.from_dtype(numpy.dtype("uint64"))
scalars |= st.sampled_from([numpy.bool_(True), numpy.float64(0.1), numpy.int8(-1), numpy.complex64(1 - 2j)])
leaves = st.none() | st.booleans() | st.integers() | any_float | st.text(st.characters(), max_size=5)
leaves |= st.binary(max_size=9) | tensors | arrays | scalars
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(tree=trees)
def test_any_tree_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    assert_same(through_disk(tree, tmp_path_factory.getbasetemp()), tree)


def test_awkward_leaves(tmp_path: Path) -> None:
    shared = torch.arange(12.0).view(3, 4)
    tree = {
        "nan with a payload": struct.unpack("d", struct.pack("Q", 0x7FF8_0000_0000_BEEF))[0],
        "signed": [-0.0, -math.inf, 5e-324, 2**70],
        1: {"1": "one", (1, "1"): "both"},
        "a": {"b/c": torch.ones(1)},
        "a/b": {"c": torch.zeros(1)},
        "\ud800": torch.ones(1),
        "overlapping": (shared, shared.T, shared[1:, ::2]),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "big endian": numpy.arange(3, dtype=">i4"),
    }
    back = through_disk(tree, tmp_path)
    assert_same(
        {key: value for key, value in back.items() if key != "conjugate"},
        {k: v for k, v in tree.items() if k != "conjugate"},
    )
    assert back["conjugate"].item() == 1 - 2j


def test_the_saved_tensors_are_copies() -> None:
    source = torch.ones(2, requires_grad=True)
    _, tensors = encode_state([source])
    (saved,) = tensors.values()
    with torch.no_grad():
        source.zero_()
    assert saved.tolist() == [1, 1]
    assert not saved.requires_grad


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (http.HTTPStatus.OK, "HTTPStatus at /x/0/y"),
        ({1}, "set at /x/0/y"),
        (collections.OrderedDict(), "OrderedDict at /x/0/y"),
        (collections.namedtuple("P", "x")(1), "P at /x/0/y"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter at /x/0/y"),
        (numpy.array([object()]), "ndarray at /x/0/y"),
        (numpy.ma.masked_array([1], mask=[True]), "MaskedArray at /x/0/y"),
        (torch.ones(2, dtype=torch.complex128), "complex128 at /x/0/y"),
        (torch.ones(2).to_sparse(), "sparse_coo tensor of torch.float32 at /x/0/y"),
    ],
)
def test_what_has_no_exact_form_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode_state({"x": [{"y": value}]})


def test_a_tag_of_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\$set.*newer version"):
        decode_state({"$set": []}, {})


def draw() -> tuple[Any, ...]:
    return random.random(), random.gauss(), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()


def test_the_generators_go_on_where_they_were(tmp_path: Path) -> None:
    # One draw of each kind first: half of a Gaussian pair is state too.
    draw()
    state = through_disk(rng_state(), tmp_path)
    expected = [draw() for _ in range(3)]
    draw()
    set_rng_state(state)
    assert [draw() for _ in range(3)] == expected


# torchdata 0.11 calls a function that torch 2.13 has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loaders_state_goes_through(tmp_path: Path) -> None:
    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(range(20), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))

    whole = loader()
    batches = iter(whole)
    for _ in range(3):
        next(batches)
    state = through_disk(whole.state_dict(), tmp_path)
    resumed = loader()
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    assert len(rest) == 7
    assert rest == [batch.tolist() for batch in batches]
