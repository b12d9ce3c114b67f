"""A tiny model whose windows differ, and real text for it."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lol import LoLConfig, LoLForCausalLM


def make_model(**changes) -> LoLForCausalLM:
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
def model() -> LoLForCausalLM:
    return make_model()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte is a token, and 256 is the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
