"""Who is answered, what is too much, and what goes with every answer."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lol.decoding import Decoding, ModelDiverged
from lol.serve.engine import Engine
from lol.serve.guard import MAX_BODY_BYTES, Access
from lol.studio import limits
from lol.studio.app import make_app
from studio_cases import Client, shown_in

TRACE = {"model": "model:loud", "text": "router"}


def routes(client: Client) -> list[tuple[str, str]]:
    """Every route of the API, with some name in place of each parameter."""
    paths = client.json("GET", "/api/openapi.json")["paths"]
    named = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [(method, path.replace("{name}", "toy").replace("{file}", "forming.svg")) for method, path in named]


def test_every_route_wants_the_token_and_the_page_s_files_do_not(
    client: Client, make_client: Callable[..., Client], served_folder: Path
) -> None:
    locked = make_client(served_folder, access=Access("127.0.0.1", "secret", guarded="/api"))
    all_routes = [*routes(client), ("GET", "/api/openapi.json"), ("GET", "/api"), ("GET", "/api/none")]
    assert len(all_routes) > 14
    for method, path in all_routes:
        if path == "/health":
            continue
        for headers in ({}, {"authorization": "Bearer secrets"}, {"authorization": "secret"}):
            answer = locked.ask(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error"), path
        assert locked.ask(method, path, headers={"authorization": "Bearer secret"}).status_code != 401
    assert locked.get("/").status_code == 200
    assert locked.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    # What the router would take for a path of the API, the guard does too.
    for path in ("//api/about", "/./api/about", "/x/../api/about", "/API/about", "/%61pi/about"):
        answer = locked.get(path)
        assert answer.status_code in (401, 404), path


def test_other_sites_and_names_are_refused(client: Client) -> None:
    for method, path in [*routes(client), ("GET", "/"), ("GET", "/assets/x.js")]:
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
            answer = client.ask(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    answer = client.ask("OPTIONS", "/api/trace", headers={"access-control-request-method": "POST"})
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_headers(client: Client) -> None:
    page = client.get("/")
    assert (page.status_code, page.headers["cache-control"]) == (200, "no-cache")
    assert page.headers["content-type"].startswith("text/html")
    for answer in (page, client.get("/api/about"), client.get("/none"), client.get("/", headers={"host": "evil"})):
        assert answer.headers["content-security-policy"] == (
            "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_assets_are_kept_by_the_browser(client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/a-1.js").write_text("0")
    (tmp_path / "index.html").write_text("x")
    mount = client.app.routes[-1].app
    monkeypatch.setattr(mount, "all_directories", [tmp_path])
    answer = client.get("/assets/a-1.js")
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-type"].startswith("text/javascript")
    assert client.get("/").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("trace", {"text": "x" * (limits.MAX_TEXT_CHARACTERS + 1)}, "text: string should have at most"),
        ("trace", {"text": "é" * 4096}, "this server reads at most 4,096"),
        ("trace", {"text": "\ud800"}, "unicode string"),
        ("trace", {"path": [0, 1]}, "path has 2 depths, but 4 are run"),
        ("trace", {"path": []}, "path must be null, a list with one block per depth"),
        ("trace", {"path": [0, 1, 2, 3]}, "names block 3"),
        ("trace", {"path": [[0], [1], [2], [-2]]}, "names block -2"),
        ("trace", {"path": [[0], 1, 2, 0]}, "path must be null, a list"),
        ("trace", {"path": [[0] * 8193] * 4}, "path must be null, a list"),
        ("trace", {"path": [0, 1, 2, 0], "path_weight": 1e40}, "path_weight must be null"),
        ("trace", {"more": 1}, "more is no field"),
        ("generate", {"branches": []}, "branches"),
        ("generate", {"branches": [{}] * 5}, "branches"),
        ("generate", {"branches": [{"path": [0]}]}, "path has 1 depths"),
        ("generate", {"max_new_tokens": 513}, "max_new_tokens"),
        ("generate", {"max_new_tokens": 0}, "max_new_tokens"),
        ("generate", {"temperature": -1}, "temperature"),
        ("generate", {"top_k": 0}, "top_k"),
        ("generate", {"top_p": 1.1}, "top_p"),
        ("generate", {"top": 21}, "top"),
        ("generate", {"seed": -1}, "seed"),
        ("layout", {"num_tokens": 4097}, "num_tokens"),
        ("layout", {"num_depths": 65}, "num_depths"),
        ("layout", {"window_size": 0}, "window_size"),
    ],
)
def test_what_is_out_of_bounds(client: Client, path: str, changes: dict[str, Any], message: str) -> None:
    bodies = {
        "trace": TRACE,
        "generate": TRACE | {"branches": [{}], "max_new_tokens": 1},
        "layout": {"num_tokens": 5, "window_size": 2, "window_stride": 1, "num_depths": 2},
    }
    # httpx would not write half a surrogate pair.
    content = json_with_escapes(bodies[path] | changes)
    headers = {"content-type": "application/json"}
    assert message in client.message("POST", f"/api/{path}", 400, content=content, headers=headers)
    assert client.ask("POST", f"/api/{path}", json=bodies[path]).status_code == 200


def json_with_escapes(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def test_a_body_that_is_too_long(client: Client) -> None:
    answer = client.ask("POST", "/api/trace", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413


@pytest.mark.slow
def test_the_longest_layout_and_text(client: Client) -> None:
    body = {"num_tokens": 4096, "window_size": 1, "window_stride": 1, "num_depths": 64, "token": 4095}
    layout = client.json("POST", "/api/layout", json=body)
    assert sum(len(depth["windows"]) for depth in layout["depths"]) == 64 * 4096
    trace = client.json("POST", "/api/trace", json=TRACE | {"text": "a" * 4095})
    assert len(trace["tokens"]) == 4096


def test_a_full_line(place: Path, served_folder: Path) -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    async def test() -> None:
        engine = Engine(queue=0)
        app = make_app(shown_in(place, served_folder), engine, Access(guarded="/api"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            async with engine.submit(endless()):
                for path, rest in (("trace", {}), ("generate", {"branches": [{}]})):
                    answer = await client.post(f"/api/{path}", json=TRACE | rest)
                    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert (await client.get("/api/about")).status_code == 200
                assert (await client.get("/health")).json()["running"] == 1
            while engine.num_running:
                await asyncio.sleep(0.01)
            assert (await client.post("/api/trace", json=TRACE)).status_code == 200
            engine.close()
            assert (await client.post("/api/trace", json=TRACE)).status_code == 503

    asyncio.run(test())


def test_a_model_that_has_diverged(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found while a text is written, the stream says it; found in the given text, too, for it has begun."""

    def diverged(*_: Any, **__: Any) -> Any:
        raise ModelDiverged("take an earlier checkpoint")

    monkeypatch.setattr(Decoding, "_run", diverged)
    (event,) = client.events(**TRACE, branches=[{}])
    assert event == {"type": "error", "message": "take an earlier checkpoint"}
    assert "earlier" in client.message("POST", "/api/trace", 500, json=TRACE)

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(Decoding, "_run", broken)
    (event,) = client.events(**TRACE, branches=[{}])
    assert event == {"type": "error", "message": "internal error: the server's log says more"}
