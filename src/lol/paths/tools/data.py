"""What the path tools share: their flags, the model run over a user's documents, and the files that they write."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import tyro
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from lol.data.labelled import LabelledText, encode_row, read_labelled
from lol.errors import UserError
from lol.model.lm import LoLForCausalLM
from lol.paths.record import record_paths


@dataclass(frozen=True)
class PathFlags:
    """The flags that every path tool has."""

    model: Path
    """A run folder (its newest checkpoint), a checkpoint, or a folder written by transformers."""
    data: tuple[str, ...]
    """.jsonl, .parquet, text file, folder or hf:NAME[:CONFIG][:SPLIT]; of several without --label-column, the names are
    the labels."""
    label_column: str | None = None
    """Column of the label in .jsonl, .parquet and hub data sets."""
    text_column: str = "text"
    """Column of the text there."""
    router_only_column: str | None = None
    """Column of what only the router reads, for a model that was trained with one."""
    rows: int = 200
    """Documents of each label that are read, the first ones."""
    tokens: int | None = None
    """Tokens of a document that are read, the first ones. Default: the context that the model was trained on."""
    out: Path | None = None
    """Folder for the numbers (.json) and figures (.svg). Without it, only the table is printed."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace files that are in --out."""


@dataclass(frozen=True)
class Recorded:
    """Documents and the paths that a model took through them, numbered alike."""

    table: pd.DataFrame
    ids: list[list[int]]
    labels: list[str]
    """Of each document; "" where nothing was labelled."""
    groups: list[str]


def open_data(command: PathFlags, model: LoLForCausalLM, *, labelled: bool = True) -> list[LabelledText]:
    """Read the documents that the flags name.

    Raises:
        UserError: no label where one is needed, or flags that do not fit the data or the model.
    """
    for name in ("rows", "tokens"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}")
    if model.model.router is None:
        raise UserError(f"{command.model} has no router: every text takes the one path of its config, fixed_path")
    hides = model.config.router_only_tokens
    if command.router_only_column is not None and not hides:
        raise UserError("--router-only-column needs a model whose router alone reads tokens: leave it out")
    if command.router_only_column is None and hides:
        raise UserError(
            "this model's router was trained to read tokens that nothing else reads: name their column as "
            "--router-only-column (it may be the label's)"
        )
    if labelled and command.label_column is None and len(command.data) == 1:
        raise UserError(
            f"{command.data[0]} has no labels: name their column as --label-column, or give a source for each label"
        )
    return read_labelled(
        command.data,
        text_column=command.text_column,
        label_column=command.label_column,
        router_only_column=command.router_only_column,
        most=command.rows,
    )


def record_documents(
    command: PathFlags, model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: Sequence[LabelledText]
) -> Recorded:
    """Run the model over documents, each cut to the tokens that are asked for."""
    most = command.tokens or model.config.max_position_embeddings
    rows = [encode_row(tokenizer, document.text, document.router_only, most) for document in documents]
    # Rows of one length at a time need little padding; documents are numbered in the order they are given.
    order = np.argsort([len(row["input_ids"]) for row in rows], kind="stable")
    table = record_paths(model, [rows[place] for place in order], batch_size=16)
    number = order[table["document"].to_numpy()]
    table["row"] = table["document"] = number
    return Recorded(
        table.sort_values(["document", "depth", "window"], ignore_index=True),
        [row["input_ids"] for row in rows],
        [document.label or "" for document in documents],
        [document.group for document in documents],
    )


class Results:
    """The folder that a tool writes to, if any: nothing is computed for files that may not be written."""

    def __init__(self, command: PathFlags, names: Sequence[str]):
        """
        Args:
            command: Has the folder.
            names: Every file that `write` or `draw` will be asked for.

        Raises:
            UserError: one of them is there already.
        """
        self.folder = command.out
        for file in () if self.folder is None else map(self.folder.joinpath, names):
            if file.exists() and not command.overwrite:
                raise UserError(f"{file} exists already: name another folder as --out, or give --overwrite")

    def file(self, name: str) -> Path | None:
        """Where to write a file, in a folder that exists; `None` where nothing is to be written."""
        if self.folder is None:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name

    def write(self, name: str, numbers: dict[str, Any]) -> None:
        """Write numbers as JSON."""
        file = self.file(name)
        if file is not None:
            file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
            print(f"written: {self.folder}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column is names, the others numbers."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Printed by Python: rich would end the process itself where the reader of the output has left.
    # A number that is cut would be another number: the lines are as long as they have to be.
    console = Console(markup=False, highlight=False, width=10_000)
    with console.capture() as lines:
        console.print(table)
    print(lines.get(), end="")
