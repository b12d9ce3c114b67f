"""Real processes that train together: gloo, one thread each, on one machine. `launch` starts a program on all ranks."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from small_run import environment


def launch(program: Path, *args: object, ranks: int = 2, local_size: int | None = None) -> list[str]:
    """Run a Python program on every rank; their standard outputs, by rank. What torchrun would set is set here, for
    torchrun itself costs another process. `local_size`: ranks of a machine, all of them by default."""
    # The store that the ranks meet at is held here, as torchrun holds it. Were rank 0 to open it, another process could
    # take the port between its choice and then.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    local_size = local_size or ranks
    shared = environment() | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
    }
    with ThreadPoolExecutor(ranks) as readers:
        started = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local_size), "LOCAL_WORLD_SIZE": str(local_size)}
            command = [sys.executable, "-X", "faulthandler", str(program), *map(str, args)]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=os.environ | shared | own, **pipes))
        outputs = [readers.submit(process.communicate) for process in started]
        wait_for_all(started)
        results = [output.result() for output in outputs]
    codes = [process.returncode for process in started]
    assert not any(codes), "\n".join(f"rank {rank}: {codes[rank]}\n{results[rank][1]}" for rank in range(ranks))
    return [out for out, _ in results]


def wait_for_all(started: list[subprocess.Popen], seconds: float = 400.0) -> None:
    """Until all have ended. One that fails ends the others, which would wait for it; one that hangs shows where."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started) or time.monotonic() > deadline:
            time.sleep(1.0)  # others that fail too say so themselves
            for process in started:
                process.send_signal(signal.SIGABRT)
            return
        time.sleep(0.02)
