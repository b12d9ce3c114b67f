"""What a run is trained and measured on: its sources, its tokenizer, and the model that fits them."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lol.data.mixture import (
    Source,
    held_out_rows_by_source,
    mixed_texts,
    open_sources,
    parse_shares,
    split_sources,
)
from lol.data.packing import Row
from lol.data.tokenizer import load_tokenizer, train_tokenizer
from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.train.config import TrainConfig, as_json


def open_sides(config: TrainConfig) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """The sources to train on and those held out."""
    data = config.data
    columns = {"text_column": data.text_column, "router_only_column": data.router_only_column}
    sources = open_sources(data.source, document_chars=data.document_chars, **columns)
    if data.held_out_source is None:
        return split_sources(sources, data.held_out_fraction)
    return sources, open_sources(data.held_out_source, document_chars=data.document_chars, **columns)


def find_tokenizer(
    config: TrainConfig, sources: Sequence[Source], checkpoint: Path | None, init: Path | None = None
) -> PreTrainedTokenizerFast:
    """The checkpoint's tokenizer, else that of the model to start from, else the one that the configuration names, else
    one trained on the sources.

    Raises:
        UserError: the model to start from was trained with another tokenizer than the configuration names.
    """
    named = config.data.tokenizer
    if checkpoint is not None:
        return load_tokenizer(checkpoint)
    if init is not None:
        tokenizer = load_tokenizer(init)
        if named is not None and load_tokenizer(named).get_vocab() != tokenizer.get_vocab():
            raise UserError(f"data.tokenizer={named} has other tokens than the model in {init}: leave it out")
        return tokenizer
    if named is not None:
        return load_tokenizer(named)
    return train_tokenizer(mixed_texts(sources), config.model.vocab_size)


def model_config(config: TrainConfig, tokenizer: PreTrainedTokenizerFast) -> LoLConfig:
    """The run's model, sized for the tokenizer and trained on the run's context."""
    fields = as_json(config)["model"] | {
        # Not the number of tokens: some tokenizers leave ids out.
        "vocab_size": max(tokenizer.get_vocab().values()) + 1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": config.data.context_length,
    }
    return LoLConfig(**fields)


def open_held_out(config: TrainConfig, tokenizer: PreTrainedTokenizerFast, num_rows: int) -> list[Row]:
    """Held-out rows of a run, without opening the rest of it; of several sources, by turns."""
    data = config.data
    by_source = held_out_rows_by_source(
        open_sides(config)[1], tokenizer, data.context_length, num_rows, data.scored_after
    )
    turns = zip_longest(*by_source.values())
    return [row for turn in turns for row in turn if row is not None][:num_rows]


def name_sources(config: TrainConfig) -> str:
    """The sources by name, with their shares where there are several."""
    shares = parse_shares(config.data.source)
    return ", ".join(f"{name} ({share:.3g})" if len(shares) > 1 else name for name, share in shares.items())
