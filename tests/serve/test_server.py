"""`lol serve` as a command: how it begins, how it ends, and what it refuses to begin with."""

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from small_run import Lol, environment


@pytest.mark.slow
def test_ctrl_c_ends_it_even_in_the_middle_of_an_answer(served_folder: Path) -> None:
    command = [sys.executable, "-m", "lol", "serve", "--model", str(served_folder), "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(
        command,
        env=environment() | {"LOL_TOKEN": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving loud at http://0.0.0.0:")
        assert line.endswith("/v1 (Ctrl-C ends it)\n")
        address = line.split()[3].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{address}/models").status_code == 401
        body = {"prompt": "router", "max_tokens": 4000, "n": 50, "temperature": 2, "stream": True}
        headers = {"authorization": "Bearer secret"}
        with httpx.stream("POST", f"{address}/completions", json=body, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert "the server is shutting down" in rest[-1]
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
        process.communicate()


def test_what_it_refuses(lol: Lol, served_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, *flags: object) -> None:
        code, out, err = lol("serve", "--model", served_folder, "--port", "0", *flags)
        assert (code, out) == (2, "")
        assert message in err
        assert "Traceback" not in err

    refused("there is no such folder", "--model", tmp_path / "nowhere")
    refused("holds no model", "--model", tmp_path)
    refused("lets other machines in: set a token in LOL_TOKEN", "--host", "0.0.0.0")
    refused("lets other machines in: set a token in LOL_TOKEN", "--host", "::")
    refused("--host 8.8.8.8.8 is not known", "--host", "8.8.8.8.8")
    refused("cannot listen at 192.0.2.1", "--host", "192.0.2.1", "--token", "x")
    refused("--port 70000 does not exist", "--port", "70000")
    refused("--max-new-tokens is 0: give at least 1", "--max-new-tokens", "0")
    refused("--queue is -1: give at least 0", "--queue", "-1")
    for token in ("", "two words", "caf\u00e9"):
        refused("the token is empty or holds other than", "--token", token)
    monkeypatch.setenv("LOL_TOKEN", "two words")
    refused("the token is empty or holds other than")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("LOL_TOKEN", "")
        refused(f"port {port} of 127.0.0.1 is taken: choose another --port", "--port", port)


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra(lol: Lol, served_folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name.startswith("lol.serve.") or name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = lol("serve", "--model", served_folder)
    assert (code, out) == (2, "")
    assert err == f"lol: lol serve needs {missing}, which is not installed: pip install library-of-layers[serve]\n"
    assert lol("serve", "--help")[0] == 0


def test_nothing_is_left_running_here() -> None:
    assert [thread.name for thread in threading.enumerate() if thread.name == "lol-engine"] == []
