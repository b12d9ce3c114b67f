"""math: a dense model, a sliding window and LoL, trained on word problems with equal FLOPs and measured by lm-eval.

At the tiny scale all of it is offline, on files of the user: trained on gsm8k_train.jsonl, measured on those that are
there of arc_easy.jsonl, arc_challenge.jsonl, hellaswag.jsonl and piqa.jsonl (rows of query, choices, gold) and
gsm8k_test.jsonl (question, answer). The tasks ask as lm-eval's own do, without examples in front. At the paper scale
the tasks are lm-eval's own, with their data from the Hub.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lol.errors import UserError
from lol.experiments.comparisons import compare_losses, draw_losses, losses_section
from lol.experiments.figures import clean_axes, save_figure
from lol.experiments.harness import Experiment, Numbers, Setting, markdown_table, with_model
from lol.paths.colors import block_colors
from lol.paths.extra import need
from lol.train.config import BudgetConfig, DataConfig, EvalConfig, TrainConfig
from lol.train.loading import load_model
from lol.train.recipes import recipe

_RECIPES = {"dense": "math-1b-dense", "sliding": "math-1b-sliding", "LoL": "math-1b"}
_CHOICES = ("arc_easy", "arc_challenge", "hellaswag", "piqa")
_GSM8K = "gsm8k"
# Enough for a tiny run of about 800 to 1,100 steps.
_TINY_FLOPS = 1.7e13
_LONGEST_ANSWER = 96
PUBLISHED = {
    "dense": {"arc_easy": 40.8, "arc_challenge": 28.2, "hellaswag": 31.4, "piqa": 56.6, "gsm8k": 29.7},
    "sliding": {"arc_easy": 49.5, "arc_challenge": 28.5, "hellaswag": 31.3, "piqa": 58.8, "gsm8k": 27.5},
    "LoL": {"arc_easy": 50.3, "arc_challenge": 29.1, "hellaswag": 31.2, "piqa": 59.7, "gsm8k": 27.9},
}
"""Percent right, as the article gives them."""
_CHANCE = {"arc_easy": 0.25, "arc_challenge": 0.25, "hellaswag": 0.25, "piqa": 0.5, "gsm8k": 0.0}
"""Of guessing; at the tiny scale it is counted from the files."""


def _runs(setting: Setting) -> Mapping[str, TrainConfig]:
    need("lm_eval")
    configs = {}
    for label, name in _RECIPES.items():
        config = recipe(name if setting.scale == "paper" else f"{name}-tiny")
        if setting.scale == "tiny":
            data = DataConfig(str(_write_training(setting)), held_out_fraction=0.05, context_length=256)
            config = with_model(config, vocab_size=2048, window_size=32, window_stride=16)
            config = replace(config, data=data, steps=4000, budget=BudgetConfig(flops=_TINY_FLOPS))
            config = replace(config, eval=EvalConfig(every=100, rows=64), checkpoint_every=200)
            config = replace(config, optim=replace(config.optim, learning_rate=2e-3, warmup_steps=50))
        configs[label] = config
    return {
        f"{label}-seed-{seed}": replace(config, seed=seed)
        for seed in setting.seeds
        for label, config in configs.items()
    }


def _write_training(setting: Setting) -> Path:
    """The problems to train on as documents, in the form in which the tasks ask."""
    assert setting.data is not None
    rows = read_rows(setting.data / "gsm8k_train.jsonl", ("question", "answer"))
    file = setting.folder / "train.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def read_rows(file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a .jsonl file that must have these columns.

    Raises:
        UserError: there is no such file, or a row lacks a column.
    """
    if not file.is_file():
        raise UserError(f"{file}: there is no such file; --data must be a folder that holds it")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, row in enumerate(rows, start=1):
        if missing := [name for name in columns if name not in row]:
            raise UserError(f"{file}, row {number}: no column {missing[0]!r}; each row needs {', '.join(columns)}")
    return rows


def _measure(setting: Setting, runs: Mapping[str, Path]) -> Numbers:
    if setting.scale == "paper":
        tasks, chance, manager = [*_CHOICES, _GSM8K], _CHANCE, None
    else:
        assert setting.data is not None
        chance = write_tasks(setting.data, setting.folder / "tasks")
        tasks = list(chance)
        manager = need("lm_eval.tasks").TaskManager(include_path=str(setting.folder / "tasks"), include_defaults=False)
    scores: Numbers = {}
    for name, run in runs.items():
        print(f"lm-eval: {name}", flush=True)
        scores[name] = evaluate(run, tasks, manager, limit=4 if setting.fast else None)
    return {"losses": compare_losses(runs), "scores": scores, "chance": {name: chance[name] for name in tasks}}


def write_tasks(data: Path, folder: Path) -> dict[str, float]:
    """Write a task of lm-eval for each file that is there; returns the score of guessing by task.

    Raises:
        UserError: a file lacks a column, or there is no file.
    """
    chance = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in _CHOICES:
        if (data / f"{name}.jsonl").exists():
            rows = read_rows(data / f"{name}.jsonl", ("query", "choices", "gold"))
            chance[name] = float(np.mean([1 / len(row["choices"]) for row in rows]))
            _write_task(folder, name, data / f"{name}.jsonl", _choice_task())
    if (data / "gsm8k_test.jsonl").exists():
        read_rows(data / "gsm8k_test.jsonl", ("question", "answer"))
        chance[_GSM8K] = 0.0
        _write_task(folder, _GSM8K, data / "gsm8k_test.jsonl", _gsm8k_task())
    if not chance:
        raise UserError(f"{data} has none of {', '.join(f'{name}.jsonl' for name in _CHOICES)}, gsm8k_test.jsonl")
    return chance


def _choice_task() -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query|trim}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    }


def _gsm8k_task() -> dict[str, Any]:
    """An answer counts if the number behind its #### is the one behind the solution's."""
    return {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer.split('####')[-1]|trim}}",
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": _LONGEST_ANSWER, "do_sample": False},
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [
                    {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": [",", "\\$", "\\.$"]}],
    }


def _write_task(folder: Path, name: str, file: Path, task: Mapping[str, Any]) -> None:
    source = {"data_files": {"test": str(file.resolve())}, "cache_dir": str(folder / "cache")}
    whole = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test", **task}
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(whole), encoding="utf-8")


def evaluate(run: Path, tasks: Sequence[str], manager: Any, limit: int | None) -> Numbers:
    """Share right and its standard error, by task."""
    model, tokenizer = load_model(run)
    lm = need("lm_eval.models.huggingface").HFLM(pretrained=model, tokenizer=tokenizer, batch_size=32)
    results = need("lm_eval").simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, limit=limit)
    return {task: _score(results["results"][task], results["n-samples"][task]["effective"]) for task in tasks}


def _score(result: Mapping[str, Any], samples: int) -> Numbers:
    key = "acc,none" if "acc,none" in result else "exact_match,strict-match"
    return {"score": result[key], "error": result[key.replace(",", "_stderr,")], "samples": samples}


def _draw(numbers: Numbers, folder: Path) -> None:
    draw_losses(numbers["losses"], folder / "loss.svg")
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = clean_axes(figure.subplots())
    tasks, width = list(numbers["chance"]), 0.8 / len(numbers["scores"])
    places = np.arange(len(tasks))
    for number, (run, color) in enumerate(zip(numbers["scores"], block_colors(len(numbers["scores"])), strict=True)):
        scores = [numbers["scores"][run][task] for task in tasks]
        left = places - 0.4 + (number + 0.5) * width
        errors = [0.0 if isinstance(one["error"], str) else one["error"] for one in scores]
        axes.bar(left, [one["score"] for one in scores], width, yerr=errors, color=color, label=run, capsize=2)
    for place, task in enumerate(tasks):
        axes.plot([place - 0.45, place + 0.45], [numbers["chance"][task]] * 2, color="#1a1a1a", linestyle=":")
    axes.set_xticks(places, tasks)
    axes.set_ylabel("share right; dotted: guessing", fontsize=8)
    axes.legend(frameon=False, fontsize=7)
    save_figure(figure, folder / "scores.svg")


def _section(numbers: Numbers) -> str:
    tasks = list(numbers["chance"])
    rows = [["guessing", *(f"{100 * numbers['chance'][task]:.1f}" for task in tasks)]]
    for run, scores in numbers["scores"].items():
        rows.append([run, *(_cell(scores[task]) for task in tasks)])
    for label, published in PUBLISHED.items():
        rows.append([f"published, {label} at 1B", *(f"{published[task]:.1f}" for task in tasks)])
    samples = ", ".join(f"{task} {next(iter(numbers['scores'].values()))[task]['samples']:,}" for task in tasks)
    return "\n\n".join(
        [
            f"Percent right ± standard error, without examples in front; questions: {samples}.",
            markdown_table(["", *tasks], rows),
            losses_section(numbers["losses"]),
        ]
    )


def _cell(score: Numbers) -> str:
    error = score["error"] if isinstance(score["error"], str) else f"{100 * score['error']:.1f}"
    return f"{100 * score['score']:.1f} ± {error}"


MATH = Experiment(
    name="math",
    purpose="Dense, sliding window and LoL at equal FLOPs, through lm-eval.",
    published="ARC-E 40.8, 49.5, 50.3; ARC-C 28.2, 28.5, 29.1; HellaSwag 31.4, 31.3, 31.2; PIQA 56.6, 58.8, 59.7; "
    "GSM8K 29.7, 27.5, 27.9 (dense, sliding window, LoL; 1B, about 90 EFLOP)",
    seeds=(0,),
    runs=_runs,
    measure=_measure,
    draw=_draw,
    section=_section,
    data="FOLDER with gsm8k_train.jsonl and the files of the tasks",
)
