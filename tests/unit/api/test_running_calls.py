"""The calls that run: a shutdown waits for them, and ends those that take too long."""

from __future__ import annotations

import asyncio

from mooncake.api.running_calls import RunningCalls
from mooncake.base import MooncakeError, Unavailable


class FakeCall:
    """Remembers how it was ended."""

    def __init__(self) -> None:
        self.errors: list[MooncakeError] = []

    def fail(self, error: MooncakeError) -> None:
        self.errors.append(error)


def test_a_shutdown_waits_until_the_last_call_has_ended() -> None:
    async def main() -> None:
        calls = RunningCalls(drain_s=7.0)
        with calls.running(FakeCall()):
            with calls.running(FakeCall()):
                waiting = asyncio.create_task(calls.calls_ended(3600.0))
                await asyncio.sleep(0)
                assert calls.num_calls == 2
            await asyncio.sleep(0)
            assert calls.num_calls == 1
            assert not waiting.done()
        await waiting
        assert calls.num_calls == 0

    asyncio.run(main())


def test_a_shutdown_does_not_wait_longer_than_it_may_and_ends_what_runs() -> None:
    async def main() -> None:
        calls, call = RunningCalls(drain_s=7.0), FakeCall()
        with calls.running(call):
            await calls.calls_ended(0.0)
            assert calls.num_calls == 1
            calls.fail_all(error := Unavailable("the server is shutting down"))
        assert call.errors == [error]

    asyncio.run(main())


def test_a_call_that_comes_too_late_is_told_how_long_to_wait() -> None:
    calls = RunningCalls(drain_s=7.0)
    calls.drain()
    assert calls.draining
    assert calls.shutting_down().retry_after_s == 7.0
