"""Errors in OpenAI's form, so that its clients raise the exceptions that their users know, and what makes which."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from lol.decoding import ModelDiverged
from lol.errors import UserError
from lol.serve.answers import HungUp
from lol.serve.engine import EngineClosed, QueueFull

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
}
_INTERNAL = "internal error: the server's log says more"

_log = logging.getLogger(__name__)


class NotFound(UserError):
    """A request names what is not there; `param` is the field that does, `code` what is missing."""

    param: str | None = None
    code: str | None = None


class Conflict(UserError):
    """A request would overwrite what is there."""


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "server_error" if status >= 500 else _TYPES.get(HTTPStatus(status), "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A response that carries one."""
    return JSONResponse(error_body(status, message, param, code), int(status), dict(headers or {}))


def status_of(error: Exception) -> tuple[int, str]:
    """Status and message of what may go wrong while a text is made."""
    if isinstance(error, EngineClosed):
        return HTTPStatus.SERVICE_UNAVAILABLE, str(error)
    if isinstance(error, ModelDiverged):
        return HTTPStatus.INTERNAL_SERVER_ERROR, str(error)
    _log.error("a request failed", exc_info=error)
    return HTTPStatus.INTERNAL_SERVER_ERROR, _INTERNAL


def add_error_handlers(app: FastAPI, forms: Mapping[str, str]) -> None:
    """Answer every error in this form.

    Args:
        app: The application.
        forms: What fields of several forms take, in place of one message per form.
    """

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        message, param = explain(error.errors(), forms)
        return error_response(HTTPStatus.BAD_REQUEST, message, param)

    @app.exception_handler(UserError)
    async def refused(_request: Request, error: UserError) -> Response:
        return error_response(HTTPStatus.BAD_REQUEST, str(error))

    @app.exception_handler(NotFound)
    async def missing(_request: Request, error: NotFound) -> Response:
        return error_response(HTTPStatus.NOT_FOUND, str(error), error.param, error.code)

    @app.exception_handler(Conflict)
    async def conflict(_request: Request, error: Conflict) -> Response:
        return error_response(HTTPStatus.CONFLICT, str(error))

    @app.exception_handler(QueueFull)
    async def full(_request: Request, error: QueueFull) -> Response:
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers={"Retry-After": "1"})

    @app.exception_handler(EngineClosed)
    @app.exception_handler(ModelDiverged)
    async def failed(_request: Request, error: Exception) -> Response:
        return error_response(*status_of(error))

    @app.exception_handler(HungUp)
    async def gone(_request: Request, _error: HungUp) -> Response:
        return error_response(HTTPStatus.BAD_REQUEST, "the client hung up")

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again behind this answer, and uvicorn logs it.
        return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, _INTERNAL)


def explain(errors: Sequence[Any], forms: Mapping[str, str]) -> tuple[str, str | None]:
    """One message and the field it is about, of what pydantic says of a request."""
    # Of the forms that a field may have, the one that came closest.
    first = next((error for error in errors if error["type"] == "value_error"), errors[0])
    _, *place = first["loc"]
    name = str(place[0]) if place else None
    if first["type"] == "json_invalid":
        return f"the body is not JSON ({first.get('ctx', {}).get('error', first['msg'])}): send a JSON object", None
    if name is None:
        cause = first.get("ctx", {}).get("error")
        return str(cause) if isinstance(cause, UserError) else "the body must be a JSON object", None
    if first["type"] == "value_error":
        return str(first["ctx"]["error"]), name
    if first["type"] == "extra_forbidden" and len(place) == 1:
        return f"{name} is no field of this endpoint: leave it out", name
    if name in forms:
        return forms[name], name
    message = first["msg"]
    return f"{'.'.join(map(str, place))}: {message[:1].lower()}{message[1:]}", name
