"""A cache that goes back, and whose rows are moved, repeated and copied."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from cache_cases import (
    EQUAL,
    check_equal,
    core_bytes,
    ids_of,
    in_chunks,
    padded,
    routed_layers,
    same_states,
    small,
    states,
)
from lol import UserError

pytestmark = pytest.mark.usefixtures("no_gradients")

# --- Going back -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["windowed", "full", "sliding"])
def test_crop_by_every_length(attention: str):
    """Also with rows that pause in what is cropped, and with what is cropped being other text."""
    model = small(core_attention=attention)
    ids, mask = padded([30, 17, 24])
    mask[2, 15:19] = 0
    full = model(ids, attention_mask=mask, output_router_logits=True)
    for remove in range(20):
        cache = DynamicCache(config=model.config)
        in_chunks(model, ids[:, :10], [4], mask, cache)
        cache.activate_past_recording()
        begun = ids.clone()
        begun[:, 29 - remove :] = ids_of(3, 1 + remove, seed=7)
        for start, end in ((10, 11), (11, 20), (20, 29)):
            model(begun[:, start:end], attention_mask=mask[:, :end], cache=cache)
        cache.crop(-remove)
        end = 29 - remove
        assert cache.get_seq_length() == end
        assert {layer.get_seq_length() for layer in cache.layers} == {end}
        again = DynamicCache(config=model.config)
        in_chunks(model, ids[:, :end], [end], mask, again)
        same_states(states(cache), states(again))
        rest = model(ids[:, end:], attention_mask=mask, cache=cache)
        real = mask[:, end:].bool()
        assert_close(rest.logits[real], full.logits[:, end:][real], **EQUAL)


def test_recording_is_bounded_by_the_crops():
    """Decoding that crops at every step, as assisted decoding does, keeps one step's past."""
    model = small()
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for step in range(6):
        model(ids_of(1, 5, seed=step), cache=cache)
        assert all(len(layer._log) == 1 for layer in routed_layers(cache))
        cache.crop(-(step % 3))
        assert not any(layer._log for layer in routed_layers(cache))
    with pytest.raises(UserError, match=r"cannot forget 1 tokens.*crop them at once"):
        routed_layers(cache)[0].crop(-1)


def test_a_crop_of_what_was_not_recorded_is_refused():
    model = small(num_prelude_layers=0)
    ids, cache = ids_of(2, 25), DynamicCache(config=model.config)
    in_chunks(model, ids[:, :13], [5], cache=cache)
    with pytest.raises(UserError, match=r"cannot forget 3 tokens.*call cache.activate_past_recording\(\) before"):
        cache.crop(-3)
    with pytest.raises(UserError, match="as a negative number, not 4"):
        cache.crop(4)
    # Nothing has changed.
    cache.activate_past_recording()
    model(ids[:, 13:15], cache=cache)
    with pytest.raises(UserError, match="cannot forget 3 tokens"):
        cache.crop(-3)
    assert_close(model(ids[:, 15:], cache=cache).logits, model(ids).logits[:, 15:], **EQUAL)


def test_a_cache_whose_layers_disagree_is_refused():
    """transformers crops layer after layer: those before the core have forgotten when the core refuses."""
    model = small()
    ids, cache = ids_of(2, 25), DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    in_chunks(model, ids[:, :13], [5], cache=cache)
    with pytest.raises(UserError, match="cannot forget 3 tokens"):
        cache.crop(-3)
    with pytest.raises(UserError, match="a refused crop leaves behind: make a new cache"):
        model(ids[:, 10:], attention_mask=mask, cache=cache)


# --- Rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 6])
def test_rows_move(size: int):
    """Reordered, picked by number and by mask, repeated: each row goes on from its own past."""
    model = small()
    ids, mask = padded([22, 9, 17])
    cut = 13

    def go_on(cache: DynamicCache, rows: list[int]) -> None:
        full = model(ids[rows], attention_mask=mask[rows])
        after = []
        for start in range(cut, 22, size):
            end = min(start + size, 22)
            after.append(model(ids[rows, start:end], attention_mask=mask[rows, :end], cache=cache).logits)
        assert_close(torch.cat(after, dim=1), full.logits[:, cut:], **EQUAL)

    def begun() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        in_chunks(model, ids[:, :cut], [5], mask[:, :cut], cache)
        return cache

    cache = begun()
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    go_on(cache, [2, 0, 2])
    cache = begun()
    cache.batch_select_indices(torch.tensor([2, 1]))
    go_on(cache, [2, 1])
    cache = begun()
    cache.batch_select_indices(torch.tensor([True, False, True]))
    go_on(cache, [0, 2])
    cache = begun()
    cache.batch_repeat_interleave(2)
    go_on(cache, [0, 0, 1, 1, 2, 2])
    cache = begun()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert core_bytes(cache) == 0
    check_equal(in_chunks(model, ids, [6], mask, cache), model(ids, attention_mask=mask), mask)


def test_copies_of_a_cache_part_ways():
    model = small()
    ids, cache = ids_of(2, 25), DynamicCache(config=model.config)
    in_chunks(model, ids[:, :13], [5], cache=cache)
    kept = [rows.select(torch.arange(2)) for rows in states(cache)]
    for layer in routed_layers(cache):
        layer.reorder_cache(torch.arange(2))
    model(ids[:, 13:20], cache=cache)
    assert all((a.position + 7 == b.position).all() for a, b in zip(kept, states(cache), strict=True))
