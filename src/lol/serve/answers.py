"""An answer on its way to the client: whole, or as server-sent events. The work ends when the client hangs up."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lol.serve.engine import Answer

T = TypeVar("T")


class HungUp(Exception):
    """The client is gone, and nobody reads what would be answered."""


async def unless_hung_up(request: Request, wanted: Awaitable[T]) -> T:
    """The result of an awaitable, which is cancelled when the client goes first.

    Raises:
        HungUp: it has gone.
    """
    gone = asyncio.ensure_future(_hung_up(request))
    result = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({gone, result}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise HungUp
        return result.result()
    finally:
        gone.cancel()
        result.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events made of an answer; its work ends with the response, however that ends."""

    def __init__(self, answer: Answer, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.answer:
            await super().__call__(scope, receive, send)


def event(data: str) -> str:
    """An event that carries a line of data."""
    return f"data: {data}\n\n"
