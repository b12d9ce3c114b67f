"""What can be read from paths: labelled text run through a checkpoint, and probes of its paths beside two controls.

The first window of every text is left out of the windows that are probed: its router reads the begin token alone, so
its path is the same for every text. A sequence is the mean over all its windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from lol.errors import UserError
from lol.experiments.harness import Numbers
from lol.paths.features import bag_of_tokens, path_features
from lol.paths.probe import ProbeResult, ridge_probe
from lol.paths.record import record_paths
from lol.train.loading import load_model
from lol.train.run_folder import CHECKPOINTS

Unit = Literal["window", "sequence"]
Kind = Literal["one-hot", "probability"]


@dataclass(frozen=True)
class Reading:
    """Labelled texts and the paths that a checkpoint took through them."""

    ids: list[list[int]]
    """Tokens of each text, cut to the context of the run."""
    labels: list[str]
    table: pd.DataFrame
    """Of `record_paths`; its documents are the texts."""
    vocab_size: int
    quick: bool = False
    """Probe with two folds, once: to see the pipeline work."""


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((run / CHECKPOINTS).glob("step-*"))


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def read(checkpoint: Path, texts: Sequence[str], labels: Sequence[str], *, quick: bool = False) -> Reading:
    """Run texts through a checkpoint, each as a document of its own, and record the paths."""
    model, tokenizer = load_model(checkpoint)
    ids = [tokenizer(text)["input_ids"][: model.config.max_position_embeddings] for text in texts]
    return Reading(ids, list(labels), record_paths(model, ids, batch_size=16), len(tokenizer), quick)


def rows(reading: Reading, kind: Kind, unit: Unit) -> tuple[Float[np.ndarray, "R F"], pd.DataFrame]:
    """Features of the paths and where each row lies, without the first windows.

    Raises:
        UserError: no text has a second window.
    """
    features, keys = path_features(reading.table, kind, unit)
    if unit == "window":
        later = (keys["window"] > 0).to_numpy()
        features, keys = features[later], keys.loc[later].reset_index(drop=True)
    if not len(keys):
        raise UserError("no text is longer than a window, so no window's path depends on its text: give longer texts")
    return features, keys


def probe_paths(reading: Reading, kind: Kind, unit: Unit, labels: Sequence[str] | None = None) -> Numbers:
    """Read the label of a text from the paths of its windows, or of all of it."""
    features, keys = rows(reading, kind, unit)
    return _probe(reading, features, keys, labels)


def probe_tokens(
    reading: Reading,
    unit: Unit,
    labels: Sequence[str] | None = None,
    reach: Literal["window", "before"] = "window",
) -> Numbers:
    """The same probe on the tokens of the same rows; see `bag_of_tokens` for `reach`."""
    _, keys = rows(reading, "one-hot", unit)
    counts = bag_of_tokens(reading.ids, keys, reading.vocab_size, reach)
    return _probe(reading, counts, keys, labels)


def score_cell(score: Numbers) -> str:
    """A score with its interval, for a table."""
    return f"{score['mean']:.3f} ({score['low']:.3f} to {score['high']:.3f})"


def _probe(reading: Reading, features: Any, keys: pd.DataFrame, labels: Sequence[str] | None) -> Numbers:
    document = keys["document"].tolist()
    own = [(reading.labels if labels is None else labels)[number] for number in document]
    effort: dict[str, Any] = {"folds": 2, "seeds": (0,), "strengths": (30.0,)} if reading.quick else {}
    return _as_json(ridge_probe(features, own, groups=document, **effort))


def _as_json(result: ProbeResult) -> Numbers:
    names = ("accuracy", "auroc", "shuffled_accuracy", "shuffled_auroc")
    scores = {name: getattr(result, name) for name in names}
    shown = {name: {"mean": one.mean, "low": one.low, "high": one.high} for name, one in scores.items()}
    return {"rows": result.num_rows, "texts": result.num_groups, "chance": result.chance} | shown
