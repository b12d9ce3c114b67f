"""What `lol watch` knows of a run: its records, digested as they come, and what follows from the configuration."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from lol.errors import UserError
from lol.paths.curves import Points
from lol.train.budget import Plan, plan_run
from lol.train.config import TrainConfig
from lol.train.metrics import FILE, MetricsTail
from lol.train.run_folder import CONFIG, is_trained_in, read_config

_RECENT = 20
"""Steps whose loads are added, and whose speed is taken: one step's are few windows."""
_HISTORY = 800
"""Of the steps, at most so many whose loads are kept, evenly spaced."""


@dataclass
class RunState:
    """A run as far as it has come. Losses and entropy in nats, as (step, value)."""

    run: Path
    config: TrainConfig | None = None
    plan: Plan | None = None
    losses: Points = field(default_factory=list)
    held_out: Points = field(default_factory=list)
    entropy: Points = field(default_factory=list)
    depths: Points = field(default_factory=list)
    last: Mapping[str, Any] = field(default_factory=dict)
    """The newest record of a step."""
    summary: Mapping[str, Any] | None = None
    load_history: list[tuple[float, list[float]]] = field(default_factory=list)
    """Share of each block over all depths, as (step, shares) of steps at even distances."""
    trained_in: bool | None = None
    """Whether a process of this machine trains in the folder; None if that cannot be told."""
    _loads: deque[list[list[int]]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _paces: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Of the newest steps: seconds and FLOPs."""
    _spacing: int = 1
    """Of so many records, one is in `load_history`."""

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def status(self) -> str:
        """waiting, training, stopped or finished."""
        if self.summary is not None:
            return "finished"
        if self.trained_in is False and self.config is not None:
            return "stopped"
        return "training" if self.step else "waiting"

    @property
    def load(self) -> Float[np.ndarray, "D L"]:
        """Share of the windows of each depth that ran each block, in the newest steps; a depth that none ran has 0."""
        if not self._loads:
            return np.zeros((0, 0))
        total = np.zeros((max(map(len, self._loads)), len(self._loads[-1][0])))
        for load in self._loads:
            total[: len(load)] += load
        return total / total.sum(1, keepdims=True).clip(min=1)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the newest steps together."""
        if self.config is None or not self._paces:
            return None
        return len(self._paces) * self.config.tokens_per_step / sum(seconds for seconds, _ in self._paces)

    @property
    def seconds_left(self) -> float | None:
        """What the remaining FLOPs take at the pace of the newest steps; evaluations and checkpoints come to it."""
        if self.plan is None or not self._paces:
            return None
        seconds, flops = map(sum, zip(*self._paces, strict=True))
        return max(0.0, self.plan.total_flops - self.last["flops"]) * seconds / max(flops, 1)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record of metrics.jsonl."""
        step, event = float(record["step"]), record.get("event")
        if event == "summary":
            self.summary = record
        elif event == "eval":
            self.held_out.append((step, record["loss"]))
        elif event == "train":
            self.losses.append((step, record["loss"]))
            self.entropy.append((step, record["router_entropy"]))
            self.depths.append((step, float(record["depth"])))
            if record["load"]:
                self._loads.append(record["load"])
                self._remember(step, record["load"])
            if self.config is not None:
                spent = record["flops"] - self.last.get("flops", 0)
                self._paces.append((self.config.tokens_per_step / record["tokens_per_second"], spent))
            self.last = {name: value for name, value in record.items() if name != "load"}

    def _remember(self, step: float, load: list[list[int]]) -> None:
        if (len(self.losses) - 1) % self._spacing:
            return
        total = np.sum(load, axis=0)
        self.load_history.append((step, (total / max(total.sum(), 1)).tolist()))
        if len(self.load_history) > _HISTORY:
            self.load_history = self.load_history[::2]
            self._spacing *= 2


class Follower:
    """Keeps the state of a run up to date with its folder, whatever happens to it."""

    def __init__(self, run: Path) -> None:
        self._tail = MetricsTail(run)
        self.state = RunState(run)

    def poll(self) -> RunState:
        """Read what is new in the folder.

        Raises:
            UserError: config.json or metrics.jsonl is damaged.
        """
        run, state = self.state.run, self.state
        if state.config is None and (run / CONFIG).exists():
            state.config = read_config(run)
            # Without its tokenizer, whose size may differ a little from the configuration's: only a FLOP budget's last
            # step depends on it.
            state.plan = plan_run(state.config, state.config.model)
        records, again = self._tail.poll()
        if again:
            self.state = state = RunState(run, state.config, state.plan)
        try:
            for record in records:
                state.add(record)
        except KeyError as error:
            raise UserError(
                f"{run / FILE} was written by another version of lol (a record has no {error}): watch it with that one"
            ) from error
        state.trained_in = is_trained_in(run)
        return state


def check_run(state: RunState) -> None:
    """Raise UserError for a folder that has nothing to show yet."""
    if state.step == 0:
        raise UserError(f"{state.run} has no step yet: give the folder of a run that trains, or watch it at a terminal")
