"""Text from a trained model."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from lol.errors import UserError
from lol.model.core import broadcast_path
from lol.model.lm import LoLForCausalLM


@torch.no_grad()
def generate_text(
    model: LoLForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    path: Sequence[int] | None = None,
    streamer: BaseStreamer | None = None,
) -> str:
    """Continue a prompt, which counts as the beginning of a document.

    Args:
        max_new_tokens: Generate at most so many tokens; the end of the document ends it earlier.
        temperature: 0 takes the most probable token every time.
        top_k: Sample among so many most probable tokens.
        seed: Decides the sample.
        path: One block per depth that every window is to run; -1 leaves a depth to the router.
        streamer: Receives the text while it is made.

    Returns:
        Prompt and continuation.

    Raises:
        UserError: a number that cannot work, or a path that does not fit the model.
    """
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 1),
        ("temperature", temperature, 0),
        ("top_k", top_k, 1),
    ):
        if not value >= least:
            raise UserError(f"{name} must be at least {least}, not {value}")
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    if path is not None:
        # Checked here too, before the streamer has the prompt.
        config = model.config
        broadcast_path(torch.tensor(list(path)), 1, config.num_routed_depths, config.num_experts, 1)
        sampling["path"] = list(path)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = cast(Any, model).generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
