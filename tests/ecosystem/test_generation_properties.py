"""What transformers' own generation tests are about, in our words: its release does not publish them.

That a cache changes no text, that drafts are taken back and that rows write alone what they write together is held in
`tests/model/test_cached_generation.py`. Group beam search, contrastive search and DoLa have left transformers, and its
`low_memory` beam search is gone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    LogitsProcessor,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from cache_cases import ids_of, left_padded, routed_layers
from lol import LoLForCausalLM, UserError
from model_cases import CLOSE, PADDING_ID, VOCABULARY, Spec, make_model

SPEC = Spec(8, 2, 1, 1, 3, 3, 4, 2)
LAYERS = 1 + 3 + 1
PROMPT = 7
NEW = 9
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


@pytest.fixture
def model() -> LoLForCausalLM:
    return make_model(SPEC, 0)


def write(model: LoLForCausalLM, ids: Tensor, **options):
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, **(given | {"pad_token_id": PADDING_ID} | options))


# --- What is returned -------------------------------------------------------------------------------------------------

WAYS = {
    "greedy": ({}, 1, 1),
    "samples": ({"do_sample": True}, 1, 1),
    "several samples": ({"do_sample": True, "num_return_sequences": 3}, 3, 3),
    "beams": ({"num_beams": 3}, 3, 1),
    "several beams": ({"num_beams": 3, "num_return_sequences": 2}, 3, 2),
    "sampled beams": ({"num_beams": 3, "do_sample": True}, 3, 1),
}


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "again"])
@pytest.mark.parametrize("way", WAYS)
def test_everything_that_can_be_returned(model: LoLForCausalLM, way: str, use_cache: bool):
    """The rows that run, the rows that come back, and the shapes of all that comes with them."""
    options, runs, returned = WAYS[way]
    torch.manual_seed(0)
    output = write(model, ids_of(2, PROMPT), use_cache=use_cache, **EVERYTHING, **options)
    assert output.sequences.shape == (2 * returned, PROMPT + NEW)
    assert [score.shape for score in output.scores] == [(2 * runs, VOCABULARY)] * NEW
    assert [logit.shape for logit in output.logits] == [(2 * runs, VOCABULARY)] * NEW
    for step, states in enumerate(output.hidden_states):
        columns = (PROMPT if step == 0 else 1) if use_cache else PROMPT + step
        assert [state.shape for state in states] == [(2 * runs, columns, 8)] * (LAYERS + 1)
    assert len(output.hidden_states) == NEW
    assert output.attentions is None
    if use_cache:
        assert isinstance(output.cache, DynamicCache)
        assert output.cache.get_seq_length() == PROMPT + NEW - 1
        assert len(routed_layers(output.cache)) == 3
    else:
        assert output.get("cache") is None
    if "num_beams" in options:
        assert output.sequences_scores.shape == (2 * returned,)
        assert output.beam_indices.shape == (2 * returned, NEW)


def test_a_tensor_alone_comes_back_by_default(model: LoLForCausalLM):
    ids = ids_of(2, PROMPT)
    assert torch.equal(write(model, ids), write(model, ids, **EVERYTHING).sequences)


def test_logits_are_those_of_a_pass_over_the_text_and_scores_what_was_chosen_by(model: LoLForCausalLM):
    output = write(model, ids_of(2, PROMPT), temperature=0.5, do_sample=True, top_k=5, **EVERYTHING)
    whole = model(output.sequences).logits[:, PROMPT - 1 : -1]
    assert_close(torch.stack(output.logits, dim=1), whole.float(), **CLOSE)
    scores = torch.stack(output.scores, dim=1)
    kept = scores > -torch.inf
    assert (kept.sum(-1) == 5).all()
    assert_close(scores[kept], (whole.float() / 0.5)[kept], **CLOSE)
    assert kept.gather(-1, output.sequences[:, PROMPT:, None]).all()


def test_transition_scores_add_up_to_the_scores_of_the_beams(model: LoLForCausalLM):
    output = write(model, ids_of(2, PROMPT), num_beams=3, num_return_sequences=3, length_penalty=0.0, **EVERYTHING)
    steps = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    assert_close(steps.sum(1), output.sequences_scores, **CLOSE)
    logs = model(output.sequences).logits.log_softmax(-1)[:, PROMPT - 1 : -1]
    own = logs.gather(-1, output.sequences[:, PROMPT:, None])[..., 0]
    assert_close(steps, own.float(), **CLOSE)


# --- Where a text begins, goes on and ends ----------------------------------------------------------------------------


def test_a_text_without_a_prompt_begins_with_the_token_for_it(model: LoLForCausalLM):
    text = model.generate(bos_token_id=3, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(text, write(model, torch.tensor([[3]])))


@pytest.mark.parametrize("first", [1, 3, 4, 5])
def test_generating_twice_is_generating_once(model: LoLForCausalLM, first: int):
    mask = left_padded([PROMPT, 4])
    ids = torch.where(mask > 0, ids_of(2, PROMPT), PADDING_ID)
    once = write(model, ids, attention_mask=mask)
    half = write(model, ids, attention_mask=mask, max_new_tokens=first, return_dict_in_generate=True)
    longer = torch.nn.functional.pad(mask, (0, first), value=1)
    twice = write(
        model, half.sequences, attention_mask=longer, cache=half.cache, max_new_tokens=NEW - first, **EVERYTHING
    )
    assert torch.equal(twice.sequences, once)
    # The cache held all but the last token.
    assert twice.hidden_states[0][0].shape[1] == 1


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_a_prompt_in_chunks(model: LoLForCausalLM, chunk: int):
    mask = left_padded([PROMPT, 2])
    ids = torch.where(mask > 0, ids_of(2, PROMPT), PADDING_ID)
    whole = write(model, ids, attention_mask=mask)
    assert torch.equal(write(model, ids, attention_mask=mask, prefill_chunk_size=chunk), whole)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "samples"])
@pytest.mark.parametrize("padding", [1, 4, 9])
def test_padding_at_the_left_moves_no_logit(model: LoLForCausalLM, options: dict, padding: int):
    ids = ids_of(1, PROMPT)
    given = {"return_dict_in_generate": True, "output_logits": True} | options
    torch.manual_seed(0)
    alone = write(model, ids, **given)
    moved = torch.nn.functional.pad(ids, (padding, 0), value=PADDING_ID)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (padding, 0))
    torch.manual_seed(0)
    padded = write(model, moved, attention_mask=mask, **given)
    assert torch.equal(padded.sequences[:, padding:], alone.sequences)
    assert_close(padded.logits, alone.logits, **CLOSE)


def test_a_criterion_of_the_callers_own_ends_the_text(model: LoLForCausalLM):
    class AfterToken(StoppingCriteria):
        def __init__(self, token: int):
            self.token = token

        def __call__(self, input_ids: Tensor, *_: Tensor) -> Tensor:
            return input_ids[:, -1] == self.token

    free = write(model, ids_of(2, PROMPT))
    token = int(free[0, PROMPT + 2])
    stops = [row.tolist().index(token) if token in row.tolist() else NEW - 1 for row in free[:, PROMPT:]]
    text = write(model, ids_of(2, PROMPT), stopping_criteria=StoppingCriteriaList([AfterToken(token)]))
    assert torch.equal(text, free[:, : PROMPT + max(stops) + 1])
    shorter = write(model, ids_of(2, PROMPT), stopping_criteria=[MaxLengthCriteria(PROMPT + 3)])
    assert torch.equal(shorter, free[:, : PROMPT + 3])


def test_a_processor_of_the_callers_own_changes_the_choice(model: LoLForCausalLM):
    class Never(LogitsProcessor):
        def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
            return scores.index_fill(1, torch.tensor([forbidden]), -torch.inf)

    free = write(model, ids_of(1, PROMPT))
    forbidden = int(free[0, PROMPT])
    text = write(model, ids_of(1, PROMPT), logits_processor=[Never()])
    assert forbidden not in text[0, PROMPT:]
    assert torch.equal(text, write(model, ids_of(1, PROMPT), suppress_tokens=[forbidden]))


def test_tokens_are_streamed_as_they_are_written(model: LoLForCausalLM):
    class Heard(BaseStreamer):
        def __init__(self):
            self.parts: list[Tensor] = []

        def put(self, value: Tensor) -> None:
            self.parts.append(value.flatten())

        def end(self) -> None:
            self.parts.append(torch.empty(0, dtype=torch.long))

    streamer = Heard()
    text = write(model, ids_of(1, PROMPT), streamer=streamer)
    assert [len(part) for part in streamer.parts] == [PROMPT] + [1] * NEW + [0]
    assert torch.equal(torch.cat(streamer.parts), text[0])


# --- Other ways to decode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["prompt_lookup_num_tokens", "assistant_model"])
def test_drafts_return_what_greedy_decoding_returns(model: LoLForCausalLM, drafts: str):
    ids = ids_of(1, 4).repeat(1, 3)
    helper = {"prompt_lookup_num_tokens": 3, "assistant_model": make_model(SPEC, 1)}[drafts]
    greedy = write(model, ids, **EVERYTHING)
    drafted = write(model, ids, pad_token_id=None, **{drafts: helper}, **EVERYTHING)
    assert torch.equal(drafted.sequences, greedy.sequences)
    assert_close(torch.stack(drafted.logits), torch.stack(greedy.logits), **CLOSE)
    assert drafted.cache.get_seq_length() == greedy.cache.get_seq_length()


@pytest.mark.parametrize("kind", ["static", "offloaded_static", "quantized"])
def test_a_cache_that_has_no_routed_layers_is_refused_with_the_fix(model: LoLForCausalLM, kind: str):
    with pytest.raises(UserError, match=f"cache_implementation='{kind}' has no form for routed layers: leave it out"):
        write(model, ids_of(1, PROMPT), cache_implementation=kind)
    assert torch.equal(write(model, ids_of(1, PROMPT), cache_implementation="dynamic"), write(model, ids_of(1, PROMPT)))


def test_a_cache_made_for_another_model_is_refused_with_the_fix(model: LoLForCausalLM):
    with pytest.raises(UserError, match=r"make it by DynamicCache\(config=model.config\)"):
        write(model, ids_of(1, PROMPT), cache=DynamicCache())
    with pytest.raises(KeyError, match="routed_window"):
        StaticCache(config=model.config, max_cache_len=PROMPT + NEW)


def test_attention_weights_are_refused_with_the_fix(model: LoLForCausalLM):
    with pytest.raises(UserError, match="leave output_attentions out"):
        write(model, ids_of(1, PROMPT), return_dict_in_generate=True, output_attentions=True)


def test_words_that_are_no_argument_are_refused(model: LoLForCausalLM):
    with pytest.raises(ValueError, match="pathh"):
        write(model, ids_of(1, PROMPT), pathh=[0, 1, 2])
