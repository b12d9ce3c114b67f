"""The routes of `lol studio`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import torch
from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from lol.decoding import Sampling
from lol.errors import UserError
from lol.paths.saved import SavedPath
from lol.serve.answers import EventStream, event, unless_hung_up
from lol.serve.engine import Answer, Engine
from lol.serve.errors import add_error_handlers, status_of
from lol.serve.guard import Access, Guard
from lol.studio import protocol
from lol.studio.branches import Branch, ErrorEvent, continue_text
from lol.studio.dial import Dial, turn_dial
from lol.studio.layout import Layout, lay_out
from lol.studio.models import Model, Models
from lol.studio.page_files import PageFiles, SafeHeaders
from lol.studio.results import ResultList, Results, ResultsOf
from lol.studio.runs import RunDetail, Runs
from lol.studio.saved_paths import SavedPaths
from lol.studio.trace import Trace, trace

T = TypeVar("T")
VERSION = version("library-of-layers")


@dataclass(frozen=True)
class Shown:
    """What this server shows."""

    models: Models
    runs: Runs
    results: Results
    paths: SavedPaths


def make_app(shown: Shown, engine: Engine, access: Access) -> FastAPI:
    """The application; whoever runs it closes the engine."""
    # The pages that FastAPI would add load scripts from elsewhere.
    app = FastAPI(
        title="lol studio",
        version=VERSION,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        responses=protocol.EXPLAINED,
    )
    app.add_middleware(Guard, access=access)
    app.add_middleware(SafeHeaders)
    add_error_handlers(app, protocol.FORMS)
    _add_model_routes(app, shown.models, engine)
    _add_number_routes(app)
    _add_run_routes(app, shown)
    _add_result_routes(app, shown.results)
    _add_path_routes(app, shown.paths)

    @app.get("/health", response_model=protocol.Health)
    async def health() -> Response:
        return _json(protocol.Health("ok", engine.num_running, engine.num_waiting))

    app.mount("/", PageFiles())
    return app


def _add_model_routes(app: FastAPI, models: Models, engine: Engine) -> None:
    @app.get("/api/model", response_model=Model)
    async def model(id_: Annotated[str, Query(alias="id", max_length=1000)]) -> Response:
        return await _in_thread(models.describe, id_)

    @app.post("/api/trace", response_model=Trace)
    async def trace_text(request: Request, body: protocol.TraceRequest) -> Response:
        def work() -> Iterator[Any]:
            loaded = models.load(body.model)
            for found in trace(loaded, body.text, body.path, body.path_weight):
                yield None if found is None else _json(found)

        async with engine.submit(work()) as answer:
            return await unless_hung_up(request, _last(answer))

    @app.post(
        "/api/generate",
        response_class=Response,
        responses={200: {"content": {"text/event-stream": {}}, "description": "Events, a line of JSON each."}},
    )
    async def generate(request: Request, body: protocol.GenerateRequest) -> Response:
        sampling = Sampling(body.max_new_tokens, body.temperature, body.top_k, body.top_p)
        branches = [Branch(branch.path, branch.path_weight) for branch in body.branches]

        def work() -> Iterator[str | None]:
            loaded = models.load(body.model)
            for told in continue_text(loaded, body.text, branches, sampling, body.seed, body.top):
                yield None if told is None else event(_dump(told).decode())

        async with AsyncExitStack() as until_it_streams:
            answer = await until_it_streams.enter_async_context(engine.submit(work()))
            # What is refused is so with its own status: the first item comes when nothing can be refused any more.
            await unless_hung_up(request, anext(answer))
            until_it_streams.pop_all()
        return EventStream(answer, _events(answer))


async def _last(answer: Answer[T]) -> T:
    *_, last = [item async for item in answer]
    return last


async def _events(answer: Answer[str | None]) -> AsyncIterator[str]:
    try:
        async for told in answer:
            if told is not None:
                yield told
    except Exception as error:
        # The status is out already, so the stream itself has to say it.
        message = str(error) if isinstance(error, UserError) else status_of(error)[1]
        yield event(_dump(ErrorEvent(message)).decode())


def _add_number_routes(app: FastAPI) -> None:
    @app.post("/api/layout", response_model=Layout)
    async def layout(body: protocol.LayoutRequest) -> Response:
        return await _in_thread(lambda: lay_out(**body.model_dump()))

    @app.post("/api/dial", response_model=Dial)
    async def dial(body: protocol.DialRequest) -> Response:
        fields = body.model_dump(exclude={"context", "dtype"})
        return await _in_thread(turn_dial, fields, body.context, getattr(torch, body.dtype))


def _add_run_routes(app: FastAPI, shown: Shown) -> None:
    @app.get("/api/about", response_model=protocol.About)
    async def about() -> Response:
        def say() -> protocol.About:
            there = (shown.runs.root is not None, shown.results.root is not None)
            return protocol.About(VERSION, shown.models.listed(), *there, str(shown.paths.folder), protocol.Limits())

        return await _in_thread(say)

    @app.get("/api/runs", response_model=protocol.RunList)
    async def runs() -> Response:
        return await _in_thread(lambda: protocol.RunList(shown.runs.summaries()))

    @app.get("/api/runs/{name:path}", response_model=RunDetail)
    async def run(name: str, after: Annotated[int | None, Query(ge=0, lt=2**53)] = None) -> Response:
        return await _in_thread(shown.runs.detail, name, after)


def _add_result_routes(app: FastAPI, results: Results) -> None:
    @app.get("/api/results", response_model=ResultList)
    async def listed() -> Response:
        return await _in_thread(results.listed)

    @app.get("/api/results/{name}", response_model=ResultsOf)
    async def results_of(name: str) -> Response:
        return await _in_thread(results.read, name)

    @app.get(
        "/api/results/{name}/figures/{file}",
        response_class=Response,
        responses={200: {"content": {"image/svg+xml": {}, "image/png": {}}, "description": "The figure."}},
    )
    async def figure(name: str, file: str) -> Response:
        content, kind = await asyncio.to_thread(results.figure, name, file)
        # A picture may hold scripts and links; nothing of it is run, and nothing fetched.
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
        return Response(content, media_type=kind, headers={"Content-Security-Policy": policy})


def _add_path_routes(app: FastAPI, paths: SavedPaths) -> None:
    @app.get("/api/paths", response_model=protocol.PathList)
    async def listed() -> Response:
        return await _in_thread(lambda: protocol.PathList(paths.listed()))

    @app.put("/api/paths/{name}", response_model=SavedPath)
    async def save(name: str, body: protocol.SavedPathRequest, overwrite: bool = False) -> Response:
        if name != body.name:
            raise UserError(f"the address names {name!r}, but the body {body.name!r}: give the same name in both")
        return await _in_thread(paths.save, SavedPath(**body.model_dump()), overwrite)

    @app.delete("/api/paths/{name}", response_model=protocol.Deleted)
    async def delete(name: str) -> Response:
        await asyncio.to_thread(paths.delete, name)
        return _json(protocol.Deleted(name))


async def _in_thread(function: Callable[..., Any], *given: Any) -> Response:
    """What a function returns, as JSON; it reads files or counts, and others are answered meanwhile."""
    return await asyncio.to_thread(lambda: _json(function(*given)))


def _json(value: Any) -> Response:
    return Response(_dump(value), media_type="application/json")


def _dump(value: Any) -> bytes:
    return _adapter(type(value)).dump_json(value)


@cache
def _adapter(kind: type) -> TypeAdapter:
    return TypeAdapter(kind)
