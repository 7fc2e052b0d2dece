"""The calls that run in a server: a shutdown waits for them, and ends those that take too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol

from mooncake.base import MooncakeError, Unavailable


class Call(Protocol):
    """A call that runs."""

    def fail(self, error: MooncakeError) -> None:
        """End it with `error`."""


class RunningCalls:
    """A server's state is one of these. It takes calls until it drains."""

    def __init__(self, drain_s: float) -> None:
        """`drain_s`: how long a shutdown lets calls run."""
        self.draining = False
        self._drain_s = drain_s
        self._calls: set[Call] = set()
        self._call_ended = asyncio.Event()

    def drain(self) -> None:
        """Refuse new calls from now on."""
        self.draining = True

    def shutting_down(self) -> Unavailable:
        """Return the error for calls that come too late."""
        return Unavailable("the server is shutting down", retry_after_s=self._drain_s)

    @contextlib.contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """Count `call` as running in this block, so that a shutdown waits for it or ends it."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)
            self._call_ended.set()

    async def calls_ended(self, limit_s: float) -> None:
        """Wait until no call is running, for `limit_s` seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._calls:
                    self._call_ended.clear()
                    await self._call_ended.wait()

    @property
    def num_calls(self) -> int:
        """The number of calls that run."""
        return len(self._calls)

    def fail_all(self, error: MooncakeError) -> None:
        """End all running calls with `error`."""
        for call in list(self._calls):
            call.fail(error)
