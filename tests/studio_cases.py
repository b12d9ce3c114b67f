"""Asks the studio's application without a network, and reads its events."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lol.studio.app import Shown
from lol.studio.models import Models
from lol.studio.results import Results
from lol.studio.runs import Runs
from lol.studio.saved_paths import SavedPaths

SECRET = "what lies outside of the folders"


@dataclass(frozen=True)
class Client:
    """Asks one application."""

    app: Any

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await client.request(method, path, **request)

        return asyncio.run(send())

    def get(self, path: str, **request: Any) -> httpx.Response:
        return self.ask("GET", path, **request)

    def json(self, method: str, path: str, **request: Any) -> Any:
        """What is answered, which has to be without an error."""
        answer = self.ask(method, path, **request)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def message(self, method: str, path: str, status: int, **request: Any) -> str:
        """What an error says."""
        answer = self.ask(method, path, **request)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        return answer.json()["error"]["message"]

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """All events of a generation."""
        answer = self.ask("POST", "/api/generate", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return read_events(answer.text.splitlines())


def read_events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The data of events."""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def shown_in(place: Path, *models: Path) -> Shown:
    """What a server of this folder shows."""
    runs = Runs(place / "runs")
    return Shown(Models(models, runs), runs, Results(place / "results"), SavedPaths(place / "paths"))
