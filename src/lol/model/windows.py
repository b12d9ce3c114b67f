"""Where windows lie: positions and a shift give a layout. Pure index arithmetic, no parameters.

A batch arrives as a grid of B rows and n columns. `find_documents` drops the padding and lays the real tokens out as
one flat stream, row after row, in which every document is a run of consecutive tokens. `lay_windows` cuts that stream
into the windows of one shift, and `WindowLayout.group` brings the windows of one depth into the order of their blocks.

Letters: B rows, n columns, T real tokens, G documents, K windows in the whole batch, d width.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lol.errors import UserError


@dataclass(frozen=True, eq=False)
class Documents:
    """The real tokens of a batch as one flat stream of T tokens, and the document each belongs to."""

    shape: tuple[int, int]
    """(B, n) of the grid."""
    grid_index: Int[Tensor, "T"] | None
    """Place of each token in the flattened grid; `None` where every place holds a real token."""
    position: Int[Tensor, "T"]
    """Position inside the document."""
    document: Int[Tensor, "T"]
    """Number of the document, 0 … G-1 over the whole batch."""
    document_row: Int[Tensor, "G"]
    """Row of the grid that holds the document."""
    past: Int[Tensor, "B"] | None = None
    """Tokens of each row that a cache has seen before; `None` without a cache."""

    @property
    def num_documents(self) -> int:
        return self.document_row.shape[0]

    @property
    def is_packed(self) -> bool:
        """Whether some row holds two documents or more; empty rows do not make up for it."""
        return bool((self.document_row.diff() == 0).any())

    def gather(self, grid: Tensor) -> Tensor:
        """(B, n, …) → (T, …): the real tokens."""
        flat = grid.flatten(0, 1)
        return flat if self.grid_index is None else flat.index_select(0, self.grid_index)

    def scatter(self, flat: Tensor) -> Tensor:
        """(T, …) → (B, n, …), with zeros where there is padding."""
        batch, columns = self.shape
        if self.grid_index is not None:
            grid = flat.new_zeros(batch * columns, *flat.shape[1:])
            flat = grid.index_copy(0, self.grid_index, flat)
        return flat.view(batch, columns, *flat.shape[1:])

    @cached_property
    def grid_document(self) -> Int[Tensor, "B n"]:
        """Number of each place's document, -1 at padding."""
        return self.scatter(self.document + 1) - 1

    @cached_property
    def grid_document_in_row(self) -> Int[Tensor, "B n"]:
        """The same, each row counting from 0."""
        return self.scatter(_number_within(self.document_row)[self.document] + 1) - 1

    @cached_property
    def grid_position(self) -> Int[Tensor, "B n"]:
        """Position inside the document, 0 at padding."""
        return self.scatter(self.position)


def find_documents(
    shape: tuple[int, int],
    position_ids: Int[Tensor, "_ n"] | None,
    attention_mask: Int[Tensor, "B n"] | Bool[Tensor, "B n"] | None,
    device: torch.device,
    past: Int[Tensor, "B"] | None = None,
) -> Documents:
    """Find the documents of a batch.

    Without `position_ids` every row is one document and positions count its real tokens. With them, a document begins
    wherever they restart at 0, which is the ecosystem's convention for packed rows.

    Args:
        shape: (B, n).
        position_ids: One row may stand for all (the ecosystem broadcasts them).
        attention_mask: 1 or True at real tokens.
        device: where the index tensors live.
        past: Tokens of each row that a cache has seen before: positions go on from there, in one document a row.

    Raises:
        UserError: positions that do not count up from 0 within a document, or a batch without any real token.
    """
    batch, columns = shape
    real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.to(torch.bool)
    grid_index = None if real is None else real.flatten().nonzero().squeeze(1)
    row = torch.arange(batch, device=device).repeat_interleave(columns)
    row = row if grid_index is None else row[grid_index]
    if row.numel() == 0:
        raise UserError("the batch holds no real token: attention_mask is 0 everywhere, or the rows are empty")

    first_in_row = row.diff(prepend=row.new_tensor([-1])) != 0
    given = None if position_ids is None else position_ids.expand(batch, columns).flatten()
    if given is not None and grid_index is not None:
        given = given[grid_index]
    begins = first_in_row if given is None else first_in_row | (given == 0)
    document = begins.cumsum(0) - 1
    begin = begins.nonzero().squeeze(1)
    position = torch.arange(row.numel(), device=device) - begin[document]
    if past is not None:
        if document[-1] != first_in_row.sum() - 1:
            raise UserError("packed rows cannot go on from a cache: give one document per row")
        position = position + past[row]
    if given is not None and bool((position != given).any()):
        where = int((position != given).nonzero()[0])
        raise UserError(
            "position_ids must count 0, 1, 2, … inside each document, restart at 0 where the next begins, and go on "
            f"where a cache ends; in row {int(row[where])} a position is {int(given[where])} where "
            f"{int(position[where])} was expected"
        )
    return Documents(shape, grid_index, position, document, row[begin], past)


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """Windows that attend together: up to `length` tokens each."""

    length: int
    windows: Int[Tensor, "_"]


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows as runs of a sequence of tokens that they fill without gaps, in some order."""

    start: Int[Tensor, "K"]
    """The first token of each window."""
    length: Int[Tensor, "K"]
    total: int
    """Tokens in the sequence, the sum of the lengths."""
    groups: tuple[AttentionGroup, ...]
    """The windows by length, so that attention folds each group into one batch."""

    def take(self, which: Int[Tensor, "_"]) -> "tuple[Int[Tensor, 'M'], Windows]":
        """Some of the windows by themselves: their M tokens here, and where the windows lie among those."""
        part = line_up(self.length[which])
        shift = (self.start[which] - part.start).repeat_interleave(part.length, output_size=part.total)
        return torch.arange(part.total, device=shift.device) + shift, part

    @property
    def equal_length(self) -> int | None:
        """The length that all windows have, or `None`."""
        only = self.groups[0].length if len(self.groups) == 1 else 0
        return only if only * self.start.shape[0] == self.total else None

    @cached_property
    def slots(self) -> tuple[Int[Tensor, "M"], Int[Tensor, "T"], Bool[Tensor, "M"] | None]:
        """How tokens fill the attention groups: (token of each slot, slot of each token, whether a slot is real).

        Slots lie group after group, window after window. A window shorter than its group's length leaves slots at its
        right end; they repeat some token, and under a causal mask no real query ever sees them.
        """
        rows, real = [], []
        for group in self.groups:
            offset = torch.arange(group.length, device=self.start.device)
            rows.append((self.start[group.windows, None] + offset).flatten())
            real.append((offset < self.length[group.windows, None]).flatten())
        token, is_real = torch.cat(rows).clamp_(max=self.total - 1), torch.cat(real)
        slots = is_real.nonzero().squeeze(1)
        slot_of_token = torch.empty_like(token[: self.total]).index_copy_(0, token[slots], slots)
        return token, slot_of_token, None if slots.numel() == token.numel() else is_real


def line_up(length: Int[Tensor, "K"]) -> Windows:
    """Windows of these lengths, one after the other."""
    end = length.cumsum(0)
    return Windows(end - length, length, int(end[-1]), _attention_groups(length))


def _attention_groups(length: Int[Tensor, "K"]) -> tuple[AttentionGroup, ...]:
    """Group windows by exact length while there are few lengths, else by the longest's halvings.

    Rows of equal documents have at most four lengths (whole windows and the parts at both ends), and splitting them
    off exactly costs nothing. Packed documents end anywhere; there a window is filled up to at most twice its length.
    """
    sizes = length.unique().tolist()
    if len(sizes) > 4:
        sizes = sorted({-(-sizes[-1] // 2**halving) for halving in range(sizes[-1].bit_length())})
    size_of_window = torch.bucketize(length, torch.tensor(sizes, device=length.device))
    groups = [(size, (size_of_window == which).nonzero().squeeze(1)) for which, size in enumerate(sizes)]
    return tuple(AttentionGroup(size, windows) for size, windows in groups if windows.numel())


@dataclass(frozen=True, eq=False)
class WindowLayout:
    """The K windows of one shift, in the order of the stream, so that a window is a run of consecutive tokens.

    `index_in_row` is the numbering that users see: per row, in order of position, and a packed row numbers the windows
    of its documents one after the other.
    """

    windows: Windows
    num_documents: int
    document: Int[Tensor, "K"]
    document_in_row: Int[Tensor, "K"]
    index_in_document: Int[Tensor, "K"]
    batch: int
    row: Int[Tensor, "K"]
    index_in_row: Int[Tensor, "K"]
    max_in_row: int
    """Windows of the longest row, those before these tokens included."""
    width: int
    """The most windows of a row that hold these tokens."""
    kept: Int[Tensor, "K"] | None
    """Tokens of each window that a cache has seen before these; `None` without a cache."""

    @cached_property
    def place(self) -> Int[Tensor, "K"]:
        """0, 1, 2, … among the windows of the row that hold these tokens."""
        return _number_within(self.row)

    @cached_property
    def place_in_document(self) -> Int[Tensor, "K"]:
        """The same among those of the document."""
        return _number_within(self.document)

    @cached_property
    def is_last(self) -> Bool[Tensor, "K"]:
        """Whether a window is the last of its row."""
        return self.row.diff(append=self.row.new_tensor([-1])) != 0

    @property
    def num_windows(self) -> int:
        return self.document.shape[0]

    @cached_property
    def window_of_token(self) -> Int[Tensor, "T"]:
        """Number of the window of each token of the stream."""
        numbers = torch.arange(self.num_windows, device=self.document.device)
        return numbers.repeat_interleave(self.windows.length, output_size=self.windows.total)

    def take(self, which: Int[Tensor, "_"]) -> "tuple[Int[Tensor, 'M'], WindowLayout]":
        """Some of the windows by themselves: their M tokens in the stream, and their layout among those. Rows and
        documents keep their numbers."""
        tokens, windows = self.windows.take(which)
        part = replace(
            self,
            windows=windows,
            document=self.document[which],
            document_in_row=self.document_in_row[which],
            index_in_document=self.index_in_document[which],
            row=self.row[which],
            index_in_row=self.index_in_row[which],
            kept=None if self.kept is None else self.kept[which],
        )
        return tokens, part

    def group(self, expert: Int[Tensor, "K"]) -> "WindowOrder":
        """The windows brought into the order of their blocks, each block's in the order of the stream."""
        order = expert.argsort(stable=True)
        windows = self.windows
        length = windows.length[order]
        sorted_start = length.cumsum(0) - length
        arange = torch.arange(windows.total, device=expert.device)
        shift = (windows.start[order] - sorted_start).repeat_interleave(length, output_size=windows.total)
        rows = arange + shift
        inverse = torch.empty_like(rows).index_copy_(0, rows, arange)
        start = torch.empty_like(sorted_start).index_copy_(0, order, sorted_start)
        return WindowOrder(Windows(start, windows.length, windows.total, windows.groups), rows, inverse)

    def to_rows(self, values: Tensor, width: int, fill: int | float) -> Tensor:
        """(K, …) → (B, width, …): one place per row and window, `fill` where a row has no such window."""
        grid = values.new_full((self.batch, width, *values.shape[1:]), fill)
        return grid.index_put((self.row, self.place), values)

    def from_rows(self, grid: Shaped[Tensor, "B width"]) -> Shaped[Tensor, "K"]:
        """(B, width) → (K,): what stands at each window's number in its row."""
        return grid[self.row, self.index_in_row]


def lay_windows(documents: Documents, shift: int, window_size: int | None) -> WindowLayout:
    """Cut the documents into windows: position i of a document lies in window `floor((i + shift) / window_size)`.

    `window_size=None` makes every document one window. (Article; the position inside the document: decided here.)
    """
    if window_size is None:
        window_of_token = torch.zeros_like(documents.position)
    else:
        window_of_token = (documents.position + shift) // window_size
    owner = torch.stack([documents.document, window_of_token])
    begins = (owner.diff(prepend=owner.new_full((2, 1), -1)) != 0).any(0)
    start = begins.nonzero().squeeze(1)
    document = documents.document[start]
    row = documents.document_row[document]
    index_in_document = window_of_token[start]
    index_in_row, kept = _number_within(row), None
    if documents.past is None:
        max_in_row = int(index_in_row.max()) + 1
    else:
        longest = int(torch.maximum(documents.position.max() + 1, documents.past.max()))
        max_in_row = count_windows(longest, shift, window_size)
        index_in_row, kept = index_in_document, documents.position[start]
        if window_size is not None:
            kept = kept - (index_in_document * window_size - shift).clamp(min=0)
    return WindowLayout(
        windows=line_up(start.diff(append=start.new_tensor([begins.numel()]))),
        num_documents=documents.num_documents,
        document=document,
        document_in_row=_number_within(documents.document_row)[document],
        index_in_document=index_in_document,
        batch=documents.shape[0],
        row=row,
        index_in_row=index_in_row,
        max_in_row=max_in_row,
        width=int(_number_within(row).max()) + 1,
        kept=kept,
    )


def count_windows(num_tokens: int, shift: int, window_size: int | None) -> int:
    """Windows that a document of `num_tokens` tokens is cut into."""
    return 1 if window_size is None else (num_tokens - 1 + shift) // window_size + 1


def _number_within(owner: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
    """0, 1, 2, … within each run of equal owners."""
    arange = torch.arange(owner.numel(), device=owner.device)
    begins = owner.diff(prepend=owner.new_tensor([-1])) != 0
    return arange - arange[begins][begins.cumsum(0) - 1]


@dataclass(frozen=True, eq=False)
class WindowOrder:
    """The windows of a layout in another order than the stream's."""

    windows: Windows
    """Numbered as in the layout; `start` is the place in this order."""
    rows: Int[Tensor, "T"]
    """The stream's token at each place of this order."""
    inverse: Int[Tensor, "T"]
    """The place in this order of each of the stream's tokens."""

    def arrange(self, stream: Float[Tensor, "T d"]) -> Float[Tensor, "T d"]:
        """Bring the stream's tokens into this order."""
        return take_rows(stream, self.rows, self.inverse)

    def restore(self, arranged: Float[Tensor, "T d"]) -> Float[Tensor, "T d"]:
        """Bring tokens in this order back into the stream's."""
        return take_rows(arranged, self.inverse, self.rows)


class _TakeRows(torch.autograd.Function):
    """`x[index]` along the first axis whose gradient is a gather too: torch's own adds row by row, serially on CPU."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor, real: Tensor | None) -> Tensor:
        ctx.save_for_backward(inverse, real)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        inverse, real = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse)
        if real is not None:
            grad.masked_fill_(~real.view(-1, *[1] * (grad.ndim - 1)), 0)
        return grad, None, None, None


def take_rows(
    x: Float[Tensor, "N ..."],
    index: Int[Tensor, "M"],
    inverse: Int[Tensor, "N"],
    real: Bool[Tensor, "N"] | None = None,
) -> Float[Tensor, "M ..."]:
    """`x[index]` along the first axis, for an index that takes every row of x that matters exactly once.

    Args:
        x: N rows.
        index: The row that each of the M results takes.
        inverse: The result that took each row. Rows taken more than once must not need the gradients of their other
            takers (they are never read downstream).
        real: False at rows of x that no result took: their gradient is 0.
    """
    return _TakeRows.apply(x, index, inverse, real)  # pyright: ignore[reportReturnType]
