"""The runs on the disk: which there are, and each as far as it has come.

A run is followed as `lol watch` follows it, and its follower is kept: a request reads only what was written since the
one before.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lol.errors import UserError
from lol.model.cost import count_parameters
from lol.paths.colors import block_colors
from lol.paths.curves import Points
from lol.reports.watch_state import Follower, RunState
from lol.serve.errors import NotFound
from lol.studio.folders import checkpoints_of, run_folders
from lol.train.config import TrainConfig
from lol.train.metrics import FILE as METRICS
from lol.train.run_folder import CONFIG

MAX_RECORDS = 2000
MAX_LOADS = 400


@dataclass(frozen=True)
class _Run:
    """What is told of a run wherever it is told of. Losses in nats per token."""

    name: str
    status: Literal["waiting", "training", "stopped", "finished"]
    step: int
    steps: int | None
    loss: float | None
    held_out: float | None
    updated: float
    """Seconds since 1970."""
    num_experts: int
    num_routed_depths: int
    problem: str | None
    """Why its files cannot be read."""


@dataclass(frozen=True)
class RunSummary(_Run):
    """A run in the list of runs."""

    checkpoints: int


@dataclass(frozen=True)
class LoadPoint:
    """Share of each block in a step, over all depths."""

    step: float
    load: list[float]


@dataclass(frozen=True)
class RunDetail(_Run):
    """A run with its records: of each, step, loss, the router's entropy in nats, and the depth that ran."""

    recipe: str | None
    tokens_per_second: float | None
    seconds_left: float | None
    checkpoints: list[int]
    colors: list[str]
    facts: list[tuple[str, str]]
    records: list[tuple[float, float | None, float | None, float | None]]
    held_out_records: list[tuple[float, float | None]]
    load: list[list[float]]
    load_history: list[LoadPoint]


class RunNotFound(NotFound):
    """A request names a run that is not there."""

    param = "name"
    code = "run_not_found"


class Runs:
    """The runs below a folder; may be asked from any thread."""

    def __init__(self, root: Path | None):
        self.root = root
        self._followers: dict[Path, Follower] = {}
        self._problems: dict[Path, tuple[float, str]] = {}
        """Why a run cannot be read, and when it had written last: it is not read again before it writes."""
        # A follower is for one thread.
        self._lock = threading.Lock()

    def folders(self) -> dict[str, Path]:
        """The runs by name, as they lie there now."""
        return {} if self.root is None else run_folders(self.root)

    def newest_first(self) -> dict[str, Path]:
        """The runs, those first that were written to last."""
        folders = self.folders()
        return dict(sorted(folders.items(), key=lambda item: -_updated(item[1])))

    def summaries(self) -> list[RunSummary]:
        """All runs, newest first."""
        found = self.newest_first()
        with self._lock:
            for gone in self._followers.keys() - set(found.values()):
                del self._followers[gone]
                self._problems.pop(gone, None)
            return [self._summary(name, self._poll(folder)) for name, folder in found.items()]

    def detail(self, name: str, after: int | None) -> RunDetail:
        """A run and its records behind a step.

        Raises:
            RunNotFound: there is no run of this name.
        """
        folder = self.folders().get(name)
        if folder is None:
            raise RunNotFound(f"there is no run {name!r} here: choose one that /api/runs lists")
        with self._lock:
            state = self._poll(folder)
            summary = self._summary(name, state)
            own = {key: value for key, value in vars(summary).items() if key != "checkpoints"}
            return RunDetail(
                **own,
                recipe=None if state.config is None else state.config.recipe,
                tokens_per_second=_finite(state.tokens_per_second),
                seconds_left=_finite(state.seconds_left),
                checkpoints=list(checkpoints_of(folder)),
                colors=block_colors(summary.num_experts),
                facts=_facts(state),
                records=_records(state, after),
                held_out_records=[(step, _finite(loss)) for step, loss in _held_out(state, after)],
                load=state.load.tolist(),
                load_history=[LoadPoint(step, load) for step, load in _every(state.load_history, MAX_LOADS)],
            )

    def _poll(self, folder: Path) -> RunState:
        updated = _updated(folder)
        problem = self._problems.get(folder)
        if problem is not None and problem[0] != updated:
            del self._followers[folder], self._problems[folder]
            problem = None
        follower = self._followers.setdefault(folder, Follower(folder))
        if problem is not None:
            return follower.state
        try:
            return follower.poll()
        # What is in a folder that somebody else writes may be anything.
        except (ValueError, OSError, LookupError, TypeError, AttributeError) as error:
            known = isinstance(error, UserError)
            message = str(error) if known else f"{folder} cannot be read ({error}): restore its files"
            self._problems[folder] = (updated, message)
            return follower.state

    def _summary(self, name: str, state: RunState) -> RunSummary:
        model = None if state.config is None else state.config.model
        return RunSummary(
            name=name,
            status=state.status,  # pyright: ignore[reportArgumentType]
            step=state.step,
            steps=None if state.plan is None else state.plan.steps,
            loss=_finite(state.losses[-1][1]) if state.losses else None,
            held_out=_finite(_newest_held_out(state)),
            updated=_updated(state.run),
            num_experts=0 if model is None else model.num_experts,
            num_routed_depths=0 if model is None else model.num_routed_depths,
            checkpoints=len(checkpoints_of(state.run)),
            problem=self._problems[state.run][1] if state.run in self._problems else None,
        )


def _updated(run: Path) -> float:
    """When the run last wrote."""
    for name in (METRICS, CONFIG):
        try:
            return (run / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def _records(state: RunState, after: int | None) -> list[tuple[float, float | None, float | None, float | None]]:
    """Of each step behind `after`; thinned where there are many."""
    first = 0 if after is None else _first_behind(state.losses, after)
    columns = (state.losses[first:], state.entropy[first:], state.depths[first:])
    rows = _every(list(zip(*columns, strict=True)), MAX_RECORDS)
    return [(step, _finite(loss), _finite(entropy), _finite(depth)) for (step, loss), (_, entropy), (_, depth) in rows]


def _first_behind(points: Points, after: int) -> int:
    return next((place for place, (step, _) in enumerate(points) if step > after), len(points))


def _newest_held_out(state: RunState) -> float | None:
    """A finished run measures itself once more, on everything that was held out."""
    if state.summary is not None and "held_out_loss" in state.summary:
        return state.summary["held_out_loss"]
    return state.held_out[-1][1] if state.held_out else None


def _held_out(state: RunState, after: int | None) -> Points:
    first = 0 if after is None else _first_behind(state.held_out, after)
    return _every(state.held_out[first:], MAX_RECORDS)


def _every(items: Sequence, most: int) -> list:
    """At most so many of the items, evenly spaced, the last one among them."""
    if len(items) <= most:
        return list(items)
    return [items[(place + 1) * len(items) // most - 1] for place in range(most)]


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else float(number)


def _facts(state: RunState) -> list[tuple[str, str]]:
    config = state.config
    if config is None:
        return []
    return [*_facts_of(config), ("tokens seen", f"{int(state.last.get('tokens', 0)):,}")]


def _facts_of(config: TrainConfig) -> list[tuple[str, str]]:
    shape = config.model
    source = config.data.source
    return [
        ("parameters", f"{count_parameters(shape).total / 1e6:.1f} M"),
        ("library", f"{shape.num_experts} blocks over {shape.num_routed_depths} depths"),
        ("fixed layers", f"{shape.num_prelude_layers} + {shape.num_coda_layers}"),
        ("windows", f"{shape.window_size} tokens, shifted by {shape.window_stride}"),
        ("text", source if isinstance(source, str) else ", ".join(source)),
        ("seed", str(config.seed)),
    ]
