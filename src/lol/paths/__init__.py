"""Reading and changing paths: record what every window did, force blocks, draw the report."""

from lol.paths.record import record_paths
from lol.paths.steer import force_path

__all__ = ["force_path", "record_paths"]
