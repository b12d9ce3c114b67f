"""What this process has taken of memory so far, by the operating system's and torch's own count."""

import resource
import sys
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Bytes: the most that was resident of this process, and the most that its tensors took on a GPU (0 without)."""
    gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return _peak_resident(), gpu


def _peak_resident() -> int:
    # getrusage's peak begins with that of the process which started this one.
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
