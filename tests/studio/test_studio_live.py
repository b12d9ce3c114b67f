"""`lol studio` as a process: clients that leave, many at once, the command's mistakes, and how it ends."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from small_run import Lol, environment
from studio_cases import read_events

LONG = {"model": "model:loud", "text": "router", "branches": [{}, {}], "max_new_tokens": 512, "temperature": 0}


def wait_until_idle(studio: httpx.Client) -> float:
    """Seconds until nothing runs or waits."""
    began = time.monotonic()
    while (state := studio.get("/health").json())["running"] or state["waiting"]:
        assert time.monotonic() - began < 30, state
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_client_that_leaves_stops_its_work(studio: httpx.Client) -> None:
    with studio.stream("POST", "/api/generate", json=LONG) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        assert first.startswith("data: ")
        whole = time.monotonic()
        with pytest.raises(httpx.ReadTimeout):
            # It waits in the line, and leaves it.
            studio.post("/api/trace", json={"model": "model:loud", "text": "x"}, timeout=0.3)
        assert studio.get("/health").json() == {"status": "ok", "running": 1, "waiting": 0}
    wait_until_idle(studio)
    left = time.monotonic() - whole
    began = time.monotonic()
    events = read_events(studio.post("/api/generate", json=LONG).text.splitlines())
    assert events[-1] == {"type": "done"}
    # Less than half of what the whole takes, most of it the wait above.
    assert left < max(1.0, 0.5 * (time.monotonic() - began)), left


@pytest.mark.slow
def test_fifty_clients(studio: httpx.Client) -> None:
    """Everybody gets all of an answer, the same as alone, or is told to come back; meanwhile others are answered."""
    body = LONG | {"max_new_tokens": 12, "branches": [{}]}
    alone = studio.post("/api/generate", json=body).text
    waits = []

    def ask(_: int) -> tuple[int, str, str | None]:
        answer = httpx.post(f"{studio.base_url}api/generate", json=body, timeout=60)
        return answer.status_code, answer.text, answer.headers.get("retry-after")

    with ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(ask, number) for number in range(50)]
        while not all(one.done() for one in asked):
            began = time.monotonic()
            assert studio.get("/api/about").status_code == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.05)
        answers = [one.result() for one in asked]
    statuses = [status for status, _, _ in answers]
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= 33
    for status, text, again in answers:
        if status == 200:
            assert text == alone
        else:
            assert (again, "try again later" in text) == ("1", True)
    assert len(waits) > 2
    assert sorted(waits)[len(waits) // 2] < 1.0
    wait_until_idle(studio)


@pytest.mark.slow
def test_ctrl_c_ends_it_in_the_middle_of_an_answer(served_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lol", "studio", "--model", str(served_folder), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(
        command,
        env=environment() | {"LOL_TOKEN": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.endswith("/#token=… for other machines too, with the token (Ctrl-C ends it)\n")
        address = line.split()[3].replace("0.0.0.0", "127.0.0.1").removesuffix("/#token=…")
        assert httpx.get(f"{address}/api/about").status_code == 401
        headers = {"authorization": "Bearer secret"}
        about = httpx.get(f"{address}/api/about", headers=headers).json()
        assert (about["runs"], about["results"], len(about["models"])) == (False, False, 1)
        with httpx.stream("POST", f"{address}/api/generate", json=LONG, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert "the server is shutting down" in rest[-1]
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
        process.communicate()


def test_what_it_refuses(lol: Lol, served_folder: Path, tmp_path: Path) -> None:
    def refused(message: str, *flags: object) -> None:
        code, out, err = lol("studio", "--port", "0", *flags)
        assert (code, out) == (2, "")
        assert message in err
        assert "Traceback" not in err

    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text('{"model_type": "llama"}')
    refused("holds no model", "--model", tmp_path)
    refused("holds a model of type 'llama'", "--model", tmp_path / "half")
    refused("--runs nowhere: there is no such folder", "--runs", "nowhere")
    refused("--results nowhere: there is no such folder", "--results", "nowhere")
    refused("lets other machines in", "--host", "0.0.0.0")
    refused("the token is empty", "--token", "two words")
    refused("--port 70000 does not exist", "--port", "70000", "--model", served_folder)


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra(lol: Lol, served_folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    own = ("lol.serve.", "lol.studio.")
    for name in [name for name in sys.modules if name.startswith(own) or name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = lol("studio", "--model", served_folder)
    assert (code, out) == (2, "")
    assert err == f"lol: lol studio needs {missing}, which is not installed: pip install library-of-layers[studio]\n"
    assert lol("studio", "--help")[0] == 0
