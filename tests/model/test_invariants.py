"""What must hold of the model whatever its numbers are: causality, packing, padding, repeatability, neutral options."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from lol.model.lm import LoLForCausalLM
from model_cases import (
    CLOSE,
    LLAMA_NAMES,
    VOCABULARY,
    Batch,
    bounded,
    make_batch,
    make_model,
    routed_specs,
    row_lengths,
    specs,
)
from oracle import BLOCK_PARTS, Spec, core_windows

seeds = st.integers(0, 10_000)
lengths = st.integers(2, 20)


# --- 1. Causality ---------------------------------------------------------------------------------------------------


@bounded(30)
@given(spec=routed_specs(), n=lengths, seed=seeds, where=st.floats(0, 1, exclude_max=True))
def test_a_changed_token_reaches_nothing_before_it(spec: Spec, n: int, seed: int, where: float):
    """Logits before t keep their value, and so does the route of every window that starts at or before t.

    The route of a document's first window reads its first token: it is left out for t = 0.
    """
    model, batch, t = make_model(spec, seed), make_batch([[n]], seed, extra_columns=0), int(where * n)
    changed = batch.input_ids.clone()
    changed[0, t] = (changed[0, t] + 1) % VOCABULARY
    before = model(batch.input_ids, output_router_logits=True)
    after = model(changed, output_router_logits=True)
    # Windows sorted by block are multiplied in another order once a later route changes: equal but for rounding.
    assert_close(after.logits[:, :t], before.logits[:, :t], atol=1e-9, rtol=0)
    for depth in range(spec.num_routed_depths):
        for k, window in enumerate(core_windows(spec, n, depth)):
            if window[0] <= t and not (t == 0 and k == 0):
                assert after.routing.experts[0, depth, k] == before.routing.experts[0, depth, k]
                assert_close(after.router_logits[depth][0, k], before.router_logits[depth][0, k])


@bounded(20)
@given(spec=specs(), n=lengths, seed=seeds, where=st.floats(0, 1, exclude_max=True))
def test_no_gradient_flows_back_from_earlier_logits(spec: Spec, n: int, seed: int, where: float):
    """The gradient sees what the value of one changed token may hide; through a window's alpha too."""
    model, batch, t = make_model(spec, seed), make_batch([[n]], seed, extra_columns=0), int(where * n)
    embeds = model.model.embed_tokens(batch.input_ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits
    (gradient,) = torch.autograd.grad(logits[:, t].square().sum(), embeds)
    assert (gradient[:, t + 1 :] == 0).all()
    assert (gradient[:, t] != 0).any()


# --- 2. A packed document is the document alone; 3. a padded row is the row alone -----------------------------------


def loss_and_gradients(model: LoLForCausalLM, **inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's mean loss and its gradients, 0 where a parameter had no part."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return loss.detach().double(), gradients


def labels_of(batch: Batch) -> Tensor:
    return torch.where(batch.attention_mask == 1, batch.input_ids, -100)


@bounded(25)
@given(spec=specs(), rows=row_lengths(), seed=seeds)
def test_losses_and_gradients_of_packed_documents_are_those_of_the_documents(
    spec: Spec, rows: list[list[int]], seed: int
):
    # A first document of two tokens, so that there is a loss at all.
    rows = [[2, *rows[0]], *rows[1:]]
    model, batch = make_model(spec, seed), make_batch(rows, seed)
    loss, gradients = loss_and_gradients(model, **batch.inputs(), labels=labels_of(batch))

    expected_loss, expected = torch.zeros((), dtype=torch.float64), {}
    predicted = sum(len(tokens) - 1 for _, _, tokens, _ in batch.each())
    for _, _, tokens, _ in batch.each():
        if len(tokens) == 1:
            continue
        ids = torch.tensor([tokens])
        own_loss, own = loss_and_gradients(model, input_ids=ids, labels=ids)
        share = (len(tokens) - 1) / predicted
        expected_loss += share * own_loss
        expected = {name: expected.get(name, 0) + share * gradient for name, gradient in own.items()}
    assert_close(loss, expected_loss, **CLOSE)
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@bounded(20)
@given(spec=specs(), n=lengths, left=st.integers(1, 9), right=st.integers(0, 4), seed=seeds)
def test_a_padded_row_is_the_row_alone(spec: Spec, n: int, left: int, right: int, seed: int):
    """Logits, routes and gradients; the padding's own outputs are finite, and no gradient is NaN."""
    model, ids = make_model(spec, seed), make_batch([[n]], seed, extra_columns=0).input_ids
    padded = torch.nn.functional.pad(ids, (left, right), value=VOCABULARY - 1)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
    alone, within = model(ids, output_router_logits=True), model(padded, mask, output_router_logits=True)
    assert_close(within.logits[:, left : left + n], alone.logits, **CLOSE)
    assert within.logits.isfinite().all()
    assert torch.equal(within.routing.experts, alone.routing.experts)
    assert torch.equal(within.routing.load, alone.routing.load)
    assert_close(within.routing.weights, alone.routing.weights)

    loss, gradients = loss_and_gradients(model, input_ids=ids, labels=ids)
    labels = padded.masked_fill(mask == 0, -100)
    padded_loss, padded_gradients = loss_and_gradients(model, input_ids=padded, attention_mask=mask, labels=labels)
    assert_close(padded_loss, loss, **CLOSE)
    for name, gradient in padded_gradients.items():
        assert_close(gradient, gradients[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


# --- 5. Grouped dispatch is each block in a plain loop --------------------------------------------------------------


@bounded(20)
@given(spec=specs(), rows=row_lengths(), seed=seeds)
def test_grouped_dispatch_is_a_plain_loop_over_blocks(spec: Spec, rows: list[list[int]], seed: int):
    rows = [[2, *rows[0]], *rows[1:]]
    model, batch = make_model(spec, seed), make_batch(rows, seed)
    inputs = batch.inputs() | {"labels": labels_of(batch)}
    loss, gradients = loss_and_gradients(model, **inputs)
    load = model(**batch.inputs()).routing.load.sum(0)
    for name, parameter in model.model.library.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert (parameter.grad[load == 0] == 0).all(), f"{name} of an idle block has a gradient"
    model.model.dispatch.form = "loop"
    looped_loss, looped = loss_and_gradients(model, **inputs)
    assert_close(loss, looped_loss, atol=1e-9, rtol=0)
    for name, gradient in gradients.items():
        assert_close(gradient, looped[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


# --- 6. Repeatability -----------------------------------------------------------------------------------------------


@bounded(15)
@given(spec=specs(), rows=row_lengths(), seed=seeds)
def test_two_evaluations_are_bit_equal(spec: Spec, rows: list[list[int]], seed: int):
    model, batch = make_model(spec, seed).float(), make_batch(rows, seed)
    torch.manual_seed(seed)
    first = model(**batch.inputs())
    second = model(**batch.inputs())
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.routing.experts, second.routing.experts)
    assert torch.equal(first.routing.weights, second.routing.weights)


@bounded(15)
@given(spec=routed_specs(), rows=row_lengths(max_rows=5), seed=seeds, data=st.data())
def test_routes_do_not_depend_on_the_company(spec: Spec, rows: list[list[int]], seed: int, data: st.DataObject):
    model, batch = make_model(spec, seed), make_batch(rows, seed)
    whole = model(**batch.inputs())
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    shuffled = model(**{name: tensor[order] for name, tensor in batch.inputs().items()})
    assert torch.equal(shuffled.routing.experts, whole.routing.experts[order])
    assert torch.equal(shuffled.routing.load, whole.routing.load)
    assert_close(shuffled.logits, whole.logits[order], **CLOSE)
    for row in range(len(rows)):
        alone = model(**{name: tensor[row : row + 1] for name, tensor in batch.inputs().items()})
        windows = alone.routing.experts.shape[-1]
        assert torch.equal(alone.routing.experts[0], whole.routing.experts[row, :, :windows])
        assert (whole.routing.experts[row, :, windows:] == -1).all()


# --- 8. One window, weight 1 and a fixed path are a plain transformer -----------------------------------------------


def as_llama(spec: Spec, model: LoLForCausalLM, path: list[int]) -> LlamaForCausalLM:
    """transformers' Llama with prelude, the blocks of the path, and coda as its layers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=spec.hidden_size,
        intermediate_size=model.config.mlp_size,
        num_hidden_layers=spec.num_prelude_layers + len(path) + spec.num_coda_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_attention_heads,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=False,
    )
    own = model.state_dict()
    layers = [
        {part: own[f"model.prelude.{i}.{part}.weight"] for part in BLOCK_PARTS} for i in range(len(model.model.prelude))
    ]
    layers += [{part: own[f"model.library.{part}.weight"][block] for part in BLOCK_PARTS} for block in path]
    layers += [
        {part: own[f"model.coda.{i}.{part}.weight"] for part in BLOCK_PARTS} for i in range(len(model.model.coda))
    ]
    weights = {name: own[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    for i, layer in enumerate(layers):
        weights |= {f"model.layers.{i}.{LLAMA_NAMES[part]}.weight": tensor for part, tensor in layer.items()}
    llama = LlamaForCausalLM(config).double().eval()
    llama.load_state_dict(weights)
    return llama


@pytest.mark.parametrize("how", ["fixed", "forced", "full attention"])
@bounded(10)
@given(n=lengths, left=st.integers(0, 3), seed=seeds, data=st.data())
def test_one_window_on_a_fixed_path_is_a_plain_transformer(how: str, n: int, left: int, seed: int, data: st.DataObject):
    spec = data.draw(
        specs(
            window_size=4 if how == "full attention" else 32,
            window_stride=2 if how == "full attention" else 0,
            core_attention="full" if how == "full attention" else "windowed",
            depth_film=False,
            input_injection="none",
            tie_word_embeddings=False,
        )
    )
    path = [data.draw(st.integers(0, spec.num_experts - 1)) for _ in range(spec.num_routed_depths)]
    if how != "forced":
        spec = replace(spec, routing="fixed", fixed_path=tuple(path))
    model, ids = make_model(spec, seed), make_batch([[n]], seed, extra_columns=0).input_ids
    ids = torch.nn.functional.pad(ids, (left, 0))
    mask = torch.nn.functional.pad(torch.ones(1, n, dtype=torch.long), (left, 0))
    steering = {"path": torch.tensor(path), "path_weight": 1.0} if how == "forced" else {}
    expected = as_llama(spec, model, path)(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    own = model(ids, attention_mask=mask, **steering).logits
    # Llama computes its rotary angles in float32.
    assert_close(own[:, left:], expected.logits[:, left:], **CLOSE)


# --- 9. Options at their neutral values; 10. growing over nothing ---------------------------------------------------


@bounded(15)
@given(spec=specs(depth_film=True, input_injection="none"), rows=row_lengths(), seed=seeds)
def test_film_starts_neutral(spec: Spec, rows: list[list[int]], seed: int):
    batch, filmed = make_batch(rows, seed), make_model(spec, seed)
    assert not torch.equal(filmed(**batch.inputs()).logits, without(filmed, depth_film=False)(**batch.inputs()).logits)
    fresh = LoLForCausalLM(filmed.config)
    filmed.model.film.load_state_dict(fresh.model.film.state_dict())
    plain = without(filmed, depth_film=False)
    assert torch.equal(filmed(**batch.inputs()).logits, plain(**batch.inputs()).logits)


@bounded(15)
@given(spec=specs(input_injection="diagonal"), rows=row_lengths(), seed=seeds)
def test_injection_is_neutral_without_a_step(spec: Spec, rows: list[list[int]], seed: int):
    """Its start is no neutral value (the decay starts at sqrt(1/5)); a step of length 0 is."""
    batch, injected = make_batch(rows, seed), make_model(spec, seed)
    torch.nn.init.constant_(injected.model.injection.delta, -1e4)
    plain = without(injected, input_injection="none")
    assert torch.equal(injected(**batch.inputs()).logits, plain(**batch.inputs()).logits)


def without(model: LoLForCausalLM, **changes) -> LoLForCausalLM:
    """The same weights in a model whose configuration lacks an option."""
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        setattr(config, name, value)
    plain = LoLForCausalLM(config).double().eval()
    names = plain.state_dict().keys()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in names})
    return plain


def test_the_injections_decay_starts_at_the_root_of_a_fifth():
    spec = Spec(8, 2, 0, 0, 2, 2, 4, 2, input_injection="diagonal")
    injection = LoLForCausalLM(make_model(spec, 0).config).model.injection
    state, prelude = torch.ones(1, 8), torch.zeros(1, 8)
    assert_close(injection(state, prelude), torch.full((1, 8), 0.2**0.5))
    # Delta is then ln(5)/2, and B = 1.
    assert_close(injection(prelude, state), torch.full((1, 8), torch.tensor(5.0).log().item() / 2))


@bounded(10)
@given(spec=specs(), rows=row_lengths(), seed=seeds)
def test_growing_to_all_depths_is_no_growing(spec: Spec, rows: list[list[int]], seed: int):
    model, batch = make_model(spec, seed), make_batch(rows, seed)
    grown = model(**batch.inputs(), num_depths=spec.num_routed_depths)
    assert torch.equal(grown.logits, model(**batch.inputs()).logits)
