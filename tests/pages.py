"""The code in the pages of the documentation."""

import re
from pathlib import Path


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """(language, code) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
