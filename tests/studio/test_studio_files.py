"""Runs, results and saved paths: what is read of the folders, and that nothing outside of them can be reached."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lol.errors import UserError
from lol.paths.saved import SavedPath, read_saved_path, write_saved_path
from lol.studio import limits
from lol.studio.runs import MAX_LOADS, MAX_RECORDS, Runs
from lol.train.metrics import MetricsLog, read_metrics
from studio_cases import SECRET, Client

# What a name can look like that wants to leave its folder.
ESCAPES = [
    "..",
    "../outside",
    "..%2foutside%2fsecret",
    "%2e%2e/outside/run",
    "%2e%2e%2foutside%2frun",
    "..%5coutside",
    "%2fetc%2fpasswd",
    "linked",
    "linked/secret",
    "secret",
    ".",
    "demo%00",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_names_do_not_leave_their_folders(client: Client, place: Path, name: str) -> None:
    for address in (
        f"/api/runs/{name}",
        f"/api/results/{name}",
        f"/api/results/toy/figures/{name}.svg",
        f"/api/results/{name}/figures/secret.svg",
        f"/api/model?id=run:{name}",
        f"/api/model?id=model:{name}",
        f"/api/paths/{name}",
        f"/assets/{name}",
        f"/{name}",
    ):
        answer = client.ask("DELETE" if address.startswith("/api/paths") else "GET", address)
        # What is left where a name is no more than the folder itself, or the one around it.
        assert answer.status_code in (307, 404, 405) or (answer.status_code == 200 and name in (".", "..")), address
        assert SECRET not in answer.text
    answer = client.ask("PUT", f"/api/paths/{name}", json={"name": name, "path": [0]})
    assert answer.status_code in (200, 400, 404, 405)
    assert sorted(path.name for path in place.iterdir()) in (
        ["outside", "results", "runs"],
        ["outside", "paths", "results", "runs"],
    )
    shutil.rmtree(place / "paths", ignore_errors=True)


@pytest.mark.parametrize(
    "model", ["run:../outside/run", "run:linked", "model:/etc", "run:demo@../2", "run:demo@3", "x", ""]
)
def test_models_are_found_by_the_scan_alone(client: Client, model: str) -> None:
    for path, rest in (("/api/trace", {}), ("/api/generate", {"branches": [{}]})):
        answer = client.ask("POST", path, json={"model": model, "text": "path", **rest})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


# --- runs


def test_runs(client: Client, trained: Path) -> None:
    runs = client.json("GET", "/api/runs")["runs"]
    records = [record for record in read_metrics(trained) if record["event"] == "train"]
    summary = read_metrics(trained)[-1]
    assert {run["name"] for run in runs} == {"demo", "experiments/huginn-tiny/L2-seed-0"}
    for run in runs:
        facts = {name: run[name] for name in ("status", "step", "steps", "loss", "num_experts", "num_routed_depths")}
        assert facts == {
            "status": "finished",
            "step": 2,
            "steps": 2,
            "loss": records[-1]["loss"],
            "num_experts": 3,
            "num_routed_depths": 4,
        }
        assert run["held_out"] == summary["held_out_loss"]
        assert (run["checkpoints"], run["problem"]) == (1, None)
        detail = client.json("GET", f"/api/runs/{run['name']}")
        assert {name: detail[name] for name in run if name != "checkpoints"} == {
            name: value for name, value in run.items() if name != "checkpoints"
        }
        assert detail["checkpoints"] == [2]
        told = [[one["step"], one["loss"], one["router_entropy"], one["depth"]] for one in records]
        assert detail["records"] == told
        load = np.zeros((max(len(record["load"]) for record in records), 3))
        for record in records:
            load[: len(record["load"])] += record["load"]
        assert np.allclose(detail["load"], load / load.sum(1, keepdims=True))
        shares = [np.sum(record["load"], axis=0) / np.sum(record["load"]) for record in records]
        assert np.allclose([point["load"] for point in detail["load_history"]], shares)
        assert client.json("GET", f"/api/runs/{run['name']}", params={"after": 1})["records"] == told[1:]
    model = client.json("GET", "/api/model", params={"id": "run:demo@2"})
    assert (model["id"], model["name"], model["num_experts"]) == ("run:demo@2", "demo@2", 3)
    trace = client.json("POST", "/api/trace", json={"model": "run:demo", "text": "path"})
    assert len(trace["depths"]) == 4


def test_without_models_the_runs_are_shown(make_client: Callable[..., Client]) -> None:
    models = make_client().json("GET", "/api/about")["models"]
    assert {model["id"] for model in models} == {"run:demo", "run:experiments/huginn-tiny/L2-seed-0"}


def test_a_run_that_grows_is_read_on(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs/live"
    run.mkdir(parents=True)
    shutil.copy(trained / "config.json", run)
    template = next(record for record in read_metrics(trained) if record["event"] == "train")
    runs = Runs(tmp_path / "runs")
    with MetricsLog(run) as log:
        assert runs.summaries()[0].status == "waiting"
        for step in range(1, 2 * MAX_RECORDS + 2):
            loss = math.inf if step == 2 * MAX_RECORDS + 1 else 1 / step
            log.write(template | {"step": step, "loss": loss, "flops": step})
        (summary,) = runs.summaries()
        assert (summary.status, summary.step, summary.loss) == ("training", 2 * MAX_RECORDS + 1, None)
        detail = runs.detail("live", after=None)
        assert len(detail.records) == MAX_RECORDS
        assert detail.records[-1][:2] == (2 * MAX_RECORDS + 1, None)
        assert MAX_LOADS // 2 <= len(detail.load_history) <= MAX_LOADS
        reads = []
        follower = runs._followers[run]
        assert MAX_LOADS <= len(follower.state.load_history) <= 2 * MAX_LOADS
        poll = follower._tail.poll
        monkeypatch.setattr(follower._tail, "poll", lambda: reads.append(poll()) or reads[-1])
        log.write(template | {"step": 9001, "loss": 0.5, "flops": 9001})
        assert runs.detail("live", after=2 * MAX_RECORDS + 1).records == [
            (9001, 0.5, template["router_entropy"], template["depth"])
        ]
        assert [len(records) for records, _ in reads] == [1]


def test_a_run_that_cannot_be_read_says_why(trained: Path, tmp_path: Path) -> None:
    for name, file, content in (
        ("no-metrics", "metrics.jsonl", "{}\n"),
        ("no-json", "metrics.jsonl", "}\n"),
        ("odd", "metrics.jsonl", "[]\n"),
        ("no-config", "config.json", "}"),
        ("list-config", "config.json", "[]"),
        ("odd-config", "config.json", '{"model": {"hidden_size": -3}}'),
    ):
        shutil.copytree(trained, tmp_path / name)
        (tmp_path / name / file).write_text(content)
    shutil.copytree(trained, tmp_path / "good")
    runs = Runs(tmp_path)
    for _ in range(2):
        problems = {run.name: run.problem for run in runs.summaries()}
        assert problems.pop("good") is None
        assert {name for name, problem in problems.items() if not problem} == set()
    shutil.copy(trained / "metrics.jsonl", tmp_path / "odd")
    assert runs.detail("odd", None).problem is None


def test_a_scan_ends(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path
    for level in range(limits.MAX_RUN_LEVELS + 1):
        deep = deep / f"level{level}"
        shutil.copytree(trained, deep / "run")
        (deep / "loop").symlink_to(tmp_path)
    # A run whose records lie elsewhere is none.
    shutil.copytree(trained, tmp_path / "lent")
    (tmp_path / "lent/metrics.jsonl").unlink()
    (tmp_path / "lent/metrics.jsonl").symlink_to(trained / "metrics.jsonl")
    names = set(Runs(tmp_path).folders())
    assert names == {"/".join([f"level{level}" for level in range(number)]) + "/run" for number in (1, 2, 3)}
    monkeypatch.setattr("lol.studio.folders.MAX_RUNS", 2)
    assert len(Runs(tmp_path).folders()) == 2


# --- results


def test_results(client: Client) -> None:
    listed = client.json("GET", "/api/results")["experiments"]
    assert listed == [
        {"name": "maze", "title": "Maze", "files": 1},
        {"name": "toy", "title": "The toy", "files": 7},
    ]
    toy = client.json("GET", "/api/results/toy")
    assert toy["commands"] == ["lol toy discovery", "lol toy runs"]
    assert [document["file"] for document in toy["documents"]] == ["table.md"]
    assert toy["figures"] == [{"file": "forming.svg", "caption": "How paths form"}]
    assert toy["data"] == [{"file": "odd.json", "json": {"x": None, "y": [None, 1]}}]
    same = {"model": "ord", "seed": 3, "trained": 99.5, "held_out": 12.5, "separation": 0.75}
    assert sorted(toy["records"], key=lambda record: record["kind"]) == [
        same | {"kind": "discovery", "split": "functions", "split_number": 1},
        same | {"kind": "run", "split": "programs", "split_number": 0},
    ]
    maze = client.json("GET", "/api/results/maze")
    assert (maze["commands"], maze["records"]) == (["lol experiment maze"], None)
    (confusion,) = maze["confusions"]
    assert confusion["labels"] == ["dfs", "bfs"]
    assert confusion["columns"] == ["dfs", "bfs", "tied", "not solved"]
    assert confusion["matrix"] == [[0.75, 0.25, 0, 0], [0, 0.5, 0.25, 0.25]]


def test_the_project_s_own_results(make_client: Callable[..., Client]) -> None:
    """Every folder of results/ can be shown, and none without the command that made it, where its files say it."""
    root = Path(__file__).parents[2]
    client = make_client(place=root)
    listed = client.json("GET", "/api/results")["experiments"]
    assert {"bench", "toy"} <= {one["name"] for one in listed}
    for one in listed:
        shown = client.json("GET", f"/api/results/{one['name']}")
        assert shown["documents"] or shown["data"]
        assert shown["commands"], one["name"]
    toy = client.json("GET", "/api/results/toy")
    for record in toy["records"]:
        assert 0 <= record["held_out"] <= 100


def test_a_figure_runs_nothing(client: Client) -> None:
    answer = client.get("/api/results/toy/figures/forming.svg")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/svg+xml")
    policy = answer.headers["content-security-policy"].split("; ")
    assert "sandbox" in policy
    assert "default-src 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


# --- paths


@pytest.mark.parametrize("path", [[0, 1, 2, -1], [[0, 1], [2], [], [-1, -1, 1]]])
def test_paths_are_saved(make_client: Callable[..., Client], tmp_path: Path, path: Any) -> None:
    client = make_client(place=tmp_path)
    saved = {"name": "a.b-c_d", "model": "run:x", "path": path, "path_weight": 0.5, "note": "ä"}
    assert client.json("GET", "/api/paths") == {"paths": []}
    assert client.json("PUT", "/api/paths/a.b-c_d", json=saved) == saved
    assert client.json("GET", "/api/paths") == {"paths": [saved]}
    other = saved | {"note": "other"}
    assert "is there already" in client.message("PUT", "/api/paths/a.b-c_d", 409, json=other)
    assert client.json("GET", "/api/paths") == {"paths": [saved]}
    assert client.json("PUT", "/api/paths/a.b-c_d?overwrite=true", json=other) == other
    assert read_saved_path(tmp_path / "paths/a.b-c_d.json") == SavedPath(**other)
    (tmp_path / "paths/broken.json").write_text("{")
    (tmp_path / "paths/linked.json").symlink_to(tmp_path / "paths/a.b-c_d.json")
    assert client.json("GET", "/api/paths") == {"paths": [other]}
    assert "is there already" in client.message("PUT", "/api/paths/linked", 409, json=saved | {"name": "linked"})
    assert client.message("DELETE", "/api/paths/linked", 404)
    assert client.json("DELETE", "/api/paths/a.b-c_d") == {"name": "a.b-c_d"}
    assert client.message("DELETE", "/api/paths/a.b-c_d", 404)


def test_paths_that_are_refused(
    make_client: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(place=tmp_path)

    def refused(name: str = "a", address: str = "a", **changes: Any) -> str:
        body = {"name": name, "path": [0, 1]} | changes
        return client.message("PUT", f"/api/paths/{address}", 400, json=body)

    assert "give the same name in both" in refused(name="b")
    for name in (".hidden", "a/b", "", "x" * 65, "a\n", "ä"):
        assert "name" in refused(name=name)
    assert "path must be null" in refused(path=["0"])
    assert "path must be null" in refused(path=[[0], 1])
    assert "path must be null" in refused(path=[0] * (limits.MAX_DEPTHS + 1))
    assert "note" in refused(note="x" * (limits.MAX_NOTE + 1))
    assert "is no field" in refused(more=1)
    monkeypatch.setattr("lol.studio.saved_paths.MAX_SAVED_PATHS", 1)
    client.json("PUT", "/api/paths/a", json={"name": "a", "path": [0]})
    assert "delete one first" in refused(name="b", address="b")
    assert [path.name for path in (tmp_path / "paths").iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no path"),
        ('{"path": []}', "path must be a list"),
        ('{"path": [true]}', "path must be a list"),
        ('{"path": [-2]}', "path must be a list"),
        ('{"path": [[0], 1]}', "path must be a list"),
        ('{"path": [0], "path_weight": NaN}', "path_weight must be null"),
        ('{"path": [0], "path_weight": true}', "path_weight must be null"),
        ('{"path": [0], "note": 3}', "note must be a text"),
        ('{"path": [0], "paths": 3}', "'paths' that no saved path has"),
    ],
)
def test_files_that_hold_no_path(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_saved_path(tmp_path / "a.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_saved_path(tmp_path / "b.json")


def test_generate_reads_a_saved_path(lol: Callable[..., Any], served_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    flags = ("generate", "--model", served_folder, "--prompt", "router", "--max-new-tokens", 8, "--show-path")
    texts = {}
    for name, path, weight in (
        ("per depth", [0, 1, 2, -1], None),
        ("per window", [[0, 0], [1], [2, 2, 2], []], None),
        ("weighted", [0, 1, 2, -1], 0.5),
    ):
        write_saved_path(SavedPath(name, "model:loud", path, weight), file)
        code, out, err = lol(*flags, "--path-file", file)
        assert code == 0
        texts[name] = (out, err)
    assert texts["per depth"] == lol(*flags, "--path", 0, 1, 2, -1)[1:]
    assert len({err for _, err in texts.values()}) == 3
    assert "0:0 0.50" in texts["weighted"][1]
    code, _, err = lol(*flags, "--path-file", file, "--path", 0, 1, 2, -1)
    assert (code, "give one of them" in err) == (2, True)
    for path, message in (([0, 1], "path has 2 depths, but 4 are run"), ([[0], [0], [0], [7, 1]], "names block 7")):
        write_saved_path(SavedPath("a", "m", path), file)
        code, _, err = lol(*flags, "--path-file", file)
        assert (code, f"{file} is no path of {served_folder}: " in err, message in err) == (2, True, True)
    file.write_text(json.dumps({"path": 3}))
    assert lol(*flags, "--path-file", file)[0] == 2
