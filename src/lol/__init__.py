"""Library of Layers: transformers that pick their own layer order."""

import lol.threads  # noqa: F401

# isort: split

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lol.errors import UserError
from lol.model.base import LoLModel
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.paths.record import record_paths
from lol.paths.steer import force_path

__all__ = ["LoLConfig", "LoLForCausalLM", "LoLModel", "UserError", "force_path", "record_paths"]

AutoConfig.register(LoLConfig.model_type, LoLConfig, exist_ok=True)
AutoModel.register(LoLConfig, LoLModel, exist_ok=True)
AutoModelForCausalLM.register(LoLConfig, LoLForCausalLM, exist_ok=True)
