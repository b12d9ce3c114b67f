"""Training that is killed, cannot write, or goes on with other ranks. Prints what happened as JSON.

fault_program.py FOLDER CORPUS

All processes are forked from this one, which has imported everything and started no thread: 20 kills are 20 forks.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from lol.errors import UserError
from lol.train import checkpoint, trainer
from lol.train.checkpoint import checkpoint_step, newest_checkpoint
from lol.train.config import Parallel, TrainConfig
from lol.train.parallel import join_world
from lol.train.session import prepare, save
from small_run import draw_at_every_step, small_config

KILLS = {"one": 13, "two": 7}
AHEAD = 2
STEPS = {runs: AHEAD * kills + 2 for runs, kills in KILLS.items()}
DISK_STEP = 3
RESHARD_STEP = 2


def fault_config(corpus: Path, runs: str) -> TrainConfig:
    parallel = {"one": "none", "two": "fsdp2"}[runs]
    changes: dict[str, Any] = {"checkpoint_every": 1, "batch_size": 4, "accumulation": 1, "eval": {"every": 5}}
    return small_config(corpus, parallel=parallel, steps=STEPS[runs], **changes)


def start(
    work: Callable[[], object], ranks: int, log: Path, local_size: int | None = None
) -> tuple[list[int], TCPStore | None]:
    """Forked copies of this process at work; their pids, and the store they meet at, to be kept while they live."""
    local_size = local_size or ranks
    store = None
    shared: dict[str, str] = {}
    if ranks > 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    pids = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank % local_size, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local_size}
        pid = os.fork()
        if pid == 0:
            os.environ.update(shared | {name: str(value) for name, value in place.items()} if ranks > 1 else {})
            be_a_child(work, log.with_name(f"{log.name}-{rank}.log"))
        pids.append(pid)
    return pids, store


def be_a_child(work: Callable[[], object], log: Path) -> None:
    """Work, and never return: exit code 2 for an error of the user's, as the command line has it."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 0
    try:
        work()
    except UserError as error:
        print(error, flush=True)
        code = 2
    except BaseException as error:
        print(repr(error), flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)


def wait(pids: list[int], seconds: float) -> list[int | None]:
    """Exit codes; None for those that still ran after so long, which are killed now, as torchrun does."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            codes[pid] = None
    return [codes[pid] for pid in pids]


def newest_step(run: Path, warnings: list[str]) -> int:
    path = newest_checkpoint(run, warnings.append)
    return 0 if path is None else checkpoint_step(path)


def run_killed(run: Path, config: TrainConfig, ranks: int, kills: int, chance: random.Random) -> dict[str, Any]:
    """Train with so many kills at random moments, then to the end."""
    folder = run / "checkpoints"
    writing, hung, warnings, steps = 0, 0, list[str](), [0]

    def reached(step: int) -> bool:
        return any(checkpoint_step(path) >= step for path in folder.glob("step-*"))

    def being_written() -> bool:
        return any(folder.glob(".partial-*"))

    for number in range(kills):
        begin, moment = steps[-1], number % 3
        # A fast disk ends a write before any kill: every second run of that kind is held inside of one.
        held = begin + AHEAD if number % 6 == 2 else None
        pids, store = start(partial(go_on, run, config, begin + AHEAD, held), ranks, numbered(run, number))
        if moment == 0:  # any moment, before the first step too
            time.sleep(chance.uniform(0, 1.2))
        elif moment == 1:  # some steps on
            goal = begin + chance.randint(1, AHEAD)
            wait_until(lambda goal=goal: reached(goal))
            time.sleep(chance.uniform(0, 0.1))
        else:  # a checkpoint is being written
            wait_until(lambda begin=begin: reached(begin + 1))
            if held is not None:
                wait_until((folder / f".partial-step-{held:08d}").exists)
            else:
                wait_until(lambda begin=begin: being_written() or reached(begin + 2))
            time.sleep(chance.uniform(0, 0.02))
        victims = pids if ranks == 1 or chance.random() < 0.4 else [chance.choice(pids)]
        writing += being_written()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        codes = wait(pids, seconds=20 if moment else 2)
        # Before they have met, a rank waits for the others as long as torchrun lets it.
        hung += codes.count(None) if moment else 0
        assert 0 not in codes, "the run ended before it was killed"
        assert any(code == -signal.SIGKILL for code in codes), codes
        steps.append(newest_step(run, warnings))
        del store
    pids, store = start(lambda: go_on(run, config, config.steps), ranks, numbered(run, kills))
    codes = wait(pids, seconds=60)
    del store
    return {"writing": writing, "hung": hung, "warnings": warnings, "steps": steps, "end": codes}


def go_on(run: Path, config: TrainConfig, rest_at: int, held: int | None = None) -> None:
    """Start or resume. At some step wait for the kill, so that a fast machine does not end the run before the last.

    held: wait for it inside of this step's checkpoint too, when all is written but the last file, its list of files."""
    take_step, seal = trainer.take_step, checkpoint._seal

    def seal_after_rest(folder: Path, *rest: Any) -> None:
        if folder.name.endswith(f"{held:08d}"):
            time.sleep(2)
        seal(folder, *rest)

    def step_after_rest(session: trainer.Session, *rest: Any) -> Any:
        if session.step >= rest_at:
            time.sleep(2)
        return take_step(session, *rest)

    trainer.take_step = step_after_rest
    if held is not None:
        checkpoint._seal = seal_after_rest
    trainer.train(config, run, resume=(run / "config.json").exists())


def numbered(run: Path, number: int) -> Path:
    return run.with_name(f"{run.name}-{number}")


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def straight(run: Path, config: TrainConfig, ranks: int) -> list[int | None]:
    pids, store = start(lambda: trainer.train(config, run), ranks, run.with_name(f"{run.name}.log"))
    codes = wait(pids, seconds=60)
    del store
    return codes


def full_disk(run: Path, config: TrainConfig) -> dict[str, Any]:
    """From some step on the second rank cannot write more than 10 kB into a file."""

    def go() -> None:
        take_step = trainer.take_step

        def step_and_fill(session: trainer.Session, *rest: Any) -> Any:
            if session.step == DISK_STEP - 1 and session.world.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
            return take_step(session, *rest)

        trainer.take_step = step_and_fill
        trainer.train(config, run)

    log = run.with_name(run.name)
    pids, store = start(go, 2, log)
    codes = wait(pids, seconds=60)
    del store
    said = [log.with_name(f"{log.name}-{rank}.log").read_text().splitlines()[-1] for rank in range(2)]
    return {"codes": codes, "said": said, "left": sorted(path.name for path in (run / "checkpoints").iterdir())}


def reshard(run: Path, config: TrainConfig) -> list[int | None]:
    """Two ranks train some steps; four read what they wrote and write it again, more ranks than blocks; and so do two
    machines of two ranks that hold the same slices."""

    def begin() -> None:
        take_step = trainer.take_step

        def step_and_stop(session: trainer.Session, *rest: Any) -> Any:
            record = take_step(session, *rest)
            if session.step == RESHARD_STEP:
                os.kill(os.getpid(), signal.SIGTERM)
            return record

        trainer.take_step = step_and_stop
        trainer.train(config, run)

    def rewrite(source: str, target: str, parallel: Parallel) -> None:
        changed = replace(config, parallel=parallel)
        with join_world(changed.parallel) as world:
            checkpoint = newest_checkpoint(run.with_name(source))
            save(prepare(changed, run.with_name(target), checkpoint, world))

    orders: list[tuple[Callable[[], None], int, int]] = [
        (begin, 2, 2),
        (lambda: rewrite(run.name, "four", "fsdp2"), 4, 4),
        (lambda: rewrite("four", "machines", "hsdp"), 4, 2),
    ]
    codes = []
    for number, (work, ranks, local_size) in enumerate(orders):
        pids, store = start(work, ranks, numbered(run, number), local_size)
        codes += wait(pids, seconds=60)
        del store
    return codes


def main(folder: Path, corpus: Path) -> None:
    torch.set_num_threads(1)
    chance = random.Random(20)
    one, two = fault_config(corpus, "one"), fault_config(corpus, "two")
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_at_every_step(monkeypatch)
        result: dict[str, Any] = {
            "straight-one": straight(folder / "straight-one", one, 1),
            "one": run_killed(folder / "one", one, 1, KILLS["one"], chance),
        }
        result |= {
            "straight-two": straight(folder / "straight-two", two, 2),
            "two": run_killed(folder / "two", two, 2, KILLS["two"], chance),
            "disk": full_disk(folder / "disk", two),
            "reshard": reshard(folder / "two-ranks", two),
        }
    print("\nresult " + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
