"""lm-eval (EleutherAI's evaluation harness) on a trained model: in process and by its own command line.

Batches mix prompts of one window with prompts of several. lm-eval pads log-likelihood requests on the right and gives
no mask, and pads prompts for generation on the left with one.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval_cases import (
    CHOICE,
    CONTINUATION,
    ROLLING,
    STORY,
    answers,
    continuation_score,
    plain_ids,
    rolling_score,
    samples,
    write_documents,
    write_tasks,
    written_text,
)

from lol import force_path
from lol.train.loading import find_checkpoint, load_model
from small_run import MODEL, environment

# The commands of lm-eval share one setup, which is long on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BATCH_SIZES = [1, 3, 8]
# Tasks whose requests begin with the begin token as lm-eval is, and the one that needs add_bos_token=False for it.
USUAL, ROLLED = (CHOICE, CONTINUATION, STORY), (ROLLING,)
TRAINING = [
    word
    for name, value in (MODEL | {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}).items()
    for word in (f"--model.{name.replace('_', '-')}", value)
]
TRAINING += ["--steps", 80, "--batch-size", 8, "--data.context-length", 64, "--data.document-chars", 40]
TRAINING += ["--optim.learning-rate", 1e-2, "--optim.warmup-steps", 2, "--eval.no-ngrams", "--seed", 7]
CLOSE = {"abs": 1e-4, "rel": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run long enough for the model to know its words, to end its documents and to use several
    blocks."""
    top = tmp_path_factory.mktemp("lm-eval")
    flags = ["--run", top / "run", "--data", write_documents(top / "corpus.txt"), *TRAINING]
    command = [sys.executable, "-m", "lol", "train", *map(str, flags)]
    subprocess.run(command, env=environment(), capture_output=True, check=True, timeout=200)
    return find_checkpoint(top / "run")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    return load_model(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """The same model in float64."""
    return load_model(folder)[0].double()


@pytest.fixture(scope="module")
def tasks(folder: Path, loaded: Any, reference: Any) -> tuple[Path, dict[str, list[dict]]]:
    place = folder.parent / "tasks"
    return place, write_tasks(place, reference, loaded[1])


@pytest.fixture(scope="module")
def documents(tasks: Any) -> dict[str, list[dict]]:
    return tasks[1]


@pytest.fixture(scope="module")
def manager(tasks: Any) -> Any:
    """Our tasks, and none of lm-eval's own."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(tasks[0]), include_defaults=False)


@pytest.fixture(scope="module")
def evaluate(loaded: Any, manager: Any) -> Callable[..., dict[str, Any]]:
    """Results of some tasks in this process by batch size and lm-eval's arguments; each is computed once."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = loaded
    known: dict[Any, Any] = {}

    def results(batch_size: int, names: tuple[str, ...], **arguments: Any) -> dict[str, Any]:
        key = (batch_size, names, *arguments.items())
        if key not in known:
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **arguments)
            known[key] = lm_eval.simple_evaluate(model=lm, tasks=list(names), task_manager=manager, bootstrap_iters=0)
        return known[key]

    return results


def same_answers(one: dict[str, Any], other: dict[str, Any], names: tuple[str, ...]) -> None:
    """Log probabilities of every request to 1e-4, texts to the letter, scores of the tasks to what follows of that."""
    for task in names:
        if task == STORY:
            assert answers(one, task) == answers(other, task)
        else:
            assert _numbers(answers(one, task)) == pytest.approx(_numbers(answers(other, task)), **CLOSE)
        for metric, value in one["results"][task].items():
            # lm-eval's command estimates errors too, which are not asked for here.
            if isinstance(value, float) and "stderr" not in metric:
                assert value == pytest.approx(other["results"][task][metric], rel=1e-4), metric


def _numbers(answers: list[list]) -> list[float]:
    """Log probabilities and whether the model would have written the text itself, in one row."""
    flat: list[Any] = []
    for answer in answers:
        for value in answer:
            flat += value if isinstance(value, list | tuple) else [value]
    # The files of the command line hold both as text.
    return [float(json.loads(str(value).lower())) for value in flat]


def test_the_tasks_would_show_a_leak(loaded: Any, documents: dict[str, list[dict]]):
    model, tokenizer = loaded
    prompts = [document["prompt"] for document in documents[CHOICE]]
    lengths = {len(plain_ids(tokenizer, prompt)) for prompt in prompts}
    assert len(lengths) > 6
    assert max(lengths) > model.config.max_position_embeddings > 4 * model.config.window_size
    with torch.no_grad():
        routes = [model(**tokenizer(prompt, return_tensors="pt")).routing.experts for prompt in prompts]
    paths = {tuple(route[0, :, window].tolist()) for route in routes for window in range(route.shape[2])}
    assert len({block for path in paths for block in path if block >= 0}) >= 2
    assert len(paths) >= 4


@pytest.mark.parametrize("batch_size", BATCH_SIZES[1:])
def test_a_score_that_moves_with_the_batch_size(evaluate: Any, batch_size: int):
    same_answers(evaluate(batch_size, USUAL), evaluate(1, USUAL), USUAL)
    rolled = {"add_bos_token": False}
    same_answers(evaluate(batch_size, ROLLED, **rolled), evaluate(1, ROLLED, **rolled), ROLLED)


def test_scores_of_choices_are_those_of_the_document_alone(evaluate: Any, loaded: Any, reference: Any):
    results = evaluate(8, USUAL)
    right = []
    for sample in samples(results, CHOICE):
        document = sample["doc"]
        wanted = [
            continuation_score(reference, loaded[1], document["prompt"], f" {choice}") for choice in document["choices"]
        ]
        assert [score for score, _ in sample["filtered_resps"]] == pytest.approx(wanted, **CLOSE)
        right.append(wanted.index(max(wanted)) == document["answer"])
    assert 0 < sum(right) < len(right)
    assert results["results"][CHOICE]["acc,none"] == pytest.approx(sum(right) / len(right))


def test_scores_of_continuations_are_those_of_the_document_alone(evaluate: Any, loaded: Any, reference: Any):
    results = evaluate(8, USUAL)
    wanted = [
        continuation_score(reference, loaded[1], sample["doc"]["prompt"], f" {sample['doc']['target']}")
        for sample in samples(results, CONTINUATION)
    ]
    given = [answer for (answer,) in answers(results, CONTINUATION)]
    assert [score for score, _ in given] == pytest.approx(wanted, **CLOSE)
    assert {greedy for _, greedy in given} == {True, False}


def test_rolling_scores_are_those_of_the_pieces_alone(evaluate: Any, loaded: Any, reference: Any):
    results = evaluate(8, ROLLED, add_bos_token=False)
    wanted = [rolling_score(reference, loaded[1], sample["doc"]["text"]) for sample in samples(results, ROLLING)]
    assert _numbers(answers(results, ROLLING)) == pytest.approx(wanted, **CLOSE)


def test_generated_texts_are_those_of_the_prompt_alone(evaluate: Any, loaded: Any, reference: Any):
    results = evaluate(8, USUAL)
    given = [text for (text,) in answers(results, STORY)]
    wanted = [written_text(reference, loaded[1], sample["doc"]["prompt"]) for sample in samples(results, STORY)]
    assert given == wanted
    # Rows end at different steps, so that some wait for the others.
    assert len({len(text) for text in given}) > 4
    assert results["results"][STORY]["exact_match,none"] == 0.5


def test_a_begin_token_stands_before_everything(evaluate: Any, loaded: Any, reference: Any):
    """As it did in training. For whole texts lm-eval adds one and lets the tokenizer add another, which no document of
    the training had; add_bos_token=False is right there, and wrong for the other tasks."""
    _, tokenizer = loaded
    begin = tokenizer.bos_token_id
    assert tokenizer("a path")["input_ids"][0] == begin

    doubled = _numbers(answers(evaluate(8, ROLLED), ROLLING))
    texts = [sample["doc"]["text"] for sample in samples(evaluate(8, ROLLED), ROLLING)]
    assert doubled == pytest.approx([rolling_score(reference, tokenizer, text, begins=2) for text in texts], **CLOSE)
    once = _numbers(answers(evaluate(8, ROLLED, add_bos_token=False), ROLLING))
    # What the second one costs a document, in nats.
    assert min(right - wrong for right, wrong in zip(once, doubled, strict=True)) > 3

    without = samples(evaluate(8, (CHOICE,), add_bos_token=False), CHOICE)[0]
    first = (without["doc"]["prompt"], f" {without['doc']['choices'][0]}")
    assert without["filtered_resps"][0][0] == pytest.approx(
        continuation_score(reference, tokenizer, *first, begins=0), **CLOSE
    )
    assert abs(without["filtered_resps"][0][0] - continuation_score(reference, tokenizer, *first)) > 0.1


# Several commands of lm-eval in one process, which imports torch once.
IN_TURN = """
import json, sys
from lm_eval.__main__ import cli_evaluate
for flags in json.loads(sys.argv.pop()):
    sys.argv[1:] = flags
    cli_evaluate()
"""


@pytest.fixture(scope="module")
def command_line(folder: Path, tasks: Any) -> Callable[..., dict[str, Any]]:
    """What lm-eval's command writes about the folder, in processes that never imported this package before; by batch
    size and tasks."""
    out = {
        (3, USUAL): folder.parent / "out-3",
        (1, USUAL): folder.parent / "out-1",
        (8, USUAL): folder.parent / "out-8",
        (3, ROLLED): folder.parent / "out-rolled",
    }

    def flags(batch_size: int, names: tuple[str, ...]) -> list[str]:
        model = f"pretrained={folder},trust_remote_code=True" + (",add_bos_token=False" if names == ROLLED else "")
        command = ["--model", "hf", "--model_args", model, "--tasks", ",".join(names)]
        command += ["--include_path", str(tasks[0]), "--batch_size", str(batch_size), "--device", "cpu"]
        return [*command, "--output_path", str(out[batch_size, names]), "--log_samples"]

    first, *rest = [flags(*key) for key in out]
    program = Path(sys.executable).with_name("lm-eval")
    for command in ([program, *first], [sys.executable, "-c", IN_TURN, json.dumps(rest)]):
        done = subprocess.run(
            command,
            env=environment() | {"HF_HOME": str(folder.parent / "hub"), "HF_DATASETS_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr

    def results(batch_size: int, names: tuple[str, ...]) -> dict[str, Any]:
        place = out[batch_size, names]
        (written,) = place.rglob("results_*.json")
        lines = {name: next(place.rglob(f"samples_{name}_*.jsonl")).read_text().splitlines() for name in names}
        of_tasks = {name: [json.loads(line) for line in rows] for name, rows in lines.items()}
        return json.loads(written.read_text()) | {"samples": of_tasks}

    return results


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_the_command_line_gives_the_same(evaluate: Any, command_line: Any, batch_size: int):
    same_answers(command_line(batch_size, USUAL), evaluate(1, USUAL), USUAL)


def test_the_command_line_scores_whole_texts(evaluate: Any, command_line: Any):
    same_answers(command_line(3, ROLLED), evaluate(1, ROLLED, add_bos_token=False), ROLLED)


def test_a_folder_in_process(folder: Path, evaluate: Any, manager: Any):
    import lm_eval

    given = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder)},
        tasks=[CHOICE],
        batch_size=3,
        device="cpu",
        task_manager=manager,
        bootstrap_iters=0,
    )
    same_answers(given, evaluate(1, USUAL), (CHOICE,))


def test_a_forced_path_is_evaluated(loaded: Any, reference: Any, manager: Any, evaluate: Any):
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    path = [1, 0, 0, 1]
    lm = HFLM(pretrained=loaded[0], tokenizer=loaded[1], batch_size=3)
    with force_path(loaded[0], path):
        given = lm_eval.simple_evaluate(model=lm, tasks=[CHOICE], task_manager=manager, bootstrap_iters=0)
    for sample in samples(given, CHOICE)[:3]:
        prompt, choices = sample["doc"]["prompt"], sample["doc"]["choices"]
        with force_path(reference, path):
            wanted = [continuation_score(reference, loaded[1], prompt, f" {choice}") for choice in choices]
        assert [score for score, _ in sample["filtered_resps"]] == pytest.approx(wanted, **CLOSE)
    free = answers(evaluate(1, USUAL), CHOICE)
    assert _numbers(answers(given, CHOICE)) != pytest.approx(_numbers(free), abs=0.1, rel=0)
