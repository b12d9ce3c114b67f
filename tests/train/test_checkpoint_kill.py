"""A save may be killed at any file operation: afterwards the newest checkpoint is whole, loads, and is old or new.

test_faults.py kills whole runs at random moments.
"""

import os
import subprocess
import sys
from pathlib import Path

import checkpoint_parts
import pytest


@pytest.mark.slow
def test_a_killed_save_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, checkpoint_parts.__file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
