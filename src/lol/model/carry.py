"""How windows go on over forward passes: what a routed depth keeps of each row, and how new tokens use and change it.

A window's block is decided by the windows before it, so it is fixed when the window begins, and attention stays inside
the window. Per row a depth therefore keeps the current window's keys and values (at most W), its running sum and
count, the sum of the earlier windows' means, and the block and weight that the window runs with. All of it is keyed by
the row's own position, never by the column of the batch.

`Continuation` is index arithmetic, made once per pass and shift; `DepthPass` does the work of one depth. Letters: B
rows, K windows of the new tokens, G of them that go on, M new tokens of a window, T new tokens, d width, H heads, h
head size, C places for keys.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lol.model.attention import AttentionShape, window_attention
from lol.model.layers import Rotary, rotary_angles, rotate
from lol.model.windows import WindowLayout, Windows, line_up

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

    @classmethod
    def empty(cls, batch: int, shape: AttentionShape, like: Float[Tensor, "T d"]) -> "RowState":
        """Rows without a token; `like` is of the model's width, dtype and device."""

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=like.device)

        width = like.shape[1]
        keys = (batch, shape.num_heads, shape.window_size or 0, width // shape.num_heads)
        return cls(
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

    def select(self, rows: Int[Tensor, "_"]) -> "RowState":
        """The rows of these numbers."""
        return RowState(*(getattr(self, item.name).index_select(0, rows) for item in fields(self)))

    def with_room(self, places: int, copy: bool) -> "RowState":
        """The same rows with room for so many keys; `copy` makes keys and values of their own in any case."""
        room = self.keys.shape[2]
        if places > room:
            more = -(-places // _ROOM) * _ROOM - room
            return replace(self, keys=F.pad(self.keys, (0, 0, 0, more)), values=F.pad(self.values, (0, 0, 0, more)))
        return replace(self, keys=self.keys.clone(), values=self.values.clone()) if copy else self


@dataclass(frozen=True, eq=False)
class Continuation:
    """Which windows of a pass go on, which begin, and at which places: the same at all depths of a shift."""

    layout: WindowLayout
    count: Int[Tensor, "B"]
    """Tokens in each row's current window, before this pass."""
    position: Int[Tensor, "B"]
    """Tokens of each row before this pass."""
    shape: AttentionShape
    made_angles: dict[torch.dtype, Rotary] = field(default_factory=dict, repr=False)

    @cached_property
    def kept(self) -> Int[Tensor, "K"]:
        """Tokens of each window that passed before."""
        assert self.layout.kept is not None
        return self.layout.kept

    @cached_property
    def continues(self) -> Bool[Tensor, "K"]:
        return self.kept > 0

    @cached_property
    def going_on(self) -> Int[Tensor, "G"]:
        return self.continues.nonzero().squeeze(1)

    @cached_property
    def beginning(self) -> Int[Tensor, "_"]:
        return (~self.continues).nonzero().squeeze(1)

    @cached_property
    def only_goes_on(self) -> bool:
        """Whether every row is inside a window and stays there: the ordinary step of decoding. K is then B."""
        return self.layout.num_windows == self.layout.batch and self.beginning.numel() == 0

    @cached_property
    def in_step(self) -> tuple[int, int] | None:
        """(kept, new) tokens where all rows only go on, and have as many of both; else `None`."""
        kept, new = self.kept.unique().tolist(), self.layout.windows.equal_length
        return (kept[0], new) if self.only_goes_on and len(kept) == 1 and new is not None else None

    @cached_property
    def last(self) -> Int[Tensor, "_"]:
        """The last window of each row that holds new tokens."""
        return self.layout.is_last.nonzero().squeeze(1)

    @cached_property
    def last_beginning(self) -> Int[Tensor, "_"]:
        """Those of them that begin in this pass."""
        return (self.layout.is_last & ~self.continues).nonzero().squeeze(1)

    @cached_property
    def complete(self) -> Int[Tensor, "_"]:
        """The windows that end in this pass."""
        return (~self.layout.is_last).nonzero().squeeze(1)

    @cached_property
    def count_after(self) -> Int[Tensor, "B"]:
        total = self.kept + self.layout.windows.length
        return self.count.index_copy(0, self.layout.row[self.last], total[self.last])

    @cached_property
    def position_after(self) -> Int[Tensor, "B"]:
        return self.position.index_add(0, self.layout.row, self.layout.windows.length)

    @cached_property
    def places(self) -> int:
        """Places for keys that a row needs."""
        return int(self.count_after.max())

    @cached_property
    def offset(self) -> Int[Tensor, "M"]:
        """Over the new tokens of the longest window that goes on."""
        return torch.arange(int(self.layout.windows.length[self.going_on].max()), device=self.kept.device)

    @cached_property
    def place(self) -> Int[Tensor, "G M"]:
        """Places of the going windows' new tokens among their row's keys; past a window's end nobody reads them."""
        return self.kept[self.going_on, None] + self.offset

    @cached_property
    def real(self) -> Bool[Tensor, "G M"]:
        """Whether a place holds a token."""
        return self.offset < self.layout.windows.length[self.going_on, None]

    @cached_property
    def target(self) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"]]:
        """(row, place) of each of those tokens."""
        return self.layout.row[self.going_on, None].expand_as(self.real)[self.real], self.place[self.real]

    @cached_property
    def reach(self) -> int:
        """Places that their attention looks at."""
        return int(self.place[self.real].max()) + 1

    @cached_property
    def mask(self) -> Bool[Tensor, "G 1 M reach"] | None:
        """Which places each new token sees; `None`: all."""
        sliding = self.shape.sliding
        if self.in_step is not None and self.in_step[1] == 1 and (sliding is None or sliding >= self.reach):
            return None
        key, query = torch.arange(self.reach, device=self.kept.device), self.place[..., None]
        seen = key <= query
        return (seen if sliding is None else seen & (key > query - sliding))[:, None]

    def angles(self, head_dim: int, dtype: torch.dtype) -> Rotary:
        """Rotary angles of the going windows' new tokens, (G, 1, M, h)."""
        if dtype not in self.made_angles:
            self.made_angles[dtype] = rotary_angles(self.place[:, None], head_dim, self.shape.rope_theta, dtype)
        return self.made_angles[dtype]


@dataclass(frozen=True, eq=False)
class Attended:
    """Keys and values of new tokens."""

    windows: Windows
    """The layout's windows in the order of `key` and `value`."""
    key: Float[Tensor, "N d"]
    """N is T, or more after a crop, which leaves places that no window names."""
    value: Float[Tensor, "N d"]


@dataclass(eq=False)
class DepthPass:
    """New tokens at one depth, going on from what the depth keeps."""

    plan: Continuation
    rows: RowState
    """What is kept; its keys and values are written over."""
    state: Float[Tensor, "T d"]
    """The stream as this depth finds it."""
    attended: Attended | None = None
    """What attention leaves here."""

    @cached_property
    def sums(self) -> Float[Tensor, "K d"]:
        """Per window, the sum of its states, those that passed before included; float32."""
        plan, layout = self.plan, self.plan.layout
        sums = self.state.float()
        if layout.num_windows < layout.windows.total:
            sums = torch.segment_reduce(sums, "sum", lengths=layout.windows.length, axis=0, unsafe=True)
        if plan.only_goes_on:
            return self.rows.running_sum + sums
        return sums + plan.continues[:, None] * self.rows.running_sum[layout.row]

    @cached_property
    def means(self) -> Float[Tensor, "K d"]:
        """Likewise the mean."""
        return self.sums / (self.plan.kept + self.plan.layout.windows.length)[:, None]

    @cached_property
    def past_means(self) -> Float[Tensor, "B d"]:
        """Per row, the sum of the means of all windows before the first that holds new tokens; float32."""
        plan, layout, rows = self.plan, self.plan.layout, self.rows
        ended = (layout.place == 0) & ~plan.continues & (layout.index_in_document > 0)
        row = layout.row[ended]
        return rows.earlier_sum.index_add(0, row, rows.running_sum[row] / rows.count[row, None])

    def attend(
        self, query: Float[Tensor, "T d"], key: Float[Tensor, "T d"], value: Float[Tensor, "T d"], windows: Windows
    ) -> Float[Tensor, "T d"]:
        """Attention inside each window, where the first window of a row may have begun before.

        Args:
            query, key, value: Of the new tokens, in the order of `windows`.
            windows: The layout's windows, in any order of their tokens.
        """
        self.attended = Attended(windows, key, value)
        plan = self.plan
        if plan.going_on.numel() == 0:
            return window_attention(query, key, value, windows, plan.shape)
        token = self._going_tokens(windows)
        q, k, v = (self._heads(part, token) for part in (query, key, value))
        angles = plan.angles(q.shape[-1], q.dtype)
        keys, values = self._write(rotate(k, angles), v)
        joined = F.scaled_dot_product_attention(rotate(q, angles), keys, values, attn_mask=plan.mask)
        joined = joined.transpose(1, 2).flatten(-2)
        if token is None:
            return joined.flatten(0, 1)
        result = torch.empty_like(query)
        result[token[plan.real]] = joined[plan.real].to(result.dtype)
        if plan.beginning.numel():
            token, part = windows.take(plan.beginning)
            result[token] = window_attention(query[token], key[token], value[token], part, plan.shape)
        return result

    def absorb(self, expert: Int[Tensor, "K"], weight: Float[Tensor, "K"]) -> RowState:
        """The state after these tokens, once attention has run: each row's last window becomes the current one."""
        plan, layout, rows = self.plan, self.plan.layout, self.rows
        counts = {"count": plan.count_after, "position": plan.position_after}
        if plan.only_goes_on:
            return replace(rows, running_sum=self.sums, **counts)
        last, row = plan.last, layout.row[plan.last]
        keys, values = self._write_beginning()
        return RowState(
            keys=keys,
            values=values,
            running_sum=rows.running_sum.index_copy(0, row, self.sums[last]),
            earlier_sum=self.past_means.index_add(0, layout.row[plan.complete], self.means[plan.complete]),
            expert=rows.expert.index_copy(0, row, expert[last]),
            weight=rows.weight.index_copy(0, row, weight[last]),
            router_only=rows.router_only,
            **counts,
        )

    def replay(self, expert: Int[Tensor, "K"], weight: Float[Tensor, "K"]) -> RowState:
        """`absorb` where attention ran in another pass, which left its keys and values here."""
        assert self.attended is not None
        if self.plan.going_on.numel():
            token = self._going_tokens(self.attended.windows)
            k, v = (self._heads(part, token) for part in (self.attended.key, self.attended.value))
            self._write(rotate(k, self.plan.angles(k.shape[-1], k.dtype)), v)
        return self.absorb(expert, weight)

    def _going_tokens(self, windows: Windows) -> Int[Tensor, "G M"] | None:
        """The new tokens of the windows that go on; `None` where they are all there is, and in order."""
        plan = self.plan
        if plan.in_step is not None and windows is plan.layout.windows:
            return None
        return (windows.start[plan.going_on, None] + plan.offset).clamp(max=windows.total - 1)

    def _heads(self, part: Float[Tensor, "T d"], token: Int[Tensor, "G M"] | None) -> Float[Tensor, "G H M h"]:
        grid = part.unflatten(0, (self.plan.layout.batch, -1)) if token is None else part[token]
        return grid.unflatten(-1, (self.plan.shape.num_heads, -1)).transpose(1, 2)

    def _write(
        self, key: Float[Tensor, "G H M h"], value: Float[Tensor, "G H M h"]
    ) -> tuple[Float[Tensor, "G H reach h"], Float[Tensor, "G H reach h"]]:
        """Put new keys and values of the windows that go on behind those that are kept; returns both together."""
        plan, both = self.plan, []
        for kept, new in ((self.rows.keys, key), (self.rows.values, value)):
            if plan.in_step is not None:
                kept[:, :, plan.in_step[0] : plan.reach] = new
            else:
                row, place = plan.target
                kept[row, :, place] = new.transpose(1, 2)[plan.real].to(kept.dtype)
            near = kept[:, :, : plan.reach]
            both.append(near if plan.only_goes_on else near[plan.layout.row[plan.going_on]])
        return both[0], both[1]

    def _write_beginning(self) -> tuple[Float[Tensor, "B H C h"], Float[Tensor, "B H C h"]]:
        """Put the keys and values of windows that begin, and are their row's last, at the front."""
        assert self.attended is not None
        layout, shape, attended, windows = self.plan.layout, self.plan.shape, self.attended, self.attended.windows
        keys, values = self.rows.keys, self.rows.values
        which = self.plan.last_beginning
        if which.numel() == 0:
            return keys, values
        if torch.is_grad_enabled():
            # The backward pass of attention reads what is about to be written over.
            keys, values = keys.clone(), values.clone()
        length = windows.length[which]
        offset = torch.arange(int(length.max()), device=length.device)
        real = offset < length[:, None]
        token, place = (windows.start[which, None] + offset)[real], offset.expand_as(real)[real]
        row = layout.row[which, None].expand_as(real)[real]
        key, value = (part[token].unflatten(-1, (shape.num_heads, -1)) for part in (attended.key, attended.value))
        angles = rotary_angles(place[:, None], key.shape[-1], shape.rope_theta, key.dtype)
        # Under autocast projections are narrower than the stream.
        keys[row, :, place] = rotate(key, angles).to(keys.dtype)
        values[row, :, place] = value.to(values.dtype)
        return keys, values

    def shorten(self, stays: Bool[Tensor, "T"], untouched: RowState) -> "tuple[DepthPass, Bool[Tensor, 'K']] | None":
        """The same without some tokens at the end, and which windows are left; `None` if none is.

        Args:
            stays: Whether a token stays.
            untouched: What was kept before any of them.
        """
        assert self.attended is not None
        layout, windows = self.plan.layout, self.attended.windows
        length = torch.zeros_like(windows.length).index_add(0, layout.window_of_token, stays.long())
        left = length > 0
        if not left.any():
            return None
        per_window = ("document", "document_in_row", "index_in_document", "row", "index_in_row", "kept")
        shorter = replace(
            layout, windows=line_up(length[left]), **{name: getattr(layout, name)[left] for name in per_window}
        )
        plan = Continuation(shorter, self.plan.count, self.plan.position, self.plan.shape)
        rows = replace(untouched, router_only=self.rows.router_only).with_room(plan.places, copy=True)
        part = Windows(windows.start[left], length[left], windows.total, ())
        return DepthPass(plan, rows, self.state[stays], replace(self.attended, windows=part)), left
