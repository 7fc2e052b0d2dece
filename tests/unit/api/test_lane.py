"""Slow work waits in a bounded queue, by turns, and who gives up holds no place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from mooncake.api.lane import Lane
from mooncake.base import Unavailable
from tests.support.waiting import LONG_S


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("testing", 1, 4)
    yield made
    made.close()


@asynccontextmanager
async def busy(lane: Lane) -> AsyncIterator[None]:
    """Keep the lane's only thread busy."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(LONG_S)

    task = asyncio.ensure_future(lane.run(work, "busy"))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, 60)
    try:
        yield
    finally:
        go_on.set()
        await task


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(LONG_S):
            await main()

    asyncio.run(within())


def test_results_and_errors_come_back(lane: Lane) -> None:
    async def main() -> None:
        assert await lane.run(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)
        assert await asyncio.gather(*(lane.run(lambda: 1, f"{n}") for n in range(3))) == [1] * 3

    run(main)


def test_a_full_lane_answers_at_once_and_leaves_places_to_other_tenants(lane: Lane) -> None:
    async def main() -> None:
        async with busy(lane):
            waiting = [asyncio.ensure_future(lane.run(lambda: "a", "a")) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="testing") as refused:
                await lane.run(lambda: "a", "a")
            assert refused.value.retry_after_s
            waiting.append(asyncio.ensure_future(lane.run(lambda: "b", "b")))
            await asyncio.sleep(0)
            assert lane.num_waiting == 3
        assert await asyncio.gather(*waiting) == ["a", "a", "b"]

    run(main)


def test_who_gives_up_frees_the_place_and_the_work_is_not_done(lane: Lane) -> None:
    done: list[str] = []

    async def main() -> None:
        async with busy(lane):
            waiting = [
                asyncio.ensure_future(lane.run(lambda: done.append("x"), "a")) for _ in range(2)
            ]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert lane.num_waiting == 0
            last = asyncio.ensure_future(lane.run(lambda: done.append("last"), "a"))
            await asyncio.sleep(0)
        await last

    run(main)
    assert done == ["last"]
