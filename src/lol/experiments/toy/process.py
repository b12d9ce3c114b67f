"""How a process runs the toy: one thread, and memory that is freed is kept.

A step of the toy takes and frees some 40 MB in pieces of a few. glibc hands that back to the kernel after every step
and gets it again page by page: 5,000 to 10,000 page faults, a fifth of the step's time. (LOG.md, 2026-11-30.)
"""

import ctypes
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's mallopt(3). Without the second, pieces of 128 KB would come from the kernel one by one."""
_LARGEST_PIECE = 32 << 20
"""More than this glibc does not take."""
_KEPT = 1 << 30


def prepare_process() -> None:
    """One thread for torch; on Linux with glibc, up to 1 GB of freed memory stays with the process."""
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_PIECE)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
