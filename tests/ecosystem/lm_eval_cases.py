"""Four tasks of lm-eval on local data, and what each of their requests must give: the model alone, in float64.

The references share nothing with lm-eval: every text is put together and tokenized here, runs without padding, cache
and batch, and its scores are sums over log_softmax.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lol import LoLForCausalLM

WORDS = ["library", "of", "layers", "window", "router", "depth", "block", "path", "shelf", "token"]
# Words in a prompt, a token or two each: a batch mixes rows of one window of 8 tokens with rows of several, and the
# longest has more than the model's context, which lm-eval cuts from the left.
LENGTHS = [1, 19, 4, 12, 2, 7, 15, 3, 60, 9, 21, 5]
LAST, STOP = "path", "token"
NEW_TOKENS = 20

CHOICE, CONTINUATION, ROLLING, STORY = "shelf_choice", "shelf_continuation", "shelf_rolling", "shelf_story"
# A task in the format of lm-eval, without the file of its data.
TASKS: dict[str, dict[str, Any]] = {
    CHOICE: {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    CONTINUATION: {
        "output_type": "loglikelihood",
        "doc_to_text": "{{prompt}}",
        # Nothing is put between text and target in a task of this type.
        "doc_to_target": " {{target}}",
        "metric_list": [{"metric": "acc"}],
    },
    ROLLING: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    STORY: {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": [STOP], "max_gen_toks": NEW_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_documents(file: Path, count: int = 300) -> Path:
    """A corpus in which one word mostly follows another, so that a small model soon writes text that ends by itself."""
    draw = random.Random(0)

    def document() -> str:
        words = [draw.choice(WORDS)]
        while len(words) < 24 and not (words[-1] == LAST and draw.random() < 0.7):
            words.append(WORDS[WORDS.index(words[-1]) - 9] if draw.random() < 0.9 else draw.choice(WORDS))
        return " ".join(words) + "."

    file.write_text("\n\n".join(document() for _ in range(count)))
    return file


def write_tasks(folder: Path, model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, list[dict]]:
    """Write the tasks and their data; returns the documents of each task."""
    draw = random.Random(1)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    # One word is one token or a few: lm-eval takes a shorter way where all choices are one token.
    choices = [
        {"prompt": words(n), "choices": [words(1), words(1), words(5), words(2)], "answer": n % 4} for n in LENGTHS
    ]
    # Some go on as the model would, which lm-eval counts as accurate.
    continuations = [
        {"prompt": words(n) + " router", "target": words(1 + n % 6) if n % 2 else "depth"} for n in LENGTHS
    ]
    # Without a context the score is that of a document's beginning.
    continuations += [{"prompt": "", "target": words(n)} for n in (4, 11)]
    rolling = [{"text": words(n)} for n in (3, 90, 12, 40, 7, 1)]
    # Every other document asks for the text that the model writes.
    stories = [
        {"prompt": prompt, "target": written_text(model, tokenizer, prompt) if number % 2 else "a different text"}
        for number, prompt in enumerate(map(words, LENGTHS))
    ]
    documents = {CHOICE: choices, CONTINUATION: continuations, ROLLING: rolling, STORY: stories}
    folder.mkdir()
    for name, rows in documents.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test"} | TASKS[name]
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return documents


@torch.no_grad()
def scores(model: LoLForCausalLM, ids: Sequence[int]) -> Tensor:
    """Log probability of each token after the first, given those before: (n - 1,)."""
    log_probabilities = model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return log_probabilities[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def plain_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The tokens of a text, and no token that it does not hold."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def continuation_score(
    model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast, context: str, continuation: str, begins: int = 1
) -> float:
    """Log probability of a continuation; context and continuation are the beginning of a document. What the model's
    context cannot hold is cut off on the left, the begin token first. `begins`: begin tokens before the text."""
    text = plain_ids(tokenizer, context + continuation)
    ids = [tokenizer.bos_token_id] * begins + text
    scored = len(text) - len(plain_ids(tokenizer, context))
    return float(scores(model, ids[-model.config.max_position_embeddings - 1 :])[-scored:].sum())


def rolling_score(model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, begins: int = 1) -> float:
    """Log probability of a text that may be longer than the model's context: scored in pieces of that length, each
    with as many tokens before it as fit. `begins`: begin tokens before the text, all but the first of them scored."""
    context = model.config.max_position_embeddings
    ids = [tokenizer.bos_token_id] * begins + plain_ids(tokenizer, text)
    total, done = 0.0, 1
    while done < len(ids):
        end = min(done + context, len(ids))
        total += float(scores(model, ids[max(0, end - 1 - context) : end])[done - end :].sum())
        done = end
    return total


@torch.no_grad()
def written_text(model: LoLForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """The most probable continuation, every token from a pass over all tokens before it. Of a long prompt the part
    that leaves room in the model's context."""
    ids = [tokenizer.bos_token_id, *plain_ids(tokenizer, prompt)]
    ids = ids[NEW_TOKENS - model.config.max_position_embeddings :]
    begin = len(ids)
    while len(ids) < begin + NEW_TOKENS:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        text = tokenizer.decode(ids[begin:], skip_special_tokens=True)
        if ids[-1] == tokenizer.eos_token_id or STOP in text:
            break
    return text.split(STOP)[0]


def samples(results: dict[str, Any], task: str) -> list[dict]:
    """What was asked and answered for each document, in the order of the documents."""
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])


def answers(results: dict[str, Any], task: str) -> list[list]:
    """What the model answered for each document: (log probability, is greedy) of each request, a sum, or a text."""
    return [sample["filtered_resps"] for sample in samples(results, task)]
