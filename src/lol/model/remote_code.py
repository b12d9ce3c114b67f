"""Checkpoints that `trust_remote_code=True` can open where nobody has imported lol.

transformers' own way is to copy the source of a model into its checkpoint, which would go stale there. Ours carry one
small file that hands out the classes of the installed package, modeling_lol.py; `auto_map` in config.json leads to it.
Without `trust_remote_code` it is never read.
"""

import os
import shutil
from pathlib import Path

SHIM = Path(__file__).parents[1] / "modeling_lol.py"
AUTO_MAP = {
    "AutoConfig": f"{SHIM.stem}.LoLConfig",
    "AutoModel": f"{SHIM.stem}.LoLModel",
    "AutoModelForCausalLM": f"{SHIM.stem}.LoLForCausalLM",
}


def put_shim(folder: str | os.PathLike) -> None:
    """Write the file into the folder of a checkpoint."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    # The text alone: the package may be installed read-only, or without write permission for others.
    shutil.copyfile(SHIM, Path(folder) / SHIM.name)


def point_to_shim(auto_map: dict[str, str] | None) -> dict[str, str]:
    """`auto_map` of a configuration that is about to be saved: ours, and what classes of a user's own have put there.

    Entries of ours that came from a hub repository name it ("owner/name--modeling_lol.LoLConfig"); a copy stands alone.
    """
    own = {name: place for name, place in (auto_map or {}).items() if place.split("--")[-1] != AUTO_MAP.get(name)}
    return AUTO_MAP | own


def is_own(cls: type) -> bool:
    """Whether a class is this package's, not a user's that derives from one."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]
