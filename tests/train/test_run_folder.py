"""A run folder is not overwritten unasked, not resumed with another configuration, not shared by two processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lol.errors import UserError
from lol.train import run_folder
from lol.train.run_folder import open_run

CONFIG = {
    "model": {"num_experts": 8, "fixed_path": (0, 1)},
    "optim": {"lr": 1e-3, "clip": float("inf")},
    "data": Path("text.txt"),
    "extra": {},
    "steps_per_log": 10,
}

HOLDER = """
import sys
from pathlib import Path
from lol.errors import UserError
from lol.train.run_folder import open_run
sys.stdin.readline()
try:
    folder = open_run(Path(sys.argv[1]), {}, resume=False)
except UserError as error:
    print("refused", error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_run_is_made_and_resumed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    with open_run(run, CONFIG, resume=False) as folder:
        assert folder.path == run
    config = json.loads((run / "config.json").read_text())
    assert config["model"] == {"num_experts": 8, "fixed_path": [0, 1]}
    assert config["optim"]["clip"] == "inf"
    assert config["data"] == "text.txt"
    with open_run(run, CONFIG, resume=True):
        assert set(files(run)) == {"config.json", ".lock"}


@pytest.mark.parametrize("mark", ["config.json", "metrics.jsonl", "checkpoints/step-00000001/training.json"])
def test_a_folder_with_a_run_is_not_written_to_unasked(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).write_text("{}")
    with pytest.raises(UserError, match="already holds a run; pass --resume to continue it, or another --run"):
        open_run(tmp_path, CONFIG, resume=False)
    assert files(tmp_path) == {mark: b"{}"}


def test_a_folder_with_other_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(UserError, match="other files and no run; choose an empty or a new folder"):
        open_run(tmp_path, CONFIG, resume=False)
    with pytest.raises(UserError, match="no run to continue; drop --resume"):
        open_run(tmp_path, CONFIG, resume=True)
    with pytest.raises(UserError, match="no run to continue"):
        open_run(tmp_path / "new", CONFIG, resume=True)
    assert files(tmp_path) == {"thesis.tex": b"dear"}
    assert not (tmp_path / "new").exists()


def test_what_a_kill_during_the_start_leaves_is_no_run(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on a host with a rather long name" * 9)
    (tmp_path / ".config.json.partial").write_text('{"mod')
    with open_run(tmp_path, CONFIG, resume=False):
        assert set(files(tmp_path)) == {".lock", "config.json"}
        assert files(tmp_path)[".lock"].decode() == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_run_that_appears_while_the_lock_is_taken_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = run_folder._take_lock

    def after_another_process(run: Path) -> int:
        (run / "config.json").write_text('{"theirs": 1}')
        return take(run)

    monkeypatch.setattr(run_folder, "_take_lock", after_another_process)
    with pytest.raises(UserError, match="already holds a run"):
        open_run(tmp_path, CONFIG, resume=False)
    assert files(tmp_path)["config.json"] == b'{"theirs": 1}'


def test_unusable_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; choose a folder"):
        open_run(tmp_path / "file", CONFIG, resume=False)
    with pytest.raises(UserError, match=r"cannot be written \(.*\); choose another --run"):
        open_run(tmp_path / "file" / "below", CONFIG, resume=False)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"a run without its config\.json; restore"):
        open_run(tmp_path, CONFIG, resume=True)
    for broken in ("{", "[]"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(UserError, match=r"config\.json is not a JSON object; restore"):
            open_run(tmp_path, CONFIG, resume=True)


def test_every_differing_field_is_named_with_both_values(tmp_path: Path) -> None:
    open_run(tmp_path, CONFIG, resume=False).close()
    before = files(tmp_path)["config.json"]
    changed = {
        "model": {"num_experts": 4, "fixed_path": (0, 1), "window_size": 128},
        "optim": {"lr": 1e-3, "clip": 1.0},
        "data": "text.txt",
        "steps_per_log": 10,
    }
    with pytest.raises(UserError) as caught:
        open_run(tmp_path, changed, resume=True)
    assert str(caught.value).splitlines()[1:] == [
        "  model.num_experts: 8 in the run, 4 now",
        '  optim.clip: "inf" in the run, 1.0 now',
        "  extra: {} in the run, absent now",
        "  model.window_size: absent in the run, 128 now",
    ]
    assert files(tmp_path)["config.json"] == before
    # The refusal let go of the folder.
    open_run(tmp_path, CONFIG, resume=True).close()


def test_fields_that_may_differ_are_taken_over(tmp_path: Path) -> None:
    open_run(tmp_path, CONFIG, resume=False).close()
    changed = CONFIG | {"steps_per_log": 5, "optim": {"lr": 2e-3, "clip": 0.5}}
    with pytest.raises(UserError, match=r"optim\.lr: 0.001 in the run, 0.002 now"):
        open_run(tmp_path, changed, resume=True, may_differ=("steps_per_log", "opt", "optim.clip"))
    open_run(tmp_path, changed, resume=True, may_differ=("steps_per_log", "optim")).close()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["steps_per_log"] == 5
    assert config["optim"]["lr"] == 2e-3


def test_the_lock_holds_within_a_process_and_is_let_go(tmp_path: Path) -> None:
    folder = open_run(tmp_path, {}, resume=False)
    with pytest.raises(UserError, match=rf"process {os.getpid()} on .* is training in"):
        open_run(tmp_path, {}, resume=True)
    folder.close()
    folder.close()
    open_run(tmp_path, {}, resume=True).close()


@pytest.mark.slow
def test_of_two_processes_one_gets_the_folder_until_it_dies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(run)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = {}
        for child in children:
            assert child.stdout is not None
            answers[child.stdout.readline().split()[0]] = child
        assert set(answers) == {"held", "refused"}
        holder = answers["held"]
        with pytest.raises(UserError, match=rf"process {holder.pid} on .* is training in"):
            open_run(run, {}, resume=True)
        holder.kill()
        holder.wait()
        open_run(run, {}, resume=True).close()
    finally:
        for child in children:
            child.kill()
            child.communicate()
