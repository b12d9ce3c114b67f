"""`lol recipe list` and `lol recipe show`: what they print fits a terminal and is all that a recipe decides."""

import json
from pathlib import Path

import pytest

from lol.model.cost import count_parameters
from lol.reports.memory import memory_note
from lol.reports.recipes import RecipeShow
from lol.train.config import as_json, from_json
from lol.train.memory import training_memory
from lol.train.progress import shorten
from lol.train.published import PUBLISHED
from lol.train.recipes import recipe
from small_run import Lol


@pytest.fixture
def lol(lol: Lol, monkeypatch: pytest.MonkeyPatch) -> Lol:
    """The command in a terminal of eighty columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return lol


def test_the_list_fits_a_terminal_and_names_every_run(lol: Lol) -> None:
    code, out, err = lol("recipe", "list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    # Nothing was cut to fit.
    assert "…" not in out
    assert "\x1b" not in out
    rows = {line.split()[0]: line for line in lines[2 : lines.index("")]}
    assert list(rows) == ["demo", "tiny", *PUBLISHED]
    for name, line in rows.items():
        config = recipe(name)
        assert shorten(count_parameters(config.model).body.stored) in line
        if config.model.num_routed_depths:
            assert f" {config.model.num_experts} x {config.model.num_routed_depths} " in line
    assert rows["moe-360m"].endswith(" 17.3 EFLOP")
    assert rows["safety"].endswith(" 10 G tokens")
    assert rows["demo"].endswith(" 450 steps")
    assert "NAME-tiny" in lines[-1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_of_the_article_says_what_it_needs(lol: Lol, tmp_path: Path, name: str) -> None:
    file = tmp_path / "recipe.json"
    code, out, err = lol("recipe", "show", name, "--json", file)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    config = recipe(name)
    written = json.loads(file.read_text())
    assert as_json(from_json(written["config"])) == as_json(config)
    need = training_memory(config, 8, rows=26, bf16=True)
    numbers = written["training_memory"]
    assert numbers["rows_on_a_gpu"] == 26
    assert numbers["gpus"]["8"]["bf16"]["total"] == need.total
    (together,) = (line for line in out.splitlines() if line.startswith("together "))
    assert together.endswith(shorten(need.total, "B"))
    (checkpointed,) = (line for line in out.splitlines() if line.startswith("  checkpointing "))
    assert checkpointed.endswith(shorten(training_memory(config, 8, 26, bf16=True, checkpointing=True).total, "B"))
    assert "On 1 GPU: --batch-size 26 --accumulation 40" in " ".join(out.split())


def test_every_value_is_shown(lol: Lol) -> None:
    _, out, _ = lol("recipe", "show", "multilingual-tiny")
    words = " ".join(out.split())
    config = as_json(recipe("multilingual-tiny"))
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for field, value in section.items():
            if field != "recipe" and not isinstance(value, dict):
                assert f"{field}={value}" in words
    # A twin says what it is and of what.
    assert words.startswith("multilingual-tiny: The same run at a size for two CPU cores.")
    assert "Its original: Ten languages, equal shares." in words
    assert "mlp_size=256" in words
    assert "tokens_per_step=1024" in words


def test_the_note_says_how_one_gpu_takes_the_step() -> None:
    assert memory_note(recipe("tiny")).endswith(
        "an estimate for 1 row of 128 tokens in a pass on each GPU: batch_size / 8. On 1 GPU: --batch-size 1 "
        "--accumulation 8"
    )


def test_mistakes_name_the_fix(lol: Lol) -> None:
    code, _, err = lol("recipe", "show", "mazes")
    assert (code, err) == (2, "lol: there is no recipe 'mazes': did you mean maze? `lol recipe list` shows them all\n")
    code, _, err = lol("recipe", "show")
    assert code == 2
    code, _, err = lol("recipe", "cook")
    assert (code, "there is no verb 'recipe cook'" in err) == (2, True)


def test_the_example_of_the_help_is_read(lol: Lol) -> None:
    (example,) = (line.strip() for line in (RecipeShow.__doc__ or "").splitlines() if "Example: " in line)
    assert lol(*example.removeprefix("Example: lol ").split())[0] == 0
