"""The routes, and what becomes of errors."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from lol.decoding import ModelDiverged
from lol.errors import UserError
from lol.serve.completions import ModelNotFound, Piece, Plan, Served, gather, plan, run
from lol.serve.engine import Answer, Engine, EngineClosed, QueueFull
from lol.serve.errors import error_body, error_response
from lol.serve.guard import Access, Guard
from lol.serve.protocol import CompletionRequest, explain

_log = logging.getLogger(__name__)


def make_app(served: Served, engine: Engine, access: Access) -> FastAPI:
    """The application; whoever runs it closes the engine."""
    # The pages that FastAPI would add load scripts from elsewhere.
    app = FastAPI(title="Library of Layers", openapi_url=None)
    app.add_middleware(Guard, access=access)
    _add_error_handlers(app)
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
            return _AnswerStream(answer, ready)
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
        gone = asyncio.ensure_future(_hung_up(request))
        pieces = asyncio.ensure_future(_collect(answer))
        try:
            await asyncio.wait({gone, pieces}, return_when=asyncio.FIRST_COMPLETED)
            if not pieces.done():
                return Response(status_code=HTTPStatus.BAD_REQUEST)
            return Response(gather(ready, pieces.result()).to_json(), media_type="application/json")
        finally:
            gone.cancel()
            pieces.cancel()


async def _collect(answer: Answer[Piece]) -> list[Piece]:
    return [piece async for piece in answer if not piece.is_empty or piece.new_tokens]


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _AnswerStream(StreamingResponse):
    """The pieces as server-sent events; the work ends with the response, however that ends."""

    def __init__(self, answer: Answer[Piece], ready: Plan):
        super().__init__(_events(answer, ready), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.answer:
            await super().__call__(scope, receive, send)


async def _events(answer: Answer[Piece], ready: Plan) -> AsyncIterator[str]:
    new_tokens = 0
    try:
        async for piece in answer:
            new_tokens += piece.new_tokens
            if not piece.is_empty:
                yield f"data: {ready.completion([piece.choice]).to_json()}\n\n"
        options = ready.request.stream_options
        if options is not None and options.include_usage:
            yield f"data: {ready.completion([], ready.usage(new_tokens)).to_json()}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:
        # The status is out already, so the stream itself has to say it.
        yield f"data: {json.dumps(error_body(*_status_of(error)))}\n\n"


def _status_of(error: Exception) -> tuple[int, str]:
    """Status and message of what may go wrong while a text is made."""
    if isinstance(error, EngineClosed):
        return HTTPStatus.SERVICE_UNAVAILABLE, str(error)
    if isinstance(error, ModelDiverged):
        return HTTPStatus.INTERNAL_SERVER_ERROR, str(error)
    _log.error("a request failed", exc_info=error)
    return HTTPStatus.INTERNAL_SERVER_ERROR, "internal error: the server's log says more"


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        message, param = explain(error.errors())
        return error_response(HTTPStatus.BAD_REQUEST, message, param)

    @app.exception_handler(UserError)
    async def refused(_request: Request, error: UserError) -> Response:
        return error_response(HTTPStatus.BAD_REQUEST, str(error))

    @app.exception_handler(ModelNotFound)
    async def unknown_model(_request: Request, error: ModelNotFound) -> Response:
        return error_response(HTTPStatus.NOT_FOUND, str(error), "model", "model_not_found")

    @app.exception_handler(QueueFull)
    async def full(_request: Request, error: QueueFull) -> Response:
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers={"Retry-After": "1"})

    @app.exception_handler(EngineClosed)
    @app.exception_handler(ModelDiverged)
    async def failed(_request: Request, error: Exception) -> Response:
        return error_response(*_status_of(error))

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again behind this answer, and uvicorn logs it.
        return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error: the server's log says more")
