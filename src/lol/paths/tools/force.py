"""`lol paths force`: force each label's mode path on a user's own prompts, and see whose text comes out.

The documents are those the model was trained on or the like: a prompt and, behind it, what a label answers. Documents
of one prompt and different labels are the alternatives between which a produced text is attributed.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from lol.data.labelled import LabelledText, encode_row
from lol.data.tokenizer import encode_texts
from lol.errors import UserError
from lol.model.lm import LoLForCausalLM
from lol.paths.figure import draw_matrix
from lol.paths.force import TIED, Attribution, attribute, confusion, force_mode, generate_rows
from lol.paths.mode import ModePath, mode_paths_of
from lol.paths.tools.data import PathFlags, Results, open_data, print_table, record_documents
from lol.train.loading import load_model

# Tokens that a text may be longer than the longest right one before it is cut.
_SPARE = 4


@dataclass(frozen=True, kw_only=True)
class PathsForce(PathFlags):
    """Force each label's mode path, with filler in place of the label, and count whose text the model writes.

    Example: lol paths force --model runs/maze --data mazes.jsonl --label-column strategy --prompt-until "path:"
    """

    prompt_until: str
    """The words that end the prompt of every document; what stands behind their first place is the answer."""
    weight: Literal["router", "mode", "one"] = "router"
    """Of a forced block's update: the router's own probability of it, its mean over the label's documents, or 1."""


@dataclass(frozen=True)
class _Task:
    """A prompt that every label answers, each in its own way."""

    documents: dict[str, LabelledText]
    prompts: dict[str, dict[str, list[int]]]
    """Per label a row: all the same but for what the router is told."""
    answers: dict[str, list[int]]


def paths_force(command: PathsForce) -> None:
    """Run the verb."""
    results = Results(command, ["force.json", "force.svg"])
    model, tokenizer = load_model(command.model)
    labels, tasks, left_out = _find_tasks(command, tokenizer, open_data(command, model))
    # Paths are taken from other prompts than those they are forced on.
    examples = [document for task in tasks[::2] for document in task.documents.values()]
    recorded = record_documents(command, model, tokenizer, examples)
    modes, asked = mode_paths_of(recorded.table, recorded.labels), tasks[1::2]
    conditions: dict[str, dict[str, Any]] = {"forced": _measure(command, model, tokenizer, labels, asked, modes=modes)}
    if command.router_only_column is not None:
        conditions["label told, not forced"] = _measure(command, model, tokenizer, labels, asked, told=True)
    conditions["not told, not forced"] = _measure(command, model, tokenizer, labels, asked)
    for name, found in conditions.items():
        _print(name, labels, found)
    print(
        f"{len(asked)} prompts of each label; mode paths of {len(examples) // len(labels)} others; left out, as two "
        f"labels answer them alike: {left_out}"
    )
    figure = results.file("force.svg")
    if figure is not None:
        counts = np.array(conditions["forced"]["counts"]) / len(asked)
        draw_matrix(counts, figure, rows=labels, columns=labels, names=("forced", "written"), most=1.0)
    modes_out = {name: asdict(mode) for name, mode in modes.items()}
    numbers = {"prompts": len(asked), "left_out": left_out, "weight": command.weight, "mode_paths": modes_out}
    results.write("force.json", numbers | {"conditions": conditions})


def _find_tasks(
    command: PathsForce, tokenizer: PreTrainedTokenizerFast, documents: Sequence[LabelledText]
) -> tuple[list[str], list[_Task], int]:
    """The labels, the prompts that tell them apart, and how many others have an answer of every label."""
    by_prompt: dict[str, dict[str, LabelledText]] = {}
    for document in documents:
        head, found, _ = document.text.partition(command.prompt_until)
        if not found:
            raise UserError(
                f"--prompt-until {command.prompt_until!r} does not stand in {document.text[:60]!r}: name what ends the "
                "prompt of every document"
            )
        assert document.label is not None
        by_prompt.setdefault(head + found, {})[document.label] = document
    labels = sorted({document.label for document in documents if document.label is not None})
    if len(labels) < 2:
        raise UserError(f"all documents have the label {', '.join(labels)!r}: forcing needs two labels or more")
    tasks = [
        _task(tokenizer, prompt, {label: own[label] for label in labels})
        for prompt, own in by_prompt.items()
        if len(own) == len(labels)
    ]
    apart = [task for task in tasks if len({tuple(answer) for answer in task.answers.values()}) == len(labels)]
    if len(apart) < 2:
        raise UserError(
            f"{len(tasks)} prompts have an answer of every label ({', '.join(labels)}), {len(apart)} of them answers "
            "that all differ: give at least two, each as one document per label with the same beginning"
        )
    return labels, apart, len(tasks) - len(apart)


def _task(tokenizer: PreTrainedTokenizerFast, prompt: str, own: dict[str, LabelledText]) -> _Task:
    rows = {label: encode_row(tokenizer, prompt, document.router_only) for label, document in own.items()}
    answers = encode_texts(tokenizer, [document.text[len(prompt) :] for document in own.values()])
    return _Task(own, rows, dict(zip(own, answers, strict=True)))


def _measure(
    command: PathsForce,
    model: LoLForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    labels: Sequence[str],
    tasks: Sequence[_Task],
    *,
    modes: dict[str, ModePath] | None = None,
    told: bool = False,
) -> dict[str, Any]:
    """Write an answer to every prompt for every label, and count whose it is; with modes, their paths are forced."""
    longest = max(len(answer) for task in tasks for answer in task.answers.values())
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    forced: list[str] = []
    found: list[Attribution] = []
    for label in labels:
        weight = 1.0 if command.weight == "one" else command.weight
        with nullcontext() if modes is None else force_mode(model, modes[label], weight):
            texts = generate_rows(
                model, [task.prompts[label] for task in tasks], told=told, max_new_tokens=longest + _SPARE, end=end
            )
        forced += [label] * len(texts)
        found += [attribute(text, task.answers) for text, task in zip(texts, tasks, strict=True)]
    matrix = confusion(forced, [one.label for one in found], labels)
    exact = [one.label == own and one.distance == 0 for own, one in zip(forced, found, strict=True)]
    shares = np.array(exact).reshape(len(labels), -1).mean(1).tolist()
    return asdict(matrix) | {"diagonal": list(matrix.diagonal), "exact": shares}


def _print(name: str, labels: Sequence[str], found: dict[str, Any]) -> None:
    rows = [
        [label, *map(str, row), str(tied), f"{diagonal:.1%}", f"{exact:.1%}"]
        for label, row, tied, diagonal, exact in zip(
            labels, found["counts"], found["tied"], found["diagonal"], found["exact"], strict=True
        )
    ]
    print_table([name, *labels, TIED, "own", "own, exactly"], rows)
