"""What `lol studio` is told on the command line, and the bounds of a request; imports no web library."""

from dataclasses import dataclass
from pathlib import Path

# Decided here: what a person looks at, and what one of two cores computes while that person waits.
MAX_TEXT_TOKENS = 4096
MAX_NEW_TOKENS = 512
MAX_BRANCHES = 4
MAX_TOP = 20
QUEUE = 32
MAX_SAVED_PATHS = 1000
MAX_NOTE = 2000
MAX_DEPTHS = 256
# A character is at most so many tokens (its bytes), so a longer text is too long for sure.
MAX_TEXT_CHARACTERS = 64 * MAX_TEXT_TOKENS
# Windows of one text of a request to draw or to count them.
MAX_LAID_TOKENS = 4096
MAX_COUNTED_WINDOWS = 65_536
# Of the folders that are scanned.
MAX_RUNS = 500
MAX_RUN_LEVELS = 4
MAX_SCANNED_FOLDERS = 20_000
# Models in memory beside each other.
LOADED_MODELS = 2


@dataclass(frozen=True)
class Studio:
    """Look at paths, windows, runs and results in a browser, and change paths there.

    Example: lol studio --model runs/demo
    """

    model: tuple[Path, ...] = ()
    """Run folders (their newest checkpoints), checkpoints, or folders written by transformers; the first is shown at
    once. Without any: the newest checkpoint of each run in --runs."""
    runs: Path | None = None
    """Folder of run folders, up to four levels below it. Default: runs, if it is there."""
    results: Path | None = None
    """Folder of results, one folder for each experiment. Default: results, if it is there."""
    paths: Path = Path("paths")
    """Folder in which paths are saved; made with the first of them."""
    host: str = "127.0.0.1"
    """Address to listen at; one that other machines can reach needs a token."""
    port: int = 8080
    """0 takes a free one; the line that is printed names it."""
    token: str | None = None
    """What the page has to send. Other users of this machine can read flags: better set LOL_TOKEN."""
