"""The cache layer of a routed depth, as transformers wants it, and the documents of a pass that goes on from a cache.

What a layer keeps and how it changes: `carry.py`. Prelude and coda keep transformers' ordinary layers;
`DynamicCache(config=model.config)` builds the right ones by itself. Letters: B rows, n columns, T new tokens, K windows
of theirs, d width.
"""

from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lol.errors import UserError
from lol.model.attention import AttentionShape
from lol.model.carry import Continuation, DepthPass, RowState
from lol.model.config import LoLConfig
from lol.model.windows import Documents, WindowLayout, find_documents


@dataclass(frozen=True, eq=False)
class Chunk:
    """What a pass did at one depth, kept so that it can be undone in part."""

    untouched: RowState
    """The state before it."""
    done: DepthPass
    columns: int
    column: Int[Tensor, "T"]
    """Column of each token of the stream."""
    expert: Int[Tensor, "K"]
    weight: Float[Tensor, "K"]

    def shorten(self, columns: int) -> RowState:
        """The state after its first so many columns."""
        shorter = self.done.shorten(self.column < columns, self.untouched)
        if shorter is None:
            return self.untouched
        part, left = shorter
        return part.replay(self.expert[left], self.weight[left])


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

    def absorb(
        self, done: DepthPass, documents: Documents, expert: Int[Tensor, "K"], weight: Float[Tensor, "K"]
    ) -> None:
        """Take the tokens of a forward pass into the state."""
        columns = documents.shape[1]
        if self.record_past:
            assert self.rows is not None
            places = torch.arange(columns, device=expert.device).expand(documents.shape)
            self._log.append(Chunk(self.rows, done, columns, documents.gather(places), expert, weight))
        self.rows = done.absorb(expert, weight)
        self.columns += columns

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
            self.rows = chunk.shorten(-remove) if remove < 0 else chunk.untouched
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
class CoreMemory:
    """What the core keeps from pass to pass: a cache layer per depth, and the tokens of this pass."""

    layers: list[RoutedLayer]
    documents: Documents
    shape: AttentionShape
    plans: dict[int, Continuation] = field(default_factory=dict)
    """How windows go on, made once for all depths of the same layout."""

    def begin(
        self, depth: int, layout: WindowLayout, state: Float[Tensor, "T d"], router_only: Float[Tensor, "G d"] | None
    ) -> DepthPass:
        """What one depth keeps of earlier passes, as its new tokens find it.

        Args:
            depth: 0-based.
            layout: The windows of the new tokens at this depth.
            state: The stream as this depth finds it.
            router_only: Per document, the summed embeddings of its new router-only tokens.
        """
        layer = self.layers[depth]
        if layer.rows is None:
            layer.rows = RowState.empty(layout.batch, self.shape, state)
            layer.is_initialized = True
        rows = layer.rows
        plan = self.plans.get(id(layout))
        if plan is None:
            plan = self.plans[id(layout)] = Continuation(layout, rows.count, rows.position, self.shape)
        # What is recorded, may be differentiated, or was made in inference mode, must not be written over.
        copy = layer.record_past or torch.is_grad_enabled()
        copy = copy or (rows.keys.is_inference() and not torch.is_inference_mode_enabled())
        rows = rows.with_room(plan.places, copy)
        if router_only is not None:
            first = layout.place_in_document == 0
            summed = rows.router_only.index_add(0, layout.row[first], router_only.float()[layout.document[first]])
            rows = replace(rows, router_only=summed)
        return DepthPass(plan, rows, state)

    def end(self, depth: int, done: DepthPass, expert: Int[Tensor, "K"], weight: Float[Tensor, "K"]) -> None:
        """Take in what the depth did."""
        self.layers[depth].absorb(done, self.documents, expert, weight)


def open_memory(
    config: LoLConfig, cache: Cache, documents: Documents, num_depths: int, router_only: Float[Tensor, "G d"] | None
) -> CoreMemory:
    """The core's part of a cache, if these tokens can go on from it.

    Raises:
        UserError: they cannot; the message names the fix.
    """
    first = config.num_prelude_layers
    layers = [layer for layer in cache.layers[first : first + num_depths] if isinstance(layer, RoutedLayer)]
    if num_depths != config.num_routed_depths:
        raise UserError("a cache holds all depths: leave num_depths out, or run without a cache")
    if len(layers) < num_depths:
        raise UserError("the cache has no routed layers: make it by DynamicCache(config=model.config)")
    batch, memory = documents.shape[0], CoreMemory(layers, documents, AttentionShape.of(config))
    before = cache.get_seq_length()
    if before == 0:
        return memory
    if router_only is not None and bool(router_only.any()):
        raise UserError(
            "router-only tokens condition the whole document, and part of it has passed: give them with the first "
            "tokens"
        )
    if any(cache.get_seq_length(index) != before for index in range(len(cache.layers))):
        raise UserError(
            "the layers of the cache have seen different tokens, which an interrupted pass or a refused crop "
            "leaves behind: make a new cache"
        )
    assert documents.past is not None
    rows = layers[0].rows if layers else None
    if rows is not None and len(rows.position) != batch:
        raise UserError(f"the cache holds {len(rows.position)} rows, the input has {batch}: give as many")
    if rows is not None and not torch.equal(rows.position, documents.past):
        raise UserError(
            f"the attention mask has {documents.past.tolist()} real tokens in the cached part, the cache holds "
            f"{rows.position.tolist()}: give the mask that those tokens were given with"
        )
    return memory


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
