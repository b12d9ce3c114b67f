"""What a cache takes, where one is made, and what it refuses."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from cache_cases import (
    EQUAL,
    W,
    core_bytes,
    ids_of,
    in_chunks,
    padded,
    routed_layers,
    small,
    states,
)
from lol import LoLConfig, UserError
from lol.model.cost import core_cache_bytes
from model_cases import PADDING_ID, VOCABULARY

pytestmark = pytest.mark.usefixtures("no_gradients")

# --- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_core_keeps_what_is_predicted_however_long_the_text(dtype: torch.dtype, batch: int):
    model = small().to(dtype)
    cache, ids = DynamicCache(config=model.config), ids_of(batch, 2000)
    for end in (1, W, 2000):
        model(ids[:, cache.get_seq_length() : end], cache=cache)
        assert core_bytes(cache) == core_cache_bytes(model.config, batch, dtype)
    # The tensors are all that is kept: no view holds a larger one alive.
    for rows in states(cache):
        assert rows.keys.untyped_storage().nbytes() == rows.keys.nbytes
        assert rows.running_sum.untyped_storage().nbytes() == rows.running_sum.nbytes
    assert cache.layers[0].keys.shape[2] == 2000


def test_the_core_at_32768_tokens_is_the_core_at_one_window():
    model = small(num_prelude_layers=0, num_coda_layers=0)
    cache, ids = DynamicCache(config=model.config), ids_of(1, 32_768)
    model(ids[:, :W], cache=cache)
    after_one = core_bytes(cache)
    in_chunks(model, ids[:, W:], [4096], cache=cache)
    model(ids[:, -1:], cache=cache)
    assert cache.get_seq_length() == 32_769
    assert core_bytes(cache) == after_one == core_cache_bytes(model.config, 1, torch.float32)


def test_full_attention_has_no_bound_to_predict():
    with pytest.raises(UserError, match="'full' keeps every token"):
        core_cache_bytes(LoLConfig(core_attention="full"), 1, torch.float32)
    model = small(core_attention="full")
    cache = DynamicCache(config=model.config)
    model(ids_of(1, 100), cache=cache)
    short = core_bytes(cache)
    model(ids_of(1, 100), cache=cache)
    assert core_bytes(cache) > short


# --- What is made, and what is refused -------------------------------------------------------------------------------


def test_a_cache_is_made_where_it_is_asked_for():
    model = small()
    ids = ids_of(2, 12)
    assert model(ids).cache is None
    first = model(ids[:, :7], use_cache=True)
    assert len(routed_layers(first.cache)) == 3
    assert first.cache.get_seq_length() == 7
    again = model(ids[:, 7:], cache=first.cache, return_dict=False)
    assert_close(again[0], model(ids).logits[:, 7:], **EQUAL)


TAIL = ids_of(2, 4, seed=3)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"attention_mask": torch.ones(2, 16, dtype=torch.long)},
            r"\[12, 12\] real tokens .* the cache holds \[12, 7\]",
        ),
        ({}, r"\[12, 12\] real tokens in the cached part, the cache holds \[12, 7\]: give the mask"),
        (
            {"input_ids": TAIL[:1], "attention_mask": torch.ones(1, 16, dtype=torch.long)},
            "holds 2 rows, the input has 1",
        ),
        ({"num_depths": 2}, "a cache holds all depths: leave num_depths out"),
        ({"path": [0, 1]}, "path has 2 depths"),
        ({"path": [[0, 1]] * 3}, "path has 2 windows, but the longest row has 3"),
        ({"router_only_ids": torch.tensor([[1, -1, -1, -1]] * 2)}, "part of it has passed: give them with the first"),
        ({"labels": TAIL}, "a loss needs the whole text"),
        ({"position_ids": torch.arange(4)[None]}, "packed rows cannot go on|go on where a cache ends"),
        ({"position_ids": torch.tensor([[12, 13, 0, 1]])}, "packed rows cannot go on from a cache"),
        ({"input_ids": TAIL + VOCABULARY}, "outside of the vocabulary"),
    ],
)
def test_what_cannot_go_on_is_refused_and_the_cache_stays_as_it_was(inputs: dict, message: str):
    model = small(router_only_tokens=True)
    ids, mask = padded([12, 7])
    cache = DynamicCache(config=model.config)
    in_chunks(model, ids, [5], mask, cache)
    whole = torch.cat([mask, torch.ones_like(TAIL)], dim=1)
    given = {"input_ids": TAIL} | ({"attention_mask": whole} if inputs else {}) | inputs
    with pytest.raises(UserError, match=message):
        model(**given, cache=cache)
    full = model(torch.cat([ids, TAIL], dim=1), attention_mask=whole)
    assert_close(model(TAIL, attention_mask=whole, cache=cache).logits, full.logits[:, 12:], **EQUAL)


def test_a_mask_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = small()
    cache = DynamicCache(config=model.config)
    model(ids_of(2, 12), cache=cache)
    with pytest.raises(
        UserError, match=r"shape \(2, 4\), the input \(2, 4\) after 12 in the cache: give one entry per"
    ):
        model(TAIL, attention_mask=torch.ones_like(TAIL), cache=cache)


def test_packed_rows_have_no_cache():
    model = small()
    with pytest.raises(UserError, match="packed rows cannot go on from a cache: give one document per row"):
        model(ids_of(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=True)


def test_a_cache_without_routed_layers_is_refused():
    model = small()
    for cache in (DynamicCache(), DynamicCache(config=small(num_routed_depths=2).config)):
        with pytest.raises(UserError, match=r"no routed layers: make it by DynamicCache\(config=model.config\)"):
            model(ids_of(1, 6), cache=cache)


def test_a_pass_of_padding_alone_is_refused():
    model = small()
    mask = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(UserError, match="no real token"):
        model(torch.full((2, 3), PADDING_ID), attention_mask=mask, use_cache=True)


def test_recomputation_has_no_cache():
    model = small()
    model.activation_checkpointing_enable()
    model.train()
    with pytest.raises(UserError, match="gradient checkpointing runs layers twice"):
        model(ids_of(1, 6), use_cache=True)


def test_a_routed_layer_is_filled_by_the_core_alone():
    layer = routed_layers(DynamicCache(config=small().config))[0]
    for fill in (layer.update, layer.lazy_initialization):
        with pytest.raises(UserError, match="fills its cache itself"):
            fill(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
