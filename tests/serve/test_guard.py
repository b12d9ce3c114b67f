"""Who is answered: names, origins, tokens, sizes, and the line's end, on the whole application without a network."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from starlette.datastructures import Headers

from lol.serve.app import make_app
from lol.serve.completions import Served
from lol.serve.engine import Engine
from lol.serve.guard import MAX_BODY_BYTES, Access

ME = {"host": "127.0.0.1:8000"}
BODY = {"prompt": "router", "max_tokens": 2}


def ask(
    served: Served,
    access: Access,
    method: str,
    path: str,
    engine: Engine | None = None,
    **request: Any,
) -> httpx.Response:
    async def send() -> httpx.Response:
        its = engine or Engine(queue=1)
        transport = httpx.ASGITransport(make_app(served, its, access), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            answer = await client.request(method, path, **request)
        its.close()
        return answer

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("host", "names", "others"),
    [
        (
            "127.0.0.1",
            ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:9", "[::1]:8000", "127.0.0.5"],
            [
                "",
                "evil.example",
                "evil.example:8000",
                "192.168.1.5",
                "localhost.evil.example",
                "a@localhost",
                "[::1",
                "0.0.0.0",
            ],
        ),
        (
            "box.lan",
            ["box.lan:8000", "localhost", "192.168.1.5", socket.gethostname()],
            ["evil.example", "box.lan.evil"],
        ),
        ("0.0.0.0", ["192.168.1.5:8000", "[fe80::1]:8000", "localhost"], ["evil.example"]),
    ],
)
def test_names_of_the_server(host: str, names: list[str], others: list[str]) -> None:
    access = Access(host, token="secret")
    assert [name for name in names if not access.is_own_name(name)] == []
    assert [name for name in others if access.is_own_name(name)] == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, None),
        ({"origin": "http://127.0.0.1:8000"}, None),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9000"}, 403),
        ({"origin": "http://localhost:8000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403),
    ],
)
def test_pages_of_other_sites(headers: dict[str, str], status: int | None) -> None:
    refusal = Access().refusal("/v1/models", Headers(ME | headers))
    assert (refusal and refusal[0]) == status


@pytest.mark.parametrize(
    ("header", "passes"),
    [
        ("Bearer secret", True),
        ("bearer secret", True),
        ("Bearer secrets", False),
        ("Bearer secre", False),
        ("Bearer ", False),
        ("Basic secret", False),
        ("secret", False),
        ("Bearer s\u00e9cret", False),
        (None, False),
    ],
)
def test_the_token(header: str | None, passes: bool) -> None:
    access = Access("127.0.0.1", token="secret")
    headers = Headers(ME if header is None else ME | {"authorization": header})
    refusal = access.refusal("/v1/completions", headers)
    assert (refusal is None) == passes
    assert passes or refusal[0] == 401
    assert access.refusal("/health", Headers(ME)) is None


def test_every_route_is_guarded(served: Served) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/loud"), ("POST", "/v1/completions"), ("GET", "/x")):
        answer = ask(served, Access(token="secret"), method, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            answer = ask(served, Access(), method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    answer = ask(served, Access(token="secret"), "GET", "/v1/models", headers={"authorization": "Bearer secret"})
    assert answer.json()["data"][0]["id"] == "loud"
    # A browser that asks whether another site's page may post is not told that it may.
    answer = ask(served, Access(), "OPTIONS", "/v1/completions", headers={"access-control-request-method": "POST"})
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_bodies_that_are_too_long(served: Served) -> None:
    def chunks() -> Any:
        async def parts() -> Any:
            for _ in range(5):
                yield b" " * 2**20

        return parts()

    for content in (b" " * (MAX_BODY_BYTES + 1), chunks()):
        answer = ask(served, Access(), "POST", "/v1/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
        assert f"more than {MAX_BODY_BYTES} bytes" in answer.json()["error"]["message"]


def test_a_full_line(served: Served) -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    async def test() -> None:
        engine = Engine(queue=0)
        transport = httpx.ASGITransport(make_app(served, engine, Access()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            async with engine.submit(endless()):
                for stream in (False, True):
                    answer = await client.post("/v1/completions", json=BODY | {"stream": stream})
                    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                    assert answer.json()["error"]["type"] == "server_error"
            while engine.num_running:
                await asyncio.sleep(0.01)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            engine.close()
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is shutting down")

    asyncio.run(test())


def test_a_model_that_has_diverged_is_no_mistake_of_the_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    head = served.model.lm_head.weight
    monkeypatch.setattr(head, "data", torch.full_like(head, float("nan")))
    answer = ask(served, Access(), "POST", "/v1/completions", json=BODY)
    assert answer.status_code == 500
    assert "take an earlier checkpoint" in answer.json()["error"]["message"]
    answer = ask(served, Access(), "POST", "/v1/completions", json=BODY | {"stream": True})
    assert answer.status_code == 200
    assert '"type": "server_error"' in answer.text
    assert "[DONE]" not in answer.text


def test_what_nobody_foresaw_is_said_without_its_details(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(served.model.model, "forward", broken)
    for stream in (False, True):
        answer = ask(served, Access(), "POST", "/v1/completions", json=BODY | {"stream": stream})
        assert "internal error: the server's log says more" in answer.text
        assert "a secret" not in answer.text
    assert "a secret" in caplog.text
