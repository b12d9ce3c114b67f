"""The routes of `lol serve`."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from lol.serve.answers import EventStream, event, unless_hung_up
from lol.serve.completions import ModelNotFound, Piece, Plan, Served, gather, plan, run
from lol.serve.engine import Answer, Engine
from lol.serve.errors import add_error_handlers, error_body, status_of
from lol.serve.guard import Access, Guard
from lol.serve.protocol import FORMS, CompletionRequest


def make_app(served: Served, engine: Engine, access: Access) -> FastAPI:
    """The application; whoever runs it closes the engine."""
    # The pages that FastAPI would add load scripts from elsewhere.
    app = FastAPI(title="Library of Layers", openapi_url=None)
    app.add_middleware(Guard, access=access)
    add_error_handlers(app, FORMS)
    # Tokenizers are not made for two threads at once.
    reading = asyncio.Lock()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": engine.num_running, "waiting": engine.num_waiting}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(served)]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        if name != served.name:
            raise ModelNotFound(f"there is no model {name!r} here: ask for {served.name!r}")
        return _describe(served)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        async with reading:
            # A long prompt takes its time, and other answers stream meanwhile.
            ready = await asyncio.to_thread(plan, body, served)
        answer = engine.submit(run(ready))
        if body.stream:
            return EventStream(answer, _events(answer, ready))
        return await _whole_answer(request, answer, ready)

    return app


def _describe(served: Served) -> dict[str, Any]:
    config = served.model.config
    shape = ("num_experts", "num_routed_depths", "window_size", "window_stride", "core_attention", "routing")
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "library-of-layers",
        # What a client needs to know to write a path.
        "lol": {name: getattr(config, name) for name in shape},
    }


async def _whole_answer(request: Request, answer: Answer[Piece], ready: Plan) -> Response:
    """All pieces as one; given up when the client hangs up."""
    async with answer:
        pieces = await unless_hung_up(request, _collect(answer))
        return Response(gather(ready, pieces).to_json(), media_type="application/json")


async def _collect(answer: Answer[Piece]) -> list[Piece]:
    return [piece async for piece in answer if not piece.is_empty or piece.new_tokens]


async def _events(answer: Answer[Piece], ready: Plan) -> AsyncIterator[str]:
    new_tokens = 0
    try:
        async for piece in answer:
            new_tokens += piece.new_tokens
            if not piece.is_empty:
                yield event(ready.completion([piece.choice]).to_json())
        options = ready.request.stream_options
        if options is not None and options.include_usage:
            yield event(ready.completion([], ready.usage(new_tokens)).to_json())
        yield event("[DONE]")
    except Exception as error:
        # The status is out already, so the stream itself has to say it.
        yield event(json.dumps(error_body(*status_of(error))))
