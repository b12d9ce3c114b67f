"""A tiny model whose windows differ, a tokenizer, and the metrics of a run."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lol import LoLConfig, LoLForCausalLM


def build(**changes) -> LoLForCausalLM:
    """Five blocks over six depths; the router is scaled up, or every window would take the same block."""
    settings = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_prelude_layers": 1,
        "num_coda_layers": 1,
        "num_experts": 5,
        "num_routed_depths": 6,
        "window_size": 16,
        "window_stride": 8,
    }
    torch.manual_seed(0)
    model = LoLForCausalLM(LoLConfig(**settings | changes)).eval()
    if model.model.router is not None:
        model.model.router.weight.data.mul_(300)
    return model


@pytest.fixture
def make_model():
    """`make_model(**changes)` builds it with changed settings."""
    return build


@pytest.fixture
def model() -> LoLForCausalLM:
    return build()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte is a token, and 256 is the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")


@pytest.fixture
def metrics() -> list[dict]:
    """Twenty steps that get deeper, one loss that is not a number, an evaluation, the summary."""
    return [
        *(
            {"event": "train", "step": step, "loss": 6 - step / 10, "depth": 1 + step // 10, "load": [[step, 1]]}
            for step in range(1, 21)
        ),
        {"event": "train", "step": 21, "loss": float("nan"), "depth": 3, "load": [[1, 1]]},
        {"event": "eval", "step": 20, "loss": 4.25},
        {"event": "summary", "held_out_loss": 4.2, "unigram_loss": 5.5, "bigram_loss": 4.5},
    ]
