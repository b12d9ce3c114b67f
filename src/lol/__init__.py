"""Library of Layers: transformers that pick their own layer order."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lol.errors import UserError
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM, LoLModel

__all__ = ["LoLConfig", "LoLForCausalLM", "LoLModel", "UserError"]

AutoConfig.register(LoLConfig.model_type, LoLConfig, exist_ok=True)
AutoModel.register(LoLConfig, LoLModel, exist_ok=True)
AutoModelForCausalLM.register(LoLConfig, LoLForCausalLM, exist_ok=True)
