"""The model against the oracle: every kind of core, batch and steering, in random small models."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch.testing import assert_close

from model_cases import (
    VOCABULARY,
    bounded,
    check_against_oracle,
    drawn_noise,
    make_batch,
    make_model,
    routed_specs,
    row_lengths,
    specs,
    window_counts,
)
from oracle import Spec, document_forward, next_token_losses

seeds = st.integers(0, 10_000)


@bounded(40)
@given(spec=specs(), rows=row_lengths(), seed=seeds)
def test_packed_and_padded_documents(spec: Spec, rows: list[list[int]], seed: int):
    results = check_against_oracle(spec, make_model(spec, seed), make_batch(rows, seed))
    blocks = {block for result in results for depth in result.experts for block in depth}
    event("several blocks in use" if len(blocks) > 1 else "one block in use")


@bounded(25)
@given(spec=specs(), lengths=st.lists(st.integers(1, 11), min_size=2, max_size=4), seed=seeds, masked=st.booleans())
def test_packed_rows_without_padding(spec: Spec, lengths: list[int], seed: int, masked: bool):
    """What training sees. The second row has the same documents the other way round."""
    batch = make_batch([lengths, lengths[::-1]], seed, extra_columns=0)
    given = {} if masked else {"attention_mask": None}
    check_against_oracle(spec, make_model(spec, seed), batch, **given)


@bounded(5)
@given(spec=specs(num_prelude_layers=1), seed=seeds)
def test_an_empty_row_beside_a_packed_one(spec: Spec, seed: int):
    """Two rows and two documents, yet packed."""
    batch = make_batch([[3, 6], [1]], seed)
    batch.attention_mask[1] = 0
    alone = replace(batch, documents=[batch.documents[0], []], starts=[batch.starts[0], []])
    check_against_oracle(spec, make_model(spec, seed), alone)


@bounded(15)
@given(spec=specs(), lengths=st.lists(st.integers(1, 11), min_size=2, max_size=3), seed=seeds)
def test_packed_rows_that_are_full(spec: Spec, lengths: list[int], seed: int):
    """Rows of training: no place is padding. With a mask that says so, and with none."""
    model, batch = make_model(spec, seed), make_batch([lengths, lengths[::-1]], seed, extra_columns=0)
    assert batch.attention_mask.all()
    check_against_oracle(spec, model, batch)
    check_against_oracle(spec, model, batch, attention_mask=None)


@bounded(15)
@given(spec=specs(), length=st.integers(1, 14), seed=seeds)
def test_one_plain_row_needs_neither_mask_nor_positions(spec: Spec, length: int, seed: int):
    batch = make_batch([[length]], seed, extra_columns=0)
    check_against_oracle(spec, make_model(spec, seed), batch, attention_mask=None, position_ids=None)


@bounded(15)
@given(spec=specs(), lengths=st.lists(st.integers(1, 11), min_size=1, max_size=3), seed=seeds)
def test_positions_of_padded_rows_come_from_the_mask(spec: Spec, lengths: list[int], seed: int):
    batch = make_batch([[length] for length in lengths], seed)
    check_against_oracle(spec, make_model(spec, seed), batch, position_ids=None)


@bounded(20)
@given(spec=specs(), rows=row_lengths(max_rows=2), seed=seeds, data=st.data())
def test_fixed_paths(spec: Spec, rows: list[list[int]], seed: int, data: st.DataObject):
    blocks = st.integers(0, spec.num_experts - 1)
    path = data.draw(st.tuples(*[blocks] * spec.num_routed_depths), label="fixed path")
    spec = Spec(**(vars(spec) | {"routing": "fixed", "fixed_path": path}))
    check_against_oracle(spec, make_model(spec, seed), make_batch(rows, seed))


@bounded(20)
@given(
    spec=routed_specs(),
    rows=row_lengths(max_rows=2),
    seed=seeds,
    weight=st.sampled_from([None, 1.0, 0.3]),
    data=st.data(),
)
def test_forced_paths(spec: Spec, rows: list[list[int]], seed: int, weight: float | None, data: st.DataObject):
    batch = make_batch(rows, seed)
    counts = [[sum(row) for row in window_counts(spec, batch, depth)] for depth in range(spec.num_routed_depths)]
    windows = max(max(per_row) for per_row in counts)
    block = st.integers(-1, spec.num_experts - 1)
    depths = st.lists(
        st.lists(block, min_size=windows, max_size=windows),
        min_size=spec.num_routed_depths,
        max_size=spec.num_routed_depths,
    )
    path = data.draw(st.lists(depths, min_size=len(rows), max_size=len(rows)), label="path")
    check_against_oracle(spec, make_model(spec, seed), batch, path=path, path_weight=weight)


@bounded(6)
@given(seed=seeds, shape=st.sampled_from(["depths", "depths and windows"]))
def test_a_path_broadcasts_over_rows_and_windows(seed: int, shape: str):
    spec = Spec(8, 2, 1, 1, 3, 3, 4, 2)
    batch = make_batch([[9], [6]], seed)
    short = [2, -1, 0]
    # Nine tokens make at most three windows in each depth, six make at most two.
    windows = 3
    given_path = torch.tensor(short if shape == "depths" else [[block] * windows for block in short])
    path = [[[block] * windows for block in short]] * 2
    check_against_oracle(spec, make_model(spec, seed), batch, path=path, given_path=given_path)


@bounded(20)
@given(spec=specs(), rows=row_lengths(max_rows=2), seed=seeds, data=st.data())
def test_router_only_tokens(spec: Spec, rows: list[list[int]], seed: int, data: st.DataObject):
    token = st.just(-1) | st.integers(0, VOCABULARY - 1)
    hidden = [[data.draw(st.lists(token, min_size=n, max_size=n)) for n in row] for row in rows]
    model = make_model(spec, seed, router_only_tokens=True)
    check_against_oracle(spec, model, make_batch(rows, seed), router_only=hidden)


@bounded(20)
@given(spec=specs(), rows=row_lengths(max_rows=2), seed=seeds)
def test_training_noise(spec: Spec, rows: list[list[int]], seed: int):
    check_against_oracle(spec, make_model(spec, seed), make_batch(rows, seed), noise_seed=seed + 1)


@bounded(15)
@given(spec=specs(num_routed_depths=4), rows=row_lengths(max_rows=2), seed=seeds, depth=st.integers(1, 4))
def test_growing_depth(spec: Spec, rows: list[list[int]], seed: int, depth: int):
    check_against_oracle(spec, make_model(spec, seed), make_batch(rows, seed), num_depths=depth)


@bounded(15)
@given(spec=specs(), rows=row_lengths(), seed=seeds)
def test_the_loss_is_the_mean_over_documents_tokens(spec: Spec, rows: list[list[int]], seed: int):
    batch, model = make_batch(rows, seed), make_model(spec, seed)
    results = check_against_oracle(spec, model, batch)
    losses = [
        loss
        for result, (_, _, tokens, _) in zip(results, batch.each(), strict=True)
        for loss in next_token_losses(result.logits, tokens)
    ]
    if not losses:
        return
    labels = torch.where(batch.attention_mask == 1, batch.input_ids, -100)
    expected = torch.tensor(sum(losses) / len(losses), dtype=torch.float64)
    assert_close(model(**batch.inputs(), labels=labels).loss.double(), expected, atol=1e-5, rtol=1e-5)


@bounded(25)
@given(spec=specs(), lengths=st.lists(st.integers(2, 8), min_size=1, max_size=2), seed=seeds, noisy=st.booleans())
def test_the_gradient_is_the_slope_of_the_oracles_loss(spec: Spec, lengths: list[int], seed: int, noisy: bool):
    """Along a random direction in the space of all parameters, by central difference; also through alpha and noise."""
    batch, model = make_batch([lengths], seed), make_model(spec, seed)
    noise = drawn_noise(spec, batch, spec.num_routed_depths, seed) if noisy else None
    generator = torch.Generator().manual_seed(seed)
    directions = {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in model.named_parameters()
    }
    step = 1e-5

    def moved(by: float) -> tuple[float, list[list[list[int]]]]:
        weights = model.state_dict()
        weights |= {name: weights[name] + by * direction for name, direction in directions.items()}
        losses, experts = [], []
        for number, (_, _, tokens, _) in enumerate(batch.each()):
            own_noise = None if noise is None else noise[number]
            result = document_forward(spec, weights, tokens, noise=own_noise)
            losses += next_token_losses(result.logits, tokens)
            experts.append(result.experts)
        return sum(losses) / len(losses), experts

    (ahead, path_ahead), (behind, path_behind) = moved(step), moved(-step)
    assume(path_ahead == path_behind)
    labels = torch.where(batch.attention_mask == 1, batch.input_ids, -100)
    model.train(noisy)
    model(**batch.inputs(), labels=labels, generator=torch.Generator().manual_seed(seed)).loss.backward()
    slope = sum(
        (parameter.grad * directions[name]).sum()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    )
    assert_close(slope, torch.tensor((ahead - behind) / (2 * step), dtype=torch.float64), atol=1e-4, rtol=1e-4)


def test_windows_do_choose_different_blocks():
    """The random models above would prove little if a router always chose one block."""
    spec = Spec(8, 2, 1, 1, 4, 4, 4, 2)
    used = 0
    for seed in range(10):
        model, batch = make_model(spec, seed), make_batch([[11, 5], [9]], seed)
        load = model(**batch.inputs()).routing.load
        used += int((load > 0).sum(1).max())
    assert used >= 25
