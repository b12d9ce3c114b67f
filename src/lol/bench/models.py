"""Models that benchmarks time beside each other."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM


def llama_beside(config: LoLConfig, positions: int) -> LlamaForCausalLM:
    """transformers' Llama of as many layers as `config` executes, of the same shape, for texts of so many tokens."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.num_prelude_layers + config.num_routed_depths + config.num_coda_layers,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=positions,
        )
    )


def spread_routes(model: LoLForCausalLM) -> None:
    """Fresh routers choose one block for all: let this one tell windows and rows apart."""
    assert model.model.router is not None
    torch.nn.init.normal_(model.model.router.weight)
