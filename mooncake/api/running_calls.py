"""The state that every API server has behind its routes (`Serving`), over our own gateway or over
other people's engines: the running calls. A shutdown waits for them, and ends those that take too
long.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from mooncake.base import MooncakeError, Unavailable
from mooncake.telemetry.health import Probe


class Call(Protocol):
    """A call that runs."""

    def fail(self, error: MooncakeError) -> None:
        """End the call with `error`."""


class RunningCalls:
    """Takes calls until it drains."""

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


class Serving(RunningCalls, ABC):
    """The state of a server, `app.state.api_server`: what operators ask, and what its end needs."""

    @abstractmethod
    async def failing(self, probe: Probe) -> MooncakeError | None:
        """Return why this process fails `probe`; None when it passes."""

    @abstractmethod
    async def metrics(self, for_operator: bool) -> bytes:
        """Return the metrics in Prometheus' text format; those of tenants only for an operator."""

    @abstractmethod
    def status(self) -> Any:
        """Return what `mooncake status` shows."""

    @abstractmethod
    def close(self) -> None:
        """Close what serves the calls. No call runs any more."""
