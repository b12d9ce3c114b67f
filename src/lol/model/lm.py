"""The language model: `LoLModel` with a head, a loss and generation."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.utils.deprecation import deprecate_kwarg

from lol.errors import UserError
from lol.model.base import LoLModel, LoLPreTrainedModel
from lol.model.config import LoLConfig
from lol.model.core import fit_path, give_path_rows
from lol.model.outputs import LoLCausalLMOutput
from lol.model.windows import find_documents

IGNORED_LABEL = -100


class LoLForCausalLM(LoLPreTrainedModel, GenerationMixin):
    """`LoLModel` with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LoLConfig):
        super().__init__(config)
        self.model = LoLModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Int[Tensor, "B n"] | None = None,
        attention_mask: Int[Tensor, "B _"] | Bool[Tensor, "B _"] | None = None,
        position_ids: Int[Tensor, "_ n"] | None = None,
        inputs_embeds: Float[Tensor, "B n d"] | None = None,
        labels: Int[Tensor, "B n"] | None = None,
        router_only_ids: Int[Tensor, "B n"] | None = None,
        path: Int[Tensor, "..."] | list | tuple | None = None,
        path_weight: float | None = None,
        num_depths: int | None = None,
        backprop_depth: int | None = None,
        first_window_full_backprop: bool = False,
        generator: torch.Generator | None = None,
        output_router_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> LoLCausalLMOutput | tuple:
        """Run the model and score the vocabulary. Arguments as in `LoLModel`, and:

        Args:
            labels: Usually the input ids; -100 leaves a place out. Place t is scored with the logits of place t-1 if
                both belong to the same document: neither padding nor the first token of a document is ever a target. A
                router-only token is none either, for the loss must not read it (decided here).
            logits_to_keep: Compute the logits of only the last so many places, or of these places. 0 is all.
            kwargs: `shift_labels` (batch, n), what each place is to predict, in place of `labels`: place t is scored
                with the logits of place t. For texts that are cut up between processes, where a part does not hold its
                last target. The rest is the loss function's.
        """
        # Not in the signature: transformers' Trainer takes every parameter named so for a label that data must bring.
        shift_labels = kwargs.pop("shift_labels", None)
        scored = labels is not None or shift_labels is not None
        if scored and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise UserError("labels need all logits: leave logits_to_keep out")
        if scored and cache is not None and cache.get_seq_length():
            raise UserError("a loss needs the whole text: give labels without a cache that holds its beginning")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            router_only_ids=router_only_ids,
            path=path,
            path_weight=path_weight,
            num_depths=num_depths,
            backprop_depth=backprop_depth,
            first_window_full_backprop=first_window_full_backprop,
            generator=generator,
            output_router_logits=output_router_logits,
            output_hidden_states=output_hidden_states,
            cache=cache,
            use_cache=use_cache,
            return_dict=True,
            output_attentions=kwargs.pop("output_attentions", None),
        )
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        logits = self.lm_head(hidden)
        if shift_labels is None and labels is not None:
            shift_labels = next_tokens(labels, position_ids, attention_mask, router_only_ids)
        loss = None
        if shift_labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, shift_labels=shift_labels, vocab_size=self.config.vocab_size, **kwargs
            )
        output = LoLCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            router_logits=outputs.router_logits,
            routing=outputs.routing,
            moe_router_logits=outputs.moe_router_logits,
            moe_routing=outputs.moe_routing,
        )
        return self.in_asked_form(output, return_dict)

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "offloaded"):
            raise UserError(
                f"cache_implementation={kind!r} has no form for routed layers: leave it out (what they keep does not "
                "grow with the text)"
            )
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)  # pyright: ignore

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Repeat every input for beams and samples. transformers repeats tensors along their first axis, so a path
        first gets the batch as its first axis."""
        if kwargs.get("path") is not None:
            assert input_ids is not None
            path = torch.as_tensor(kwargs["path"], device=input_ids.device)
            kwargs["path"] = give_path_rows(path, input_ids.shape[0])
        return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **kwargs)  # pyright: ignore

    def _maybe_initialize_input_ids_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs: Tensor | None, bos_token_id: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """The ids of a prompt; for one of embeddings alone, rows of none. transformers takes the number of rows from
        the first tensor it was given, which may be a path."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
            raise UserError("generate goes on from the last column, and a row ends in padding: pad prompts on the left")
        embeds = model_kwargs.get("inputs_embeds")
        if embeds is None:
            return super()._maybe_initialize_input_ids_for_generation(inputs, bos_token_id, model_kwargs)  # pyright: ignore
        if inputs is None:
            return torch.ones(embeds.shape[0], 0, dtype=torch.long, device=embeds.device)
        # A second call brings the embeddings themselves.
        if inputs is not embeds and inputs.shape[1] and inputs.shape != embeds.shape[:2]:
            raise UserError(
                f"inputs_embeds has shape {tuple(embeds.shape)}, input_ids {tuple(inputs.shape)}: where both are "
                "given, embeddings are read in place of the same ids; give one embedding per id, or leave the ids out"
            )
        return inputs

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Let what was said of the prompt hold while the text grows: new tokens are read by everything, and windows
        that a path does not name stay free; a path may name windows that are still to come.

        `inputs_embeds` stand for the prompt in the first pass. Ids then count none of its tokens (or, given too, all),
        so where the pass stands in the text is read off the cache.
        """
        whole = kwargs.get("cache") is None or kwargs.get("next_sequence_length") is not None
        if inputs_embeds is not None and kwargs.get("is_first_iteration") and not whole:
            raise UserError("prefill_chunk_size cuts ids, not inputs_embeds: leave one of them out")
        inputs = GenerationMixin.prepare_inputs_for_generation(self, input_ids, inputs_embeds=inputs_embeds, **kwargs)  # pyright: ignore
        given = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        cache = inputs.get("cache")
        before = 0 if cache is None else cache.get_seq_length()
        total = before + given.shape[1]
        hidden = inputs.get("router_only_ids")
        if hidden is not None:
            hidden = nn.functional.pad(hidden, (0, total - hidden.shape[1]), value=-1)[:, before:]
            inputs["router_only_ids"] = hidden if bool((hidden >= 0).any()) else None
        path = inputs.get("path")
        if path is not None:
            mask = inputs.get("attention_mask")
            longest = total if mask is None else int(mask.sum(1).max())
            num_windows = self.config.windows_in(longest, inputs.get("num_depths"))
            inputs["path"] = fit_path(torch.as_tensor(path, device=given.device), num_windows)
        return inputs


def next_tokens(
    labels: Int[Tensor, "B n"],
    position_ids: Int[Tensor, "_ n"] | None,
    attention_mask: Int[Tensor, "B n"] | Bool[Tensor, "B n"] | None,
    router_only_ids: Int[Tensor, "B n"] | None = None,
) -> Int[Tensor, "B n"]:
    """The label that each place is to predict: the next one of its document, or none."""
    shape = (labels.shape[0], labels.shape[1])
    document = find_documents(shape, position_ids, attention_mask, labels.device).grid_document
    same = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0)
    if router_only_ids is not None:
        same &= router_only_ids[:, 1:] < 0
    targets = labels[:, 1:].masked_fill(~same, IGNORED_LABEL)
    return nn.functional.pad(targets, (0, 1), value=IGNORED_LABEL)


def count_targets(batch: Mapping[str, Tensor]) -> int:
    """Places of a batch of packed rows that are scored: of all ids, or of its labels if it has some."""
    targets = batch["position_ids"] > 0
    if "labels" in batch:
        targets &= batch["labels"] != IGNORED_LABEL
    if "router_only_ids" in batch:
        targets &= batch["router_only_ids"] < 0
    return int(targets.sum())
