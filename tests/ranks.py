"""Real processes that train together: gloo, one thread each, on one machine. `launch` starts a program on all ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from small_run import environment


def launch(program: Path, *args: object, ranks: int = 2, local_size: int | None = None) -> list[str]:
    """Run a Python program on every rank; their standard outputs, by rank. What torchrun would set is set here, for
    torchrun itself costs another process. `local_size`: ranks of a machine, all of them by default."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    local_size = local_size or ranks
    shared = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local_size), "LOCAL_WORLD_SIZE": str(local_size)}
        started.append(
            subprocess.Popen(
                [sys.executable, str(program), *map(str, args)],
                env=os.environ | shared | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        results = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, results, strict=True):
        assert process.returncode == 0, errors
    return [out for out, _ in results]
