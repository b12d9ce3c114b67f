"""Signals become a flag inside the block, and are what they were before after it."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from lol.train.interrupt import Interrupt

LOOP = """
import os, signal, time
from lol.train.interrupt import Interrupt
with Interrupt() as interrupt:
    worker = os.fork()
    if worker == 0:
        # The worker says when it is ready: what reaches a process while it is being forked is lost.
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    while not interrupt.requested:
        time.sleep(0.01)
    os.kill(worker, signal.SIGTERM)
    print("worker ended by", os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)
print("saved after", interrupt.signal, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_flag_and_a_second_ctrl_c_stops(number: signal.Signals) -> None:
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    with Interrupt() as interrupt:
        assert not interrupt.requested
        assert interrupt.signal is None
        os.kill(os.getpid(), number)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupt.signal == number.name
    assert {which: signal.getsignal(which) for which in before} == before


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), Interrupt():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_nothing_is_changed() -> None:
    seen = []

    def work() -> None:
        with Interrupt() as interrupt:
            seen.append((interrupt.requested, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


@pytest.mark.slow
def test_sigterm_lets_a_process_save_and_still_ends_its_workers() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", LOOP],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    rest, _ = child.communicate(timeout=30)
    assert rest.splitlines() == ["worker ended by -15", "saved after SIGTERM"]
    assert child.returncode == 0
