"""The engine: one thread, a line that ends, and work that stops when nobody waits for it."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from lol.serve.engine import Engine, EngineClosed, QueueFull


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, timeout=20))


class Endless:
    """Work that counts its items and never ends by itself."""

    def __init__(self) -> None:
        self.made = 0
        self.thread = ""

    def __iter__(self) -> Iterator[int]:
        self.thread = threading.current_thread().name
        while True:
            self.made += 1
            time.sleep(0.001)
            yield self.made


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_work_is_done_in_order_and_one_at_a_time() -> None:
    async def test() -> None:
        engine = Engine(queue=8)
        log: list[str] = []

        def work(name: str) -> Iterator[str]:
            for number in range(3):
                log.append(f"{name}{number}")
                yield log[-1]

        async def ask(name: str) -> list[str]:
            async with engine.submit(work(name)) as answer:
                return [item async for item in answer]

        answers = await asyncio.gather(*(ask(name) for name in "abcd"))
        assert answers == [[f"{name}{number}" for number in range(3)] for name in "abcd"]
        assert log == [item for answer in answers for item in answer]
        engine.close()

    run(test())


def test_work_stops_when_its_asker_leaves() -> None:
    async def test() -> None:
        engine, work = Engine(queue=1), Endless()
        async with engine.submit(iter(work)) as answer:
            async for item in answer:
                if item == 3:
                    break
        await until(lambda: engine.num_running == 0)
        made = work.made
        assert work.thread == "lol-engine"
        await asyncio.sleep(0.05)
        assert work.made == made
        engine.close()

    run(test())


def test_the_line_ends_and_who_leaves_it_makes_room() -> None:
    async def test() -> None:
        engine, first, second, third = Engine(queue=1), Endless(), Endless(), Endless()
        async with engine.submit(iter(first)) as running:
            # The thread may or may not have begun: one runs and one waits in either case.
            waiting = engine.submit(iter(second))
            assert await anext(running) == 1
            assert (engine.num_running, engine.num_waiting) == (1, 1)
            with pytest.raises(QueueFull, match="1 requests wait already"):
                engine.submit(iter(third))
            async with waiting:
                pass
            assert engine.num_waiting == 0
            async with engine.submit(iter(third)):
                assert engine.num_waiting == 1
        await until(lambda: engine.num_running == 0)
        assert (second.made, third.made) == (0, 0)
        engine.close()

    run(test())


def test_without_a_line_one_is_served() -> None:
    async def test() -> None:
        engine = Engine(queue=0)
        async with engine.submit(iter([1, 2])) as answer:
            with pytest.raises(QueueFull):
                engine.submit(iter([3]))
            assert [item async for item in answer] == [1, 2]
        await until(lambda: engine.num_running == 0)
        async with engine.submit(iter([3])) as answer:
            assert [item async for item in answer] == [3]
        engine.close()

    run(test())


def test_an_error_reaches_its_asker_and_no_other() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("inside")

    async def test() -> None:
        engine = Engine(queue=4)
        async with engine.submit(broken()) as answer:
            assert await anext(answer) == 1
            with pytest.raises(ZeroDivisionError, match="inside"):
                await anext(answer)
        async with engine.submit(iter([5])) as answer:
            assert [item async for item in answer] == [5]
        engine.close()

    run(test())


def test_closing_ends_what_runs_and_what_waits() -> None:
    async def test() -> None:
        engine = Engine(queue=4)
        running, waiting = engine.submit(iter(Endless())), engine.submit(iter(Endless()))
        assert await anext(running) == 1
        engine.close()
        for answer in (running, waiting):
            with pytest.raises(EngineClosed, match="shutting down"):
                async for _ in answer:
                    pass
        with pytest.raises(EngineClosed):
            engine.submit(iter([1]))
        engine._thread.join(timeout=5)
        assert not engine._thread.is_alive()

    run(test())
