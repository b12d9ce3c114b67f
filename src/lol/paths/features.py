"""Paths as numbers: a row of D × L features per window or per sequence, and the tokens that the same rows hold.

Windows shift from depth to depth, so "the path of a window" needs a meaning (decided here): the windows of the first
depth are the rows, and the path of a row is that of its first token. As shifts are smaller than a window, that is the
k-th window of the document at every depth, so a row is the k-th choice of the router at each depth.

Letters: R rows, D depths, L blocks, V tokens of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from lol.paths.extra import need

KEYS = ["document", "row", "window", "start", "end"]


class PathFeatures(NamedTuple):
    """What `path_features` makes of a table."""

    features: Float[np.ndarray, "R F"]
    """float32; column l·L + m is block m at depth l, so F is D·L. A row adds up to D."""
    keys: pd.DataFrame
    """A line per row: document and row as in the table; window (its number in the document, 0 for a sequence); start
    and end of its tokens in the document, end exclusive."""


def path_features(
    table: pd.DataFrame,
    kind: Literal["one-hot", "probability"] = "one-hot",
    unit: Literal["window", "sequence"] = "window",
) -> PathFeatures:
    """Turn the table of `record_paths` into a row of features per window or per sequence.

    Args:
        table: What `record_paths` returned.
        kind: `"one-hot"`: 1 for the block that ran; `"probability"`: the router's softmax, without the balancing bias.
        unit: `"window"`: a row per window of the first depth, with the path of its first token; `"sequence"`: a row per
            document, the mean over its windows of each depth, every window counting once.

    Returns:
        (features, keys), rows in order of document and window.
    """
    document, depth, expert = (table[name].to_numpy() for name in ("document", "depth", "expert"))
    num_depths, num_experts = int(depth.max()) + 1, len(table["probabilities"].iloc[0])
    if kind == "one-hot":
        values = np.eye(num_experts, dtype=np.float32)[expert]
    else:
        values = np.array(table["probabilities"].to_list(), dtype=np.float32)
    numbers, owner = np.unique(document, return_inverse=True)
    row_of = np.zeros(len(numbers), dtype=np.int64)
    row_of[owner] = table["row"].to_numpy()
    if unit == "sequence":
        lengths = np.zeros(len(numbers), dtype=np.int64)
        np.maximum.at(lengths, owner, table["end"].to_numpy())
        sums = np.zeros((len(numbers), num_depths, num_experts), dtype=np.float64)
        np.add.at(sums, (owner, depth), values)
        means = (sums / np.bincount(owner * num_depths + depth).reshape(-1, num_depths, 1)).astype(np.float32)
        keys = pd.DataFrame({"document": numbers, "row": row_of, "window": 0, "start": 0, "end": lengths})
        return PathFeatures(means.reshape(len(numbers), -1), keys[KEYS])

    index = table.groupby(["document", "depth"]).cumcount().to_numpy()
    own = np.bincount(owner[depth == 0])
    first_row = np.cumsum(own) - own
    # Shifted depths may have a window more at the end; it holds no first token of a row.
    kept = index < own[owner]
    features = np.zeros((int(own.sum()), num_depths, num_experts), dtype=np.float32)
    features[first_row[owner[kept]] + index[kept], depth[kept]] = values[kept]
    at_start = depth == 0
    keys = table.loc[at_start, ["document", "row", "start", "end"]].assign(window=index[at_start])
    return PathFeatures(features.reshape(len(features), -1), keys[KEYS].reset_index(drop=True))


def bag_of_tokens(
    documents: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    keys: pd.DataFrame,
    vocab_size: int,
    reach: Literal["window", "before"] = "window",
) -> Any:
    """How often each token stands in the rows of `path_features`: what a probe of the text itself would read.

    Args:
        documents: The token ids of each document, by its number in the table.
        keys: Of `path_features`.
        vocab_size: Number of tokens.
        reach: `"window"`: the row's own tokens. A window's route is decided by the tokens before it, so `"before"`
            counts those of the document up to the row's end: all that its path can depend on, and its own tokens.

    Returns:
        A sparse float32 matrix (R, V) of `scipy.sparse` in CSR form.

    Raises:
        UserError: scipy is not installed.
    """
    sparse = need("scipy.sparse")
    columns, places = [], [0]
    for document, start, end in keys[["document", "start", "end"]].itertuples(index=False):
        ids = documents[document][0 if reach == "before" else start : end]
        columns.extend(ids)
        places.append(len(columns))
    counts = sparse.csr_matrix(
        (np.ones(len(columns), dtype=np.float32), np.array(columns, dtype=np.int32), np.array(places)),
        shape=(len(keys), vocab_size),
    )
    counts.sum_duplicates()
    return counts
