"""Clocks that go on, or leap, when a test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
_TURNS = 10


class ManualClock:
    """A `Clock` (see `mooncake.base.clock`) in seconds."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"the clock cannot go back from {self._now_s} to {now_s}"
        self._now_s = now_s


class Calendar:
    """Unix time, ahead by what a test says."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is ahead by what a test says: a test of a time-out sets a long one,
    which a slow machine does not reach, and leaps over it.
    """

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def run_leaping(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, which may `leap`, in a loop of its own."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(work)


async def leap(seconds: float) -> None:
    """Let time pass in the running loop; what can run does so before, what is due afterwards."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, LeapingLoop)
    for passes_s in (seconds, 0.0):
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        loop.ahead_s += passes_s
