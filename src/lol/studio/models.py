"""Which models there are, what each is, and the few that are in memory.

A model is found by what a scan of the folders lists, never by a path made of what a request says. The newest checkpoint
of a run is looked up whenever it is asked for, for the run may be training.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerFast

from lol.decoding import end_ids
from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.cost import count_parameters
from lol.model.lm import LoLForCausalLM
from lol.paths.colors import block_colors
from lol.serve.errors import NotFound
from lol.serve.pieces import TokenNames
from lol.studio.folders import checkpoints_of
from lol.studio.limits import LOADED_MODELS
from lol.studio.runs import Runs
from lol.train.loading import load_model
from lol.train.run_folder import CHECKPOINTS


class ModelNotFound(NotFound):
    """A request names a model that is not here."""

    param = "model"
    code = "model_not_found"


@dataclass(frozen=True)
class Model:
    """What the page knows of a model."""

    id: str
    name: str
    folder: str
    """As it is written after `--model`; of a run, its checkpoint's."""
    num_experts: int
    num_routed_depths: int
    window_size: int | None
    """`None` where a whole text is one window."""
    window_stride: int
    core_attention: Literal["windowed", "full", "sliding"]
    routing: Literal["learned", "fixed"]
    num_parameters: int
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    colors: list[str]


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in memory."""

    model: LoLForCausalLM
    tokenizer: PreTrainedTokenizerFast
    names: TokenNames
    ends: set[int]
    """Tokens that end a text."""


class Models:
    """The models of this server. `load` is for one thread; the rest may be asked from any."""

    def __init__(self, given: Sequence[Path], runs: Runs):
        """
        Args:
            given: Folders of models.
            runs: Where checkpoints of runs are.

        Raises:
            UserError: a folder without a model.
        """
        self.runs = runs
        self._given: dict[str, tuple[str, Path]] = {}
        for folder in given:
            name = _free_name(folder.resolve().name, [name for name, _ in self._given.values()])
            self._given[f"model:{name}"] = (name, folder)
            # Named on the command line, so a mistake is told there.
            describe("", "", _newest(folder))
        self._loaded: OrderedDict[Path, Loaded] = OrderedDict()

    def listed(self) -> list[Model]:
        """Those of the command line, else the newest checkpoint of each run, newest run first. What cannot be read is
        left out."""
        found = []
        sources = [(id_, name, folder) for id_, (name, folder) in self._given.items()]
        if not sources:
            sources = [(f"run:{name}", name, folder) for name, folder in self.runs.newest_first().items()]
        for id_, name, folder in sources:
            try:
                found.append(describe(id_, name, _newest(folder)))
            except UserError:
                continue
        return found

    def find(self, id_: str) -> tuple[str, Path]:
        """Name and folder of a model.

        Raises:
            ModelNotFound: there is none of this id.
        """
        if id_ in self._given:
            name, folder = self._given[id_]
            return name, _newest(folder)
        kind, _, rest = id_.partition(":")
        folders = self.runs.folders() if kind == "run" else {}
        # A run's own name may hold an @.
        name, _, step = (rest, "", "") if rest in folders else rest.rpartition("@")
        if name in folders:
            checkpoints = checkpoints_of(folders[name])
            chosen = [path for number, path in checkpoints.items() if step in ("", str(number))]
            if chosen:
                return rest, chosen[-1]
        raise ModelNotFound(
            f"there is no model {id_!r} here: choose one that /api/about lists, or run:RUN@STEP of a run"
        )

    def describe(self, id_: str) -> Model:
        """What a model is.

        Raises:
            ModelNotFound: there is none of this id.
        """
        name, folder = self.find(id_)
        return describe(id_, name, folder)

    def load(self, id_: str) -> Loaded:
        """The model, read from the disk unless it was among the last few.

        Raises:
            ModelNotFound: there is none of this id.
            UserError: its files are damaged.
        """
        _, folder = self.find(id_)
        if folder not in self._loaded:
            while len(self._loaded) >= LOADED_MODELS:
                self._loaded.popitem(last=False)
            model, tokenizer = load_model(folder)
            self._loaded[folder] = Loaded(model, tokenizer, TokenNames(tokenizer), end_ids(model, tokenizer))
        self._loaded.move_to_end(folder)
        return self._loaded[folder]


def describe(id_: str, name: str, folder: Path) -> Model:
    """What the model in a folder is, from its configuration alone.

    Raises:
        UserError: the folder holds none.
    """
    config = _read_config(folder, _stamp(folder / "config.json"))
    return Model(
        id=id_,
        name=name,
        folder=str(folder),
        num_experts=config.num_experts,
        num_routed_depths=config.num_routed_depths,
        window_size=config.core_window,
        window_stride=config.window_stride,
        core_attention=config.core_attention,
        routing=config.routing,
        num_parameters=count_parameters(config).total,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_position_embeddings=config.max_position_embeddings,
        colors=block_colors(config.num_experts),
    )


def _newest(folder: Path) -> Path:
    """The newest checkpoint of a run folder; any other folder itself."""
    if not (folder / CHECKPOINTS).is_dir():
        return folder
    checkpoints = checkpoints_of(folder)
    if not checkpoints:
        raise UserError(f"{folder} holds no whole checkpoint: let the run write one, or restore one")
    return list(checkpoints.values())[-1]


def _stamp(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        raise UserError(
            f"{file.parent} holds no model: give a run folder, a checkpoint or a transformers folder"
        ) from None


@lru_cache(maxsize=1024)
def _read_config(folder: Path, _stamp: int) -> LoLConfig:
    """Read once as long as the file is the same. `load_config` would read every weight for its checksum."""
    try:
        kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read ({error}): give the folder of a model") from error
    if kind != LoLConfig.model_type:
        raise UserError(f"{folder} holds a model of type {kind!r}: give one that was trained with lol")
    return LoLConfig.from_pretrained(folder, local_files_only=True)


def _free_name(name: str, taken: Sequence[str]) -> str:
    numbers = range(2, len(taken) + 2)
    return next(one for one in (name, *(f"{name}~{number}" for number in numbers)) if one not in taken)
