"""One thread that does the work of all requests, one after the other.

A model's cores are busy with one text already, so requests wait in a line; what a request gets can then never depend
on its neighbours. Work is any generator: the engine runs it item by item and hands the items to the event loop that
asked. It stops as soon as the asker is gone.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """So many requests wait already that another one has to come back later."""


class EngineClosed(Exception):
    """The engine ends and takes no more work."""


class _End:
    """Follows the last item."""


class Answer(AsyncIterator[T], Generic[T]):
    """The items of one piece of work, as they are made: `async with answer: async for item in answer: …`.

    Leaving the block, by its end or by any exception, ends the work.
    """

    def __init__(self, engine: "Engine", work: Iterator[T]):
        self._engine = engine
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[T | BaseException | _End] = asyncio.Queue()
        self._gone = threading.Event()

    async def __aenter__(self) -> "Answer[T]":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gone.set()
        self._engine._forget(self)

    def __aiter__(self) -> "Answer[T]":
        return self

    async def __anext__(self) -> T:
        item = await self._items.get()
        if isinstance(item, _End):
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def _put(self, item: "T | BaseException | _End") -> None:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            # The loop is closed, so nobody waits any more.
            self._gone.set()

    def _run(self) -> None:
        """In the engine's thread."""
        try:
            for item in self._work:
                if self._gone.is_set():
                    return
                self._put(item)
                if self._engine.closed:
                    raise EngineClosed("the server is shutting down")
            self._put(_End())
        except Exception as error:
            self._put(error)


class Engine:
    """The thread, and the line in front of it."""

    def __init__(self, queue: int):
        """
        Args:
            queue: So many pieces of work may wait, beside the one that runs.
        """
        self.queue = queue
        self.closed = False
        self._waiting: deque[Answer] = deque()
        self._running: Answer | None = None
        self._change = threading.Condition()
        # A daemon: the process may end within a pass.
        self._thread = threading.Thread(target=self._work, name="lol-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._running is not None)

    def submit(self, work: Iterator[T]) -> Answer[T]:
        """Put work into the line; from a coroutine.

        Raises:
            QueueFull: the line is full.
            EngineClosed: the engine ends.
        """
        answer = Answer(self, work)
        with self._change:
            if self.closed:
                raise EngineClosed("the server is shutting down")
            if self.num_waiting + self.num_running > self.queue:
                raise QueueFull(f"{len(self._waiting)} requests wait already: try again later")
            self._waiting.append(answer)
            self._change.notify()
        return answer

    def close(self) -> None:
        """Take no more work, and end what there is: its askers get `EngineClosed`."""
        with self._change:
            self.closed = True
            while self._waiting:
                self._waiting.popleft()._put(EngineClosed("the server is shutting down"))
            self._change.notify()

    def _forget(self, answer: Answer) -> None:
        with self._change:
            if answer in self._waiting:
                self._waiting.remove(answer)

    def _work(self) -> None:
        while True:
            with self._change:
                self._running = None
                while not self._waiting and not self.closed:
                    self._change.wait()
                if self.closed:
                    return
                self._running = self._waiting.popleft()
            self._running._run()
