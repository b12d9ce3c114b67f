"""Paths as numbers: features per window and sequence, the tokens of the same rows, components of them."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lol import UserError, record_paths
from lol.paths.features import bag_of_tokens, path_features
from lol.paths.project import draw_projection, principal_components
from lol.paths.record import path_of
from model_cases import bounded


def random_rows(lengths: list[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 257, (length,), generator=draw).tolist() for length in lengths]


# The fixture is a plain function that builds a model.
@settings(bounded(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    windows=st.sampled_from([(16, 8), (16, 0), (7, 5), (100, 50)]),
)
def test_a_row_is_the_path_of_its_first_token(make_model, lengths, windows):
    rows = random_rows(lengths)
    table = record_paths(make_model(window_size=windows[0], window_stride=windows[1]), rows)
    features, keys = path_features(table)
    assert np.array_equal(np.unique(features), [0, 1])
    assert (features.sum(1) == 6).all()
    for row, key in zip(features.reshape(-1, 6, 5), keys.itertuples(), strict=True):
        assert tuple(row.argmax(1).tolist()) == path_of(table, key.document, key.start)
    # The rows are the windows of the first depth: together, each document once.
    for document, length in enumerate(lengths):
        own = keys[keys["document"] == document]
        assert own["window"].tolist() == list(range(len(own)))
        assert np.concatenate([np.arange(a, b) for a, b in zip(own["start"], own["end"], strict=True)]).tolist() == (
            list(range(length))
        )
    # Blocks were chosen without a bias here, so the one that ran is the most probable.
    probable = path_features(table, "probability").features.reshape(-1, 6, 5)
    assert np.allclose(probable.sum(2), 1, atol=1e-5)
    assert np.array_equal(probable.argmax(2), features.reshape(-1, 6, 5).argmax(2))
    for kind in ("one-hot", "probability"):
        assert np.allclose(path_features(table, kind, "sequence").features.sum(1), 6, atol=1e-4)


def a_table() -> pd.DataFrame:
    """Two documents, two depths, the second with a window more; L = 2."""
    lines = [
        (0, 0, 0, 0, 0, 4, 1, [0.4, 0.6]),
        (0, 0, 0, 1, 0, 2, 0, [0.9, 0.1]),
        (0, 0, 1, 1, 2, 4, 1, [0.2, 0.8]),
        (0, 1, 0, 0, 0, 4, 0, [0.7, 0.3]),
        (0, 1, 1, 0, 4, 6, 0, [0.5, 0.5]),
        (0, 1, 0, 1, 0, 2, 1, [0.0, 1.0]),
        (0, 1, 1, 1, 2, 6, 1, [0.3, 0.7]),
    ]
    names = ["row", "document", "window", "depth", "start", "end", "expert", "probabilities"]
    return pd.DataFrame(lines, columns=names)


def test_features_by_hand():
    features, keys = path_features(a_table())
    assert features.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 1]]
    assert keys.to_numpy().tolist() == [[0, 0, 0, 0, 4], [1, 0, 0, 0, 4], [1, 0, 1, 4, 6]]
    mean, keys = path_features(a_table(), "one-hot", "sequence")
    assert mean.tolist() == [[0, 1, 0.5, 0.5], [1, 0, 0, 1]]
    assert keys.to_numpy().tolist() == [[0, 0, 0, 0, 4], [1, 0, 0, 0, 6]]
    mean, _ = path_features(a_table(), "probability", "sequence")
    assert np.allclose(mean, [[0.4, 0.6, 0.55, 0.45], [0.6, 0.4, 0.15, 0.85]])


def test_tokens_of_the_same_rows():
    ids = [[3, 3, 1, 0], [2, 2, 2, 1, 0, 3]]
    _, keys = path_features(a_table())
    assert bag_of_tokens(ids, keys, 5).toarray().tolist() == [[1, 1, 0, 2, 0], [0, 1, 3, 0, 0], [1, 0, 0, 1, 0]]
    assert bag_of_tokens(ids, keys, 5, "before").toarray()[2].tolist() == [1, 1, 3, 1, 0]


def test_components_are_the_directions_of_most_variance(tmp_path):
    # Points on a line through (1, 1, 0)/√2 with a fifth of the deviation across it.
    along, across = np.array([-2.0, -1, 1, 2, -2, -1, 1, 2]), np.array([0.2, 0.4, 0.4, 0.2, -0.2, -0.4, -0.4, -0.2])
    rows = 3 + np.stack([along / 2**0.5, along / 2**0.5, across], axis=1)
    found = principal_components(rows)
    assert np.allclose(found.components, [[2**-0.5, 2**-0.5, 0], [0, 0, 1]])
    assert np.allclose(found.points, np.stack([along, across], axis=1))
    assert np.allclose(found.explained, [2.5 / 2.6, 0.1 / 2.6])
    assert np.allclose(found.mean, 3)
    draw_projection(found, ["left"] * 4 + ["right"] * 4, tmp_path / "map.svg")
    picture = (tmp_path / "map.svg").read_text()
    assert "left" in picture
    assert "96 % of the variance" in picture
    draw_projection(found, ["left"] * 4 + ["right"] * 4, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == picture
    with pytest.raises(UserError, match="7 labels for 8 rows"):
        draw_projection(found, ["left"] * 7, tmp_path / "other.svg")
    with pytest.raises(UserError, match="no 2 components"):
        principal_components(rows[:1])
