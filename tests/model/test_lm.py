"""The language model as its users call it: outputs, loss, errors and padding."""

from __future__ import annotations

import math

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lol import LoLForCausalLM, UserError
from lol.model.outputs import LoLCausalLMOutput
from model_cases import CLOSE, PADDING_ID, VOCABULARY, Spec, make_batch, make_model

SPEC = Spec(8, 2, 1, 1, 3, 3, 4, 2)
ROWS = [[9, 5], [6]]


@pytest.fixture
def model() -> LoLForCausalLM:
    return make_model(SPEC, 0)


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# --- Outputs --------------------------------------------------------------------------------------------------------


def test_shapes_and_empty_places(model: LoLForCausalLM):
    batch = make_batch(ROWS, 0)
    n = batch.input_ids.shape[1]
    output = model(**batch.inputs(), output_router_logits=True, output_hidden_states=True)
    # Even depths cut 9 + 5 tokens into 3 + 2 windows and 6 into 2; with half a window at the front 3 + 2 and 2.
    assert output.logits.shape == (2, n, VOCABULARY)
    assert output.routing.experts.shape == output.routing.weights.shape == (2, 3, 5)
    real = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])[:, None].expand(2, 3, 5)
    assert torch.equal(output.routing.experts == -1, ~real)
    assert (output.routing.weights[~real] == 0).all()
    assert (output.routing.weights[real] > 0).all()
    assert output.routing.documents.tolist() == [[[0, 0, 0, 1, 1]] * 3, [[0, 0, -1, -1, -1]] * 3]
    assert output.routing.load.shape == (3, 3)
    assert output.routing.load.sum(1).tolist() == [7, 7, 7]
    assert output.routing.load.dtype == torch.int64
    assert output.routing.weights.dtype == torch.float32
    assert [logits.shape for logits in output.router_logits] == [(2, 5, 3)] * 3
    for depth, logits in enumerate(output.router_logits):
        assert (logits[~real[:, depth]] == 0).all()
    assert [state.shape for state in output.hidden_states] == [(2, n, 8)] * (1 + 1 + 3 + 1)
    assert output.loss is None
    assert output.cache is None
    assert output.aux_loss is None


def test_depths_that_cut_a_row_into_fewer_windows_leave_places_empty(model: LoLForCausalLM):
    output = model(ids_of(1, 8), output_router_logits=True)
    assert [(row == -1).tolist() for row in output.routing.experts[0]] == [
        [False, False, True],
        [False, False, False],
        [False, False, True],
    ]
    assert [logits.shape for logits in output.router_logits] == [(1, 3, 3)] * 3


def test_a_fixed_path_has_no_router_logits():
    fixed = make_model(Spec(**(vars(SPEC) | {"routing": "fixed", "fixed_path": (2, 0, 2)})), 0)
    output = fixed(ids_of(1, 8), output_router_logits=True)
    assert output.router_logits is None
    assert output.routing.experts[0, :, 0].tolist() == [2, 0, 2]
    assert output.routing.weights[0, 1].tolist() == [1.0, 1.0, 1.0]


def test_router_logits_on_request_of_the_config(model: LoLForCausalLM):
    assert model(ids_of(1, 5)).router_logits is None
    model.config.output_router_logits = True
    assert len(model(ids_of(1, 5)).router_logits) == 3
    assert model(ids_of(1, 5), output_router_logits=False).router_logits is None


def test_hidden_states_and_a_tuple_on_request_of_the_config(model: LoLForCausalLM):
    ids = ids_of(1, 5)
    wanted = model(ids, output_hidden_states=True)
    model.config.output_hidden_states = True
    assert_close(model(ids).hidden_states, wanted.hidden_states, rtol=0, atol=0)
    assert model(ids, output_hidden_states=False).hidden_states is None
    model.config.return_dict = False
    assert_close(model(ids)[:2], (wanted.logits, wanted.hidden_states), rtol=0, atol=0)
    assert model(ids, return_dict=True).logits.shape == wanted.logits.shape


def test_the_old_name_of_the_cache_is_not_overlooked(model: LoLForCausalLM):
    ids = ids_of(1, 9)
    for one in (model, model.model):
        cache = one(ids[:, :5], use_cache=True).cache
        with pytest.warns(FutureWarning, match="Use `cache` instead"):
            last = one(ids[:, 5:], past_key_values=cache)[0][:, -1]
        assert_close(last, one(ids)[0][:, -1], **CLOSE)


def test_the_last_hidden_state_is_normed_and_what_the_head_reads(model: LoLForCausalLM):
    output = model(ids_of(1, 7), output_hidden_states=True)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    base = model.model(ids_of(1, 7))
    assert torch.equal(base.last_hidden_state, output.hidden_states[-1])
    rms = (base.last_hidden_state / model.model.norm.weight).square().mean(-1)
    assert_close(rms, torch.ones_like(rms), atol=1e-4, rtol=0)


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])], ids=["last", "last three", "places"])
def test_logits_to_keep(model: LoLForCausalLM, keep: int | Tensor):
    ids = ids_of(2, 6)
    whole = model(ids).logits
    expected = whole[:, -keep:] if isinstance(keep, int) else whole[:, keep]
    assert_close(model(ids, logits_to_keep=keep).logits, expected)


def test_embeddings_in_place_of_ids(model: LoLForCausalLM):
    batch = make_batch(ROWS, 0)
    inputs = batch.inputs()
    expected = model(**inputs)
    embeds = model.model.embed_tokens(inputs.pop("input_ids"))
    # What stands at padding must not matter here either.
    embeds = torch.where(batch.attention_mask[..., None] == 1, embeds, torch.randn_like(embeds))
    output = model(**inputs, inputs_embeds=embeds)
    real = batch.attention_mask == 1
    assert_close(output.logits[real], expected.logits[real])
    assert torch.equal(output.routing.experts, expected.routing.experts)


def test_a_tuple_on_request(model: LoLForCausalLM):
    ids = ids_of(1, 6)
    output = model(ids, labels=ids)
    given = model(ids, labels=ids, return_dict=False)
    assert isinstance(output, LoLCausalLMOutput)
    assert type(given) is tuple
    assert torch.equal(given[0], output.loss)
    assert torch.equal(given[1], output.logits)
    assert type(model.model(ids, return_dict=False)) is tuple


# --- Loss -----------------------------------------------------------------------------------------------------------


def negative_log_probability(logits: Tensor, target: int) -> float:
    values = logits.double().tolist()
    return math.log(sum(map(math.exp, values))) - values[target]


def test_the_loss_by_hand(model: LoLForCausalLM):
    """Packed and padded rows: no first token of a document and no padding is a target, nor what -100 leaves out."""
    batch = make_batch(ROWS, 0)
    labels = batch.input_ids.clone()  # padding carries a label that must not count
    left_out = (0, batch.starts[0][0] + 3)
    labels[left_out] = -100
    output = model(**batch.inputs(), labels=labels)
    expected = []
    for row, _, tokens, start in batch.each():
        for column in range(start + 1, start + len(tokens)):
            if (row, column) != left_out:
                expected.append(negative_log_probability(output.logits[row, column - 1], int(labels[row, column])))
    assert len(expected) == (9 - 1) + (5 - 1) + (6 - 1) - 1
    assert output.loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-6)


def test_the_loss_on_targets_that_are_in_place_already(model: LoLForCausalLM):
    """A loss over parts of a text, each with the targets of its own places, is the loss over the text."""
    ids = ids_of(1, 9)
    whole = model(ids, labels=ids).loss
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    assert_close(model(ids, shift_labels=targets).loss, whole)
    assert_close(model(ids, labels=ids.flip(1), shift_labels=targets).loss, whole)
    with pytest.raises(UserError, match="leave logits_to_keep out"):
        model(ids, shift_labels=targets, logits_to_keep=1)


def test_the_loss_of_a_part_of_a_batch(model: LoLForCausalLM):
    """Gradient accumulation divides by the targets of all parts: transformers' `num_items_in_batch`."""
    ids = ids_of(2, 6)
    mean = model(ids, labels=ids).loss
    assert_close(model(ids, labels=ids, num_items_in_batch=100).loss * 100, mean * 10)


# --- Padding --------------------------------------------------------------------------------------------------------


def test_whatever_stands_at_padding_changes_nothing(model: LoLForCausalLM):
    batch = make_batch([[9, 5], [6], [2]], 0)
    real = batch.attention_mask == 1
    outputs = []
    for seed in range(3):
        inputs = batch.inputs()
        # Not even ids that do not exist.
        noise = torch.randint(-5, 99, real.shape, generator=torch.Generator().manual_seed(seed))
        inputs["input_ids"] = torch.where(real, inputs["input_ids"], noise)
        outputs.append(model(**inputs, labels=torch.where(real, inputs["input_ids"], PADDING_ID)))
    for output in outputs[1:]:
        assert torch.equal(output.logits[real], outputs[0].logits[real])
        assert torch.equal(output.loss, outputs[0].loss)
        assert torch.equal(output.routing.experts, outputs[0].routing.experts)
        assert torch.equal(output.routing.load, outputs[0].routing.load)


@pytest.mark.parametrize("rows", [[[9], [3]], [[9, 5], [6]]], ids=["one document", "packed"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_gradient_is_nan_under_padding(rows: list[list[int]], implementation: str):
    model, batch = make_model(SPEC, 0).float().train(), make_batch(rows, 0, extra_columns=4)
    model.set_attn_implementation(implementation)
    labels = torch.where(batch.attention_mask == 1, batch.input_ids, -100)
    output = model(**batch.inputs(), labels=labels)
    output.loss.backward()
    assert output.logits.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_eager_attention_is_sdpa():
    model, batch = make_model(SPEC, 0), make_batch(ROWS, 0)
    real = batch.attention_mask == 1
    assert model.config._attn_implementation == "sdpa"
    sdpa = model(**batch.inputs()).logits
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert_close(model(**batch.inputs()).logits[real], sdpa[real], **CLOSE)


# --- Errors ---------------------------------------------------------------------------------------------------------

ROW = torch.zeros(1, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": ROW + VOCABULARY}, "token id 13 is outside of the vocabulary \\(0 to 12\\): .* tokenizer"),
        ({"input_ids": ROW - 1}, "token id -1 is outside of the vocabulary"),
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": ROW, "inputs_embeds": torch.zeros(1, 6, 8).double()}, "either input_ids or inputs_embeds"),
        ({"input_ids": ROW, "attention_mask": ROW}, "no real token: attention_mask is 0 everywhere"),
        ({"input_ids": ROW, "position_ids": torch.tensor([[0, 1, 3, 0, 1, 2]])}, "position is 3 where 2 was expected"),
        ({"input_ids": ROW, "path": [0, 1]}, "path has 2 depths, but 3 are run: give one block per depth"),
        ({"input_ids": ROW, "path": [0, 1, 2], "num_depths": 2}, "path has 3 depths, but 2 are run"),
        ({"input_ids": ROW, "path": [0, 1, 3]}, "path names block 3, but the library holds blocks 0 to 2"),
        ({"input_ids": ROW, "path": [0, 1, -2]}, "path names block -2"),
        ({"input_ids": ROW, "path": [[[0], [1], [2]]] * 2}, "path has 2 rows, but the batch has 1"),
        ({"input_ids": ROW, "path": [[0] * 5] * 3}, "path has 5 windows, but the longest row has 2"),
        ({"input_ids": ROW, "path": torch.tensor(1)}, "path must have shape \\(D,\\), .* not \\(\\)"),
        ({"input_ids": ROW, "num_depths": 4}, "num_depths=4, but the model has 3 routed depths"),
        ({"input_ids": ROW, "num_depths": -1}, "num_depths=-1"),
        ({"input_ids": ROW, "router_only_ids": ROW}, "router_only_tokens=True"),
        ({"input_ids": ROW, "output_attentions": True}, "leave output_attentions out"),
        ({"input_ids": ROW, "labels": ROW, "logits_to_keep": 1}, "labels need all logits: leave logits_to_keep out"),
    ],
)
def test_an_input_that_cannot_be_run_is_refused_with_the_fix(model: LoLForCausalLM, inputs: dict, message: str):
    with pytest.raises(UserError, match=message):
        model(**inputs)


def test_a_mask_of_another_shape_is_refused_with_the_fix(model: LoLForCausalLM, monkeypatch: pytest.MonkeyPatch):
    # A user's run has no checks of annotations, which would see this mask first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for shape in [(1, 5), (2, 6), (6,)]:
        with pytest.raises(UserError, match=r"attention_mask has shape .* the input \(1, 6\): give one entry"):
            model(ROW, attention_mask=torch.ones(shape, dtype=torch.long))


def test_router_only_ids_out_of_range():
    model = make_model(SPEC, 0, router_only_tokens=True)
    with pytest.raises(UserError, match="token id 13 is outside of the vocabulary"):
        model(ROW, router_only_ids=ROW + VOCABULARY)
    with pytest.raises(UserError, match="token id -2 is outside of the vocabulary"):
        model(ROW, router_only_ids=ROW - 2)


def test_router_only_ids_need_a_router():
    fixed = Spec(**(vars(SPEC) | {"routing": "fixed", "fixed_path": (2, 0, 2)}))
    model = make_model(fixed, 0, router_only_tokens=True)
    with pytest.raises(UserError, match="router_only_ids needs a router"):
        model(ROW, router_only_ids=ROW)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"path_weight": 0.5}, "path_weight is the weight of a forced block: give a path too"),
        ({"path": [0, 0, 0], "path_weight": float("nan")}, "give a finite number"),
        ({"path": torch.zeros(3)}, "path holds fractions"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"input_ids has shape \(4,\): give \(batch, tokens\)"),
        ({"position_ids": torch.arange(3)[None]}, "position_ids has 3 columns, the input 4: give one per token"),
    ],
)
def test_mistakes_name_the_fix(inputs: dict, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    model = make_model(Spec(8, 2, 1, 1, 3, 3, 8, 4), 0).float()
    with pytest.raises(UserError, match=message):
        model(**({"input_ids": torch.zeros(1, 4, dtype=torch.long)} | inputs))
