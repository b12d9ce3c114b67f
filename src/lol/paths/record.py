"""Record the paths: which block every window of some text ran, at every depth, and with which weight.

`record_paths` gives one tidy row per window and depth; the other functions read that table. Windows shift from depth
to depth, so a *token* has a path (the blocks that its windows ran, first depth to last) and a stretch of tokens between
two borders shares one.

Letters: B rows of a batch, n columns, D depths, K windows of the longest row, L blocks, T tokens of a document.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from lol.data.token_text import TokenText
from lol.errors import UserError
from lol.model.base import LoLModel
from lol.model.config import LoLConfig
from lol.model.outputs import Routing

COLUMNS = ("row", "document", "window", "depth", "start", "end", "expert", "weight", "probabilities")


def find_model(model: nn.Module) -> LoLModel:
    """The `LoLModel` inside of a model, however it is wrapped.

    Raises:
        UserError: there is none.
    """
    for module in model.modules():
        if isinstance(module, LoLModel):
            return module
    raise UserError(f"{type(model).__name__} holds no LoLModel: paths are those of LoLModel or LoLForCausalLM")


@torch.no_grad()
def record_paths(
    model: nn.Module,
    rows: str | Iterable[Any],
    tokenizer: Any = None,
    *,
    batch_size: int = 8,
    num_depths: int | None = None,
    text_column: str = "text",
) -> pd.DataFrame:
    """Run a model over text or tokens and record what every window did.

    The model is run in evaluation mode, and its mode is put back. What steers the model while this runs (`force_path`)
    is in the record.

    Args:
        model: `LoLModel`, `LoLForCausalLM` or a module around one.
        rows: A text, or texts; or token ids, a row each; or mappings (a `datasets.Dataset` or its rows) with a text, or
            with `input_ids` and, where they have them, `attention_mask`, `position_ids` that restart where a packed
            row's next document begins, and `router_only_ids`.
        tokenizer: Reads texts, as `tokenizer(text)["input_ids"]`. Not needed for ids.
        batch_size: Rows run at once. Results do not depend on it.
        num_depths: Run only the first so many depths, as in growing. Default: all.
        text_column: Where mappings without `input_ids` have their text.

    Returns:
        One line per window and depth, in order of document, depth and window:
        row (number of the row), document (number over all rows), window (its number in the row, as in the model's
        `routing`), depth (0-based), start and end (tokens inside the document, end exclusive), expert, weight (of the
        update), probabilities (the router's, a list of L; under a fixed path 1 for the block that ran).

    Raises:
        UserError: texts without a tokenizer, an empty row, a model that has diverged, or what the model itself refuses.
    """
    base = find_model(model)
    if not (base.config.num_routed_depths if num_depths is None else num_depths):
        raise UserError("there is nothing to record: no routed depth is run")
    was_training = base.training
    base.eval()
    parts, rows_so_far, documents_so_far = [], 0, 0
    try:
        read = _read_rows([rows] if isinstance(rows, str) else rows, tokenizer, text_column)
        while batch := list(islice(read, batch_size)):
            ids, positions, hidden, mask = _pad(batch, base.embed_tokens.weight.device)
            outputs = base(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                router_only_ids=hidden if bool((hidden >= 0).any()) else None,
                num_depths=num_depths,
                output_router_logits=True,
            )
            lengths = _document_lengths([positions for _, positions, _ in batch])
            part = _tabulate(base.config, outputs.routing, outputs.router_logits, lengths)
            part["row"] += rows_so_far
            part["document"] += documents_so_far
            rows_so_far += len(batch)
            documents_so_far += sum(len(row) for row in lengths)
            parts.append(part)
    finally:
        base.train(was_training)
    if not parts:
        raise UserError("there is nothing to record: give at least one row of text or tokens")
    table = pd.concat(parts, ignore_index=True)
    if not np.isfinite(table["weight"].to_numpy()).all():
        raise UserError("the router's probabilities are not finite: the model has diverged; take an earlier checkpoint")
    return table.sort_values(["document", "depth", "window"], ignore_index=True)


def _read_rows(rows: Iterable[Any], tokenizer: Any, text_column: str) -> Iterator[Int64[np.ndarray, "3 _"]]:
    """Token ids, positions and router-only ids (-1: none) of each row, without its padding."""
    for number, row in enumerate(rows):
        positions = hidden = mask = None
        if isinstance(row, Mapping) and "input_ids" not in row:
            if not isinstance(row.get(text_column), str):
                raise UserError(
                    f"row {number} has {', '.join(map(str, row))}, but neither input_ids nor a text in "
                    f"{text_column!r}: name the column of the text as text_column"
                )
            row = row[text_column]
        if isinstance(row, str):
            if tokenizer is None:
                raise UserError("rows of text need a tokenizer: record_paths(model, texts, tokenizer)")
            row = tokenizer(row)["input_ids"]
        elif isinstance(row, Mapping):
            mask, positions, hidden = (row.get(name) for name in ("attention_mask", "position_ids", "router_only_ids"))
            row = row["input_ids"]
        ids = np.asarray(row, dtype=np.int64)
        real = np.full(ids.shape, True) if mask is None else np.asarray(mask).astype(bool)
        if ids.ndim != 1 or not real.any():
            raise UserError(f"row {number} has shape {ids.shape}: a row is a list of at least one token id")
        yield np.stack(
            [
                ids[real],
                np.arange(real.sum()) if positions is None else np.asarray(positions, dtype=np.int64)[real],
                np.full(real.sum(), -1) if hidden is None else np.asarray(hidden, dtype=np.int64)[real],
            ]
        )


def _pad(batch: Sequence[Int64[np.ndarray, "3 _"]], device: torch.device) -> Int[Tensor, "4 B n"]:
    """Ids, positions, router-only ids and mask, padded at the right."""
    grid = np.zeros((4, len(batch), max(row.shape[1] for row in batch)), dtype=np.int64)
    grid[2] = -1
    for place, row in enumerate(batch):
        grid[:3, place, : row.shape[1]], grid[3, place, : row.shape[1]] = row, 1
    return torch.from_numpy(grid).to(device)


def _document_lengths(positions: list[np.ndarray]) -> list[np.ndarray]:
    """Per row, the tokens in each of its documents."""
    return [np.diff(np.append(np.flatnonzero(row == 0), row.size)) for row in positions]


def _tabulate(
    config: LoLConfig, routing: Routing, router_logits: tuple[Tensor, ...] | None, lengths: list[np.ndarray]
) -> pd.DataFrame:
    """The table of one batch, its rows and documents counted from 0."""
    assert routing.experts is not None and routing.weights is not None and routing.documents is not None  # noqa: PT018
    document_in_row = routing.documents.cpu().numpy()
    row, depth, window = np.nonzero(document_in_row >= 0)
    place = (row, depth, window)
    experts = routing.experts.cpu().numpy()[place]
    documents_before = np.cumsum([0, *(len(row_lengths) for row_lengths in lengths)])
    document = documents_before[row] + document_in_row[place]

    # Windows come in order of position, so the first of a document is where the owner changes.
    owner = np.stack([depth, document])
    begins = np.ones(row.size, dtype=bool)
    begins[1:] = (np.diff(owner) != 0).any(0)
    first = np.flatnonzero(begins)
    index_in_document = np.arange(row.size) - first[np.cumsum(begins) - 1]
    length = np.concatenate(lengths)[document]
    shift = np.array([config.window_shift(l) for l in range(document_in_row.shape[1])], dtype=np.int64)[depth]  # noqa: E741
    size = config.core_window or int(length.max(initial=1))

    if router_logits is None:
        probabilities = np.eye(config.num_experts, dtype=np.float32)[experts]
    else:
        logits = torch.stack(router_logits, dim=1).float().cpu()
        probabilities = logits.softmax(-1).numpy()[place]
    return pd.DataFrame(
        {
            "row": row,
            "document": document,
            "window": window,
            "depth": depth,
            "start": np.maximum(index_in_document * size - shift, 0),
            "end": np.minimum((index_in_document + 1) * size - shift, length),
            "expert": experts,
            "weight": routing.weights.cpu().numpy()[place],
            "probabilities": probabilities.tolist(),
        },
        columns=list(COLUMNS),
    )


@dataclass(frozen=True)
class Stretch:
    """Tokens of a document that share their window at every depth, so that they share a path."""

    start: int
    end: int
    """Exclusive."""
    path: tuple[int, ...]
    """The block that ran at each depth."""
    lines: tuple[int, ...]
    """Per depth, the place of the window's line in the table."""


def stretches(table: pd.DataFrame, document: int) -> list[Stretch]:
    """Cut a document at every border of a window, whatever its depth.

    Raises:
        UserError: the table holds no such document.
    """
    line = np.flatnonzero(table["document"].to_numpy() == document)
    if line.size == 0:
        raise UserError(f"document {document} is not in the table: it holds 0 to {table['document'].max()}")
    depth, start, end, expert = (table[name].to_numpy()[line] for name in ("depth", "start", "end", "expert"))
    starts = np.unique(start)
    ends = np.append(starts[1:], end.max())
    by_depth = []
    for number in np.unique(depth):
        here = np.flatnonzero(depth == number)
        here = here[np.argsort(start[here])]
        place = here[np.searchsorted(start[here], starts, side="right") - 1]
        by_depth.append((expert[place], line[place]))
    return [
        Stretch(
            int(begin),
            int(end),
            tuple(int(experts[place]) for experts, _ in by_depth),
            tuple(int(lines[place]) for _, lines in by_depth),
        )
        for place, (begin, end) in enumerate(zip(starts, ends, strict=True))
    ]


def token_paths(table: pd.DataFrame, document: int) -> Int[np.ndarray, "T D"]:
    """The block of each token of a document at each depth."""
    pieces = stretches(table, document)
    return np.repeat([piece.path for piece in pieces], [piece.end - piece.start for piece in pieces], axis=0)


def path_of(table: pd.DataFrame, document: int, token: int) -> tuple[int, ...]:
    """The path of one token: the block that ran at each depth.

    Raises:
        UserError: the document has no such token.
    """
    paths = token_paths(table, document)
    if not 0 <= token < len(paths):
        raise UserError(f"document {document} has no token {token}: it has tokens 0 to {len(paths) - 1}")
    return tuple(paths[token].tolist())


def utilisation(table: pd.DataFrame, num_experts: int) -> Float[np.ndarray, "D L"]:
    """The share of the windows of each depth that ran each block; each depth adds up to 1."""
    num_depths = int(table["depth"].to_numpy().max()) + 1
    counts = np.zeros((num_depths, num_experts))
    np.add.at(counts, (table["depth"].to_numpy(), table["expert"].to_numpy()), 1)
    return counts / counts.sum(1, keepdims=True)


@dataclass(frozen=True)
class PathStatistics:
    """How much the paths of a table differ."""

    entropy: tuple[float, ...]
    """Per depth, the entropy in bits of the blocks that ran there: 0 for one block, log2(L) for even use."""
    num_paths: int
    """Distinct paths of tokens."""
    tokens_of_path: dict[tuple[int, ...], int]
    """Tokens that took each path, most taken first."""
    busiest_block: int
    busiest_share: float
    """Share of all windows, over all depths, that ran the busiest block."""


def path_statistics(table: pd.DataFrame, num_experts: int) -> PathStatistics:
    """Entropy, distinct paths and the busiest block."""
    shares = utilisation(table, num_experts)
    tokens: dict[tuple[int, ...], int] = {}
    for document in np.unique(table["document"].to_numpy()).tolist():
        for piece in stretches(table, document):
            tokens[piece.path] = tokens.get(piece.path, 0) + piece.end - piece.start
    counts = np.bincount(table["expert"], minlength=num_experts)
    return PathStatistics(
        entropy=tuple(float(-sum(p * np.log2(p) for p in depth if p > 0)) for depth in shares),
        num_paths=len(tokens),
        tokens_of_path=dict(sorted(tokens.items(), key=lambda item: -item[1])),
        busiest_block=int(counts.argmax()),
        busiest_share=float(counts.max() / counts.sum()),
    )


def token_texts(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """The text of each token, such that together they are the decoded text.

    Where tokens share a character (bytes of one that is not ASCII), the last gets it and the others are empty.
    """
    text = TokenText(tokenizer, skip_special=False)
    texts = [text.add(int(token)) for token in ids]
    return [*texts[:-1], texts[-1] + text.end()] if texts else []
