"""What the experiments measure, on small things whose numbers are known."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lol.errors import UserError
from lol.experiments.benchmarks import _score, write_tasks
from lol.experiments.comparisons import compare_losses
from lol.experiments.languages import closeness, language_of
from lol.experiments.reading import Reading, probe_paths, rows
from lol.experiments.safety import SAFE, UNSAFE, classify, labels_of_people
from lol.model.config import LoLConfig
from lol.model.lm import LoLForCausalLM
from lol.paths.record import record_paths
from lol.train.metrics import read_metrics
from lol.train.trainer import train
from small_run import MODEL, small_config


def test_languages_are_compared_in_pairs():
    distances = np.array([[0, 1, 4, 6], [1, 0, 5, 7], [4, 5, 0, 9], [6, 7, 9, 0]], dtype=float)
    found = closeness(["de", "fra_Latn", "ja", "ru"], distances)
    assert found == {"latin": 1.0, "mixed": (4 + 5 + 6 + 7) / 4, "other": 9.0}
    assert closeness(["de", "fr"], distances[:2, :2]) == {"latin": 1.0}
    assert language_of("hf:HuggingFaceFW/fineweb-2:deu_Latn") == "deu_Latn"
    assert language_of("some/folder/ko.txt") == "ko"


def test_the_first_window_is_left_out_and_is_the_same_for_every_text():
    torch.manual_seed(0)
    model = LoLForCausalLM(LoLConfig(**MODEL)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    draw = np.random.default_rng(0)
    ids = [[1, *draw.integers(3, 280, size=39).tolist()] for _ in range(8)]
    reading = Reading(ids, ["a", "b"] * 4, record_paths(model, ids), 280, quick=True)
    table = reading.table
    first = (
        table[table["window"] == 0].groupby("depth")["probabilities"].agg(lambda own: np.ptp(np.stack(own), 0).max())
    )
    later = (
        table[table["window"] == 1].groupby("depth")["probabilities"].agg(lambda own: np.ptp(np.stack(own), 0).max())
    )
    assert first.max() < 1e-5 < later.min()
    _, keys = rows(reading, "one-hot", "window")
    assert keys["window"].tolist() == [1, 2, 3, 4] * 8
    assert len(rows(reading, "probability", "sequence")[0]) == 8
    assert probe_paths(reading, "probability", "window")["rows"] == 32
    short = Reading([ids[0][:8]], ["a"], record_paths(model, [ids[0][:8]]), 280)
    with pytest.raises(UserError, match="give longer texts"):
        rows(short, "one-hot", "window")


def test_labels_of_people_and_of_the_classifier(tmp_path: Path):
    file = tmp_path / "posts.jsonl"
    posts = [("one", "neither"), ("two", "hate"), ("three", "safe"), ("four", "offensive"), ("one", "neither")]
    posts += [("both", "neither"), ("both", "hate")]
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in posts))
    assert labels_of_people(file) == {"one": SAFE, "two": UNSAFE, "three": SAFE, "four": UNSAFE}
    assert classify(["have a nice day", "you fucking idiot"]) == [SAFE, UNSAFE]
    file.write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match="line 1: each line must be"):
        labels_of_people(file)


def test_losses_are_those_of_the_runs(corpus: Path, tmp_path: Path):
    runs = {}
    for name, seed, experts in (("a", 1, 2), ("a", 2, 2), ("b", 1, 3)):
        runs[f"{name}-seed-{seed}"] = tmp_path / f"{name}{seed}"
        config = small_config(
            corpus, seed=seed, model={"num_experts": experts}, steps=1, growth={"initial_depth": None}
        )
        train(config, runs[f"{name}-seed-{seed}"])
    numbers = compare_losses(runs)
    assert list(numbers) == ["a", "b"]
    summary = read_metrics(runs["a-seed-2"])[-1]
    assert numbers["a"]["seeds"] == [1, 2]
    assert numbers["a"]["losses"][1] == summary["held_out_loss"]
    assert numbers["a"]["courses"][1][-1] == (summary["flops"], summary["held_out_loss"])
    assert numbers["b"]["stored"] - numbers["a"]["stored"] == 4 * 16**2 + 3 * 16 * 24


@pytest.mark.slow
def test_lm_eval_asks_and_grades_as_it_should(tmp_path: Path):
    """A model that knows the gold answers of half of the items, and of a third of the problems."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    items = [
        {"query": f"Question: item {n}?\n", "choices": ["w", "x", "y", "z"][: 2 + n % 3], "gold": n % 2}
        for n in range(6)
    ]
    problems = [{"question": f"problem {n}?", "answer": f"Because.\n#### {n},000"} for n in range(3)]
    for name, own in (("piqa", items), ("gsm8k_test", problems)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    chance = write_tasks(tmp_path, tmp_path / "tasks")
    assert chance == {"piqa": pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3), "gsm8k": 0.0}

    class Knowing(LM):
        def loglikelihood(self, requests: list) -> list:
            return [(self.likes(*request.args), False) for request in requests]

        def likes(self, context: str, answer: str) -> float:
            number = next(n for n in range(6) if context == f"Question: item {n}?\nAnswer:")
            right = answer == " " + "wx"[number % 2]
            return -1.0 if right == (number < 3) else -2.0 - (answer == " z")

        def generate_until(self, requests: list) -> list:
            written = {"0": "So it is.\n#### 0000", "1": "The answer is 1,000", "2": "#### 3"}
            return [written[request.args[0].removeprefix("Question: problem ")[0]] for request in requests]

        def loglikelihood_rolling(self, requests: list) -> Any:
            raise NotImplementedError

    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    results = simple_evaluate(model=Knowing(), tasks=list(chance), task_manager=manager)
    scores = {task: _score(results["results"][task], results["n-samples"][task]["effective"]) for task in chance}
    assert (scores["piqa"]["score"], scores["piqa"]["samples"]) == (0.5, 6)
    assert scores["piqa"]["error"] == pytest.approx(np.sqrt(0.25 / 5))
    assert (scores["gsm8k"]["score"], scores["gsm8k"]["samples"]) == (pytest.approx(1 / 3), 3)
