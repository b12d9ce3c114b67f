"""`lol watch`: what it says of a real run, and the screen of a terminal while a run begins, grows, is cut and ends."""

import json
import os
import shutil
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from lol.reports.watch_screen import draw_chart, load_map, sparkline
from lol.reports.watch_state import Follower
from lol.train.metrics import read_metrics
from lol.train.progress import duration, shorten
from lol.train.run_folder import is_trained_in
from pty_session import Session
from small_run import Lol


def test_a_pipe_gets_the_newest_state_as_lines(lol: Lol, trained: Path, tmp_path: Path) -> None:
    code, out, err = lol("watch", trained)
    assert (code, err) == (0, "")
    records = read_metrics(trained)
    last = [record for record in records if record["event"] == "train"][-1]
    (held_out,) = [record["loss"] for record in records if record["event"] == "eval"]
    shown = out.splitlines()
    assert shown[:3] == [
        f"finished in {duration(records[-1]['seconds'])}  {trained}",
        "step 2 of 2",
        f"loss, nats: training {last['loss']:.3f}  held-out {held_out:.3f} at step 2",
    ]
    assert f"depth: {last['depth']} of 4" in shown
    assert f"entropy: {last['router_entropy']:.2f} of {np.log(3):.2f} nats" in shown
    assert f"memory: {shorten(last['peak_memory_bytes'], 'B')}" in shown
    rates = [record["tokens_per_second"] for record in records if record["event"] == "train"]
    assert f"speed: {2 / sum(1 / rate for rate in rates):,.0f} tokens/s" in shown
    load = np.zeros((4, 3))
    for record in records:
        if record["event"] == "train":
            load[: len(record["load"])] += record["load"]
    load = load[load.sum(1) > 0]
    shares = (load / load.sum(1, keepdims=True)).mean(0)
    assert shown[-1] == "load of the blocks, %: " + " ".join(f"{100 * share:.0f}" for share in shares)

    code, out, err = lol("watch", tmp_path / "none")
    assert (code, out) == (2, "")
    assert "has no step yet: give the folder of a run" in err
    old = tmp_path / "old"
    shutil.copytree(trained, old)
    (old / "metrics.jsonl").write_text('{"event": "train", "step": 1, "loss": 2.0}\n')
    code, _, err = lol("watch", old)
    assert (code, "another version of lol" in err) == (2, True)


def test_time_left_is_what_the_remaining_depths_cost(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = json.loads((trained / "config.json").read_text()) | {"steps": 100}
    (run / "config.json").write_text(json.dumps(config))
    state = Follower(run).poll()
    assert (state.status, state.seconds_left, state.tokens_per_second) == ("waiting", None, None)
    assert state.plan is not None
    flops = 0
    for step in range(1, 31):
        flops += state.plan.flops(step - 1)
        # 64 tokens in as many milliseconds as the step costs MFLOP.
        rate = 64 / (state.plan.flops(step - 1) / 1e9)
        record = {"event": "train", "step": step, "loss": 1.0, "depth": 1, "router_entropy": 1.0, "flops": flops}
        state.add(record | {"load": [[step, 30 - step, 0]], "tokens_per_second": rate})
    assert state.status == "training"
    assert state.seconds_left == pytest.approx((state.plan.total_flops - flops) / 1e9)
    # The newest 20 steps: 11 to 30.
    assert state.load.tolist() == [[pytest.approx(20.5 / 30), pytest.approx(9.5 / 30), 0]]


def test_who_trains_in_a_folder_is_read_and_not_tried(tmp_path: Path) -> None:
    assert is_trained_in(tmp_path) is None
    lock = tmp_path / ".lock"
    for text, expected in [
        (f"process {os.getpid()} on {socket.gethostname()}", True),
        (f"process {2**22 + 1} on {socket.gethostname()}", False),
        (f"process {os.getpid()} on elsewhere.example", None),
        ("", None),
    ]:
        lock.write_text(text)
        assert is_trained_in(tmp_path) is expected


def test_the_chart_by_hand() -> None:
    falling = [(float(step), 10.0 - step) for step in range(1, 9)]
    curves = [(falling, ""), ([(8.0, 9.0), (8.0, float("nan"))], "")]
    lines = [line.plain for line in draw_chart(curves, 10, 4, plain=True)]
    assert lines == ["9 ..     o", "    ..    ", "      ..  ", "2       ..", "  1 step 8"]
    braille = draw_chart([(falling, "")], 10, 4, plain=False)
    dots = [[ord(sign) - 0x2800 for sign in line.plain[2:]] for line in braille[:4]]
    assert sum(bin(bits).count("1") for line in dots for bits in line) == 16
    assert dots[0][0] & 1
    assert dots[3][7] & 0x80
    assert draw_chart([([], "")], 12, 4, plain=True)[0].plain == "no loss yet"
    # A few early losses of a long run lie above the chart, and do not press the rest flat.
    long = [(float(step), 100.0 if step < 4 else 2.0 + step / 100) for step in range(1, 101)]
    assert draw_chart([(long, "")], 40, 4, plain=True)[0].plain.startswith("   3 ")


def test_the_load_by_hand_and_where_there_is_no_room() -> None:
    load = np.array([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.0, 0.0]])
    assert [line.plain for line in load_map(load, 20, 8, plain=False)] == [
        "     0  1  2  ", "  0  ███      ", "  1  ▒▒▒▒▒▒▒▒▒", "  2           ", "all  ███▂▂▂▂▂▂",
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    many = rng.dirichlet(np.ones(64), size=22)
    lines = [line.plain for line in load_map(many, 30, 8, plain=True)]
    assert len(lines) == 8
    assert {len(line) for line in lines} == {30}
    assert lines[1].startswith("  0-3  ")
    assert lines[-2].split()[0] == "19-21"
    assert load_map(np.zeros((0, 0)), 20, 8, plain=True)[0].plain == "no routed depth has run yet"
    assert sparkline([(float(step), step / 2) for step in range(8)], 8, plain=False) == "▁▂▃▄▅▆▇█"


def test_the_end_of_a_run_ends_it(lol: Lol, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    log = run / "metrics.jsonl"
    *steps, summary = log.read_text().splitlines(keepends=True)
    log.write_text("".join(steps))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    ending = threading.Timer(0.7, lambda: log.write_text("".join([*steps, summary])))
    ending.start()
    code, out, err = lol("watch", run)
    ending.join()
    assert (code, err) == (0, "")
    live, stays = out.split("\x1b[?1049l")
    assert "\x1b[?1049h" in live
    assert "finished" in stays
    assert "finished" not in live
    # What is finished, and what is to be drawn once, take no screen of their own.
    assert "\x1b[?1049" not in lol("watch", run)[1]
    log.write_text("".join(steps))
    code, out, _ = lol("watch", run, "--once")
    assert (code, "\x1b[?1049" in out, "step 2 of 2" in out) == (0, False, True)


@pytest.mark.slow
def test_a_run_on_a_terminal_from_before_its_start(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    watched = Session("watch", run)
    watched.wait_for("no step yet")
    run.mkdir()
    config = json.loads((trained / "config.json").read_text()) | {"steps": 40}
    (run / "config.json").write_text(json.dumps(config))
    (run / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    steps = [record for record in read_metrics(trained) if record["event"] == "train"]
    log = run / "metrics.jsonl"

    def grow(*numbers: int, loss: float) -> None:
        with log.open("a") as file:
            for step in numbers:
                record = steps[0] | {"step": step, "flops": step * steps[0]["flops"], "loss": loss}
                file.write(json.dumps(record) + "\n")

    grow(1, 2, 3, loss=4.125)
    came = watched.wait_for("training 4.125")
    assert "step 3 of 40, about " in came
    grow(4, loss=3.25)
    watched.wait_for("training 3.250")
    # Resumed from step 1.
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    grow(2, loss=3.875)
    came = watched.wait_for("training 3.875")
    assert "step 2 of 40" in came
    watched.resize(120, 40)
    came = watched.wait_for("─" * 100)
    (run / ".lock").write_text(f"process {2**22 + 1} on {socket.gethostname()}")
    watched.wait_for("lol train --resume goes on")
    watched.child.send_signal(2)
    came, code = watched.end()
    assert code == 130
    assert "training 3.875" in came.split("\x1b[?1049l")[1], "the newest state stays on the screen"
