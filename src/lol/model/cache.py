"""What a routed depth keeps while text grows: the current window, and what the router needs of the earlier ones.

A window's block is decided by the windows before it, so it is fixed when the window begins, and attention stays inside
the window. Per row a depth therefore keeps the current window's keys and values (at most W), its running sum and
count, the sum of the earlier windows' means, and the block and weight that the window runs with. All of it is keyed by
the row's own position, never by the column of the batch. Prelude and coda keep transformers' ordinary layers.

`DynamicCache(config=model.config)` builds the right layers by itself. Letters: B rows, K windows of the new tokens, T
new tokens, d width, H heads, h head size, C places for keys.
"""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lol.errors import UserError
from lol.model.attention import AttentionShape, continued_attention, window_attention
from lol.model.layers import rotary_angles, rotate
from lol.model.windows import Documents, WindowLayout, Windows, find_documents, line_up

# Places for keys grow by so many at a time where windows have no size (a document is one window).
_ROOM = 128


@dataclass(frozen=True, eq=False)
class RowState:
    """Per row, everything that a routed depth keeps."""

    keys: Float[Tensor, "B H C h"]
    """Of the current window, turned by their offset in it; only the first `count` places of a row are its own."""
    values: Float[Tensor, "B H C h"]
    count: Int[Tensor, "B"]
    """Tokens in the current window."""
    position: Int[Tensor, "B"]
    """Tokens of the row so far."""
    running_sum: Float[Tensor, "B d"]
    """Sum of the current window's states, float32."""
    earlier_sum: Float[Tensor, "B d"]
    """Sum of the means of the windows before the current one, float32; their number follows from the position."""
    expert: Int[Tensor, "B"]
    weight: Float[Tensor, "B"]
    router_only: Float[Tensor, "B d"]
    """Summed embeddings of the row's router-only tokens, float32."""

    def select(self, rows: Int[Tensor, "_"]) -> "RowState":
        """The rows of these numbers."""
        return RowState(*(getattr(self, item.name).index_select(0, rows) for item in fields(self)))


@dataclass(frozen=True, eq=False)
class Chunk:
    """The tokens of one forward pass at one depth, as the state takes them in."""

    untouched: RowState
    """The state before these tokens."""
    rows: RowState
    """The same, with the router-only tokens of this pass."""
    columns: int
    column: Int[Tensor, "T"]
    """Column of each token of the stream."""
    layout: WindowLayout
    state: Float[Tensor, "T d"]
    """The stream as this depth found it."""
    expert: Int[Tensor, "K"]
    weight: Float[Tensor, "K"]
    windows: Windows
    """The layout's windows in the order of `key` and `value`."""
    key: Float[Tensor, "N d"]
    """N is T, or more after a crop, which leaves places that no window names."""
    value: Float[Tensor, "N d"]
    rope_theta: float


class RoutedLayer(CacheLayerMixin):
    """The cache layer of a routed depth."""

    _layer_type = "routed_window"
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, **_: object):
        super().__init__()
        self.rows: RowState | None = None
        self.columns = 0
        self.record_past = False
        self._log: list[Chunk] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002
        raise UserError("a routed depth fills its cache itself; transformers' update does not apply to it")

    def update(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise UserError("a routed depth fills its cache itself; transformers' update does not apply to it")

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are kept."""
        return sum(getattr(self.rows, item.name).nbytes for item in fields(RowState)) if self.rows is not None else 0

    def begin(
        self, layout: WindowLayout, like: Float[Tensor, "T d"], shape: AttentionShape, router_only: Tensor | None
    ) -> RowState:
        """The state as new tokens find it, made at the first call.

        Args:
            layout: The windows of the new tokens.
            like: Of the width, dtype and device of the model's states.
            shape: What attention is like.
            router_only: Per document, the summed embeddings of its new router-only tokens.

        """
        if self.rows is None:
            self.rows = _empty_rows(layout.batch, shape, like)
            self.is_initialized = True
        if router_only is None:
            return self.rows
        first = layout.place_in_document == 0
        summed = self.rows.router_only.index_add(0, layout.row[first], router_only.float()[layout.document[first]])
        return replace(self.rows, router_only=summed)

    def absorb(self, chunk: Chunk) -> None:
        """Take the tokens of a forward pass into the state."""
        if self.record_past:
            self._log.append(chunk)
        # What is recorded, may be differentiated, or was made in inference mode, must not be written over.
        fixed = self.record_past or torch.is_grad_enabled()
        fixed = fixed or (chunk.rows.keys.is_inference() and not torch.is_inference_mode_enabled())
        self.rows = _absorb(chunk, in_place=not fixed)
        self.columns += chunk.columns

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs to go back, from one `crop` to the next."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns; a negative number says how many. It also drops what was recorded, as transformers'
        sliding layers do: decoding that crops at every step then keeps no more than one step's past.

        Raises:
            UserError: the past was not recorded that far back.
        """
        if tokens_to_remove > 0:
            raise UserError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}")
        remove = -tokens_to_remove
        if remove > sum(chunk.columns for chunk in self._log):
            raise UserError(
                f"this cache cannot forget {remove} tokens, for it did not record its past that far: call "
                "cache.activate_past_recording() before the tokens that may be cropped, and crop them at once"
            )
        self.columns -= remove
        while remove > 0:
            chunk = self._log.pop()
            remove -= chunk.columns
            shorter = _shorten(chunk, -remove) if remove < 0 else None
            self.rows = chunk.untouched if shorter is None else _absorb(shorter, in_place=False)
        self._log.clear()

    def reset(self) -> None:
        self.rows, self.columns, self.is_initialized = None, 0, False
        self._log.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows take the state of the rows of these numbers. What was recorded is dropped."""
        if self.rows is not None:
            self.rows = self.rows.select(beam_idx.to(self.rows.count.device))
            self._log.clear()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows (numbers, or a mask)."""
        if self.rows is not None:
            self.reorder_cache(torch.arange(self.rows.count.shape[0], device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.rows is not None:
            rows = torch.arange(self.rows.count.shape[0], device=self.rows.count.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def offload(self) -> None:
        """Nothing to do: what is kept does not grow."""

    def prefetch(self) -> None:
        """Nothing to do, likewise."""


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """Where the tokens of a pass stand in its grid of `columns` columns."""

    columns: int
    column: Int[Tensor, "T"]


@dataclass(eq=False)
class Continuation:
    """Attention of new tokens that may go on from what is kept; holds their keys and values for `Chunk`."""

    rows: RowState
    layout: WindowLayout
    shape: AttentionShape
    windows: Windows | None = None
    key: Tensor | None = None
    value: Tensor | None = None

    def attend(
        self, query: Float[Tensor, "T d"], key: Float[Tensor, "T d"], value: Float[Tensor, "T d"], windows: Windows
    ) -> Float[Tensor, "T d"]:
        """Attention inside each window, where the first window of a row may have begun before.

        Args:
            query, key, value: Of the new tokens, in the order of `windows`.
            windows: The layout's windows, in any order of their tokens.
        """
        self.windows, self.key, self.value = windows, key, value
        assert self.layout.continues is not None
        goes_on = self.layout.continues.nonzero().squeeze(1)
        if goes_on.numel() == 0:
            return window_attention(query, key, value, windows, self.shape)
        result = torch.empty_like(query)
        begins = (~self.layout.continues).nonzero().squeeze(1)
        if begins.numel():
            token, part = windows.take(begins)
            result[token] = window_attention(query[token], key[token], value[token], part, self.shape)
        row, length = self.layout.row[goes_on], windows.length[goes_on]
        offset = torch.arange(int(length.max()), device=query.device)
        token = (windows.start[goes_on, None] + offset).clamp(max=windows.total - 1)
        keys, values, count = (part[row] for part in (self.rows.keys, self.rows.values, self.rows.count))
        attended = continued_attention(query[token], key[token], value[token], keys, values, count, self.shape)
        real = offset < length[:, None]
        result[token[real]] = attended[real]
        return result

    def chunk(
        self,
        untouched: RowState | None,
        place: TokenColumns,
        state: Float[Tensor, "T d"],
        expert: Int[Tensor, "K"],
        weight: Float[Tensor, "K"],
    ) -> Chunk:
        """What the cache layer takes in, once attention has run."""
        assert untouched is not None
        assert self.windows is not None
        assert self.key is not None
        assert self.value is not None
        return Chunk(
            untouched=untouched,
            rows=self.rows,
            columns=place.columns,
            column=place.column,
            layout=self.layout,
            state=state,
            expert=expert,
            weight=weight,
            windows=self.windows,
            key=self.key,
            value=self.value,
            rope_theta=self.shape.rope_theta,
        )


def documents_of_pass(
    shape: tuple[int, int],
    position_ids: Int[Tensor, "_ n"] | None,
    attention_mask: Int[Tensor, "B _"] | Bool[Tensor, "B _"] | None,
    device: torch.device,
    cache: Cache | None,
) -> Documents:
    """The documents of one pass; with a cache they go on, and the attention mask covers the tokens in it too.

    Raises:
        UserError: a mask of another shape, and what `find_documents` raises.
    """
    batch, columns = shape
    before = 0 if cache is None else cache.get_seq_length()
    if attention_mask is not None and attention_mask.shape != (batch, before + columns):
        cached = f" after {before} in the cache" if before else ""
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the input {shape}{cached}: give one entry per "
            "token, those in the cache included"
        )
    past = None
    if cache is not None:
        past = torch.full((batch,), before, device=device)
        if attention_mask is not None:
            past = attention_mask[:, :before].long().sum(1)
    mask = attention_mask if attention_mask is None else attention_mask[:, before:]
    return find_documents(shape, position_ids, mask, device, past)


def window_sums(
    rows: RowState, state: Float[Tensor, "T d"], layout: WindowLayout
) -> tuple[Float[Tensor, "K d"], Float[Tensor, "K d"]]:
    """Per window, sum and mean of its states, those that passed before included; float32."""
    sums = torch.segment_reduce(state.float(), "sum", lengths=layout.windows.length, axis=0, unsafe=True)
    sums = sums + _continues(layout)[:, None] * rows.running_sum[layout.row]
    count = layout.windows.length + _continues(layout) * rows.count[layout.row]
    return sums, sums / count[:, None]


def past_means(rows: RowState, layout: WindowLayout) -> Float[Tensor, "B d"]:
    """Per row, the sum of the means of all windows before the first that holds new tokens; float32."""
    first = layout.place == 0
    ended = first & ~_continues(layout) & (layout.index_in_document > 0)
    row = layout.row[ended]
    return rows.earlier_sum.index_add(0, row, rows.running_sum[row] / rows.count[row, None])


def _continues(layout: WindowLayout) -> Bool[Tensor, "K"]:
    assert layout.continues is not None
    return layout.continues


def _empty_rows(batch: int, shape: AttentionShape, like: Float[Tensor, "T d"]) -> RowState:
    def zeros(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=like.device)

    width = like.shape[1]
    keys = (batch, shape.num_heads, shape.window_size or 0, width // shape.num_heads)
    return RowState(
        keys=zeros(*keys, dtype=like.dtype),
        values=zeros(*keys, dtype=like.dtype),
        count=zeros(batch, dtype=torch.long),
        position=zeros(batch, dtype=torch.long),
        running_sum=zeros(batch, width, dtype=torch.float32),
        earlier_sum=zeros(batch, width, dtype=torch.float32),
        expert=zeros(batch, dtype=torch.long),
        weight=zeros(batch, dtype=torch.float32),
        router_only=zeros(batch, width, dtype=torch.float32),
    )


def _absorb(chunk: Chunk, in_place: bool) -> RowState:
    """The state after a chunk: each row's last window becomes the current one."""
    rows, layout = chunk.rows, chunk.layout
    sums, means = window_sums(rows, chunk.state, layout)
    last = layout.is_last.nonzero().squeeze(1)
    complete = (~layout.is_last).nonzero().squeeze(1)
    row = layout.row[last]
    kept = _continues(layout)[last] * rows.count[row]
    count = rows.count.index_copy(0, row, chunk.windows.length[last] + kept)
    tokens = torch.zeros_like(rows.position).index_add(0, layout.row, layout.windows.length)
    keys, values = _keep_keys(chunk, last, kept, int(count.max()), in_place)
    return RowState(
        keys=keys,
        values=values,
        count=count,
        position=rows.position + tokens,
        running_sum=rows.running_sum.index_copy(0, row, sums[last]),
        earlier_sum=past_means(rows, layout).index_add(0, layout.row[complete], means[complete]),
        expert=rows.expert.index_copy(0, row, chunk.expert[last]),
        weight=rows.weight.index_copy(0, row, chunk.weight[last]),
        router_only=rows.router_only,
    )


def _keep_keys(chunk: Chunk, last: Tensor, kept: Tensor, needed: int, in_place: bool) -> tuple[Tensor, Tensor]:
    """Put the new keys and values of each row's last window behind those that are kept of it."""
    rows, windows = chunk.rows, chunk.windows
    _, num_heads, room, head = rows.keys.shape
    keys, values = rows.keys, rows.values
    if needed > room:
        more = -(-needed // _ROOM) * _ROOM - room
        keys, values = F.pad(keys, (0, 0, 0, more)), F.pad(values, (0, 0, 0, more))
    elif not in_place:
        keys, values = keys.clone(), values.clone()
    offset = torch.arange(int(windows.length[last].max()), device=last.device)
    real = offset < windows.length[last, None]
    token, place = (windows.start[last, None] + offset)[real], (kept[:, None] + offset)[real]
    row = chunk.layout.row[last, None].expand_as(real)[real]
    key, value = (part[token].unflatten(-1, (num_heads, head)) for part in (chunk.key, chunk.value))
    angles = rotary_angles(place[:, None], head, chunk.rope_theta, key.dtype)
    # Under autocast projections are narrower than the stream.
    keys[row, :, place] = rotate(key, angles).to(keys.dtype)
    values[row, :, place] = value.to(values.dtype)
    return keys, values


def _shorten(chunk: Chunk, columns: int) -> Chunk | None:
    """The chunk without its tokens from this column on; `None` if none is left."""
    stays = chunk.column < columns
    layout, windows = chunk.layout, chunk.windows
    length = torch.zeros_like(windows.length).index_add(0, layout.window_of_token, stays.long())
    left = length > 0
    if not left.any():
        return None
    per_window = ("document", "document_in_row", "index_in_document", "row", "index_in_row", "continues")
    return replace(
        chunk,
        columns=columns,
        column=chunk.column[stays],
        state=chunk.state[stays],
        expert=chunk.expert[left],
        weight=chunk.weight[left],
        layout=replace(
            layout, windows=line_up(length[left]), **{name: getattr(layout, name)[left] for name in per_window}
        ),
        windows=Windows(windows.start[left], length[left], windows.total, ()),
    )
