"""The health port of a process that looks after workers and has no API (`--headless`).

Owns the port. The event loop reports its own state; the supervisor's thread reports how the workers
are watched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from mooncake.base import Role
from mooncake.launch.host.health import (
    Facts,
    Health,
    HealthSettings,
    Watchdog,
    open_health_port,
)
from mooncake.launch.host.http_server import Route
from mooncake.launch.worker.metrics import HealthFamilies, render
from mooncake.telemetry.health import Vitals

_log = logging.getLogger(__name__)


class HeadlessPort:
    """Answers probes and shows metrics of the process whose event loop opens it, until `close`."""

    def __init__(
        self,
        settings: HealthSettings,
        name: str,
        limit_s: float,
        *,
        is_stopping: Callable[[], bool],
        workers: Callable[[], Sequence[Vitals]],
        series: Callable[[], bytes],
        routes: Mapping[str, Route],
    ) -> None:
        """`workers` returns the state of what watches the workers. `series` are the gateway's
        metrics. `routes` are answered too.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._is_stopping = is_stopping
        self._workers = workers
        self._series = series
        self._health = Health(limit_s)
        self._health.watch(self._ask)
        self._server = open_health_port(settings, self.parts, self.metrics, routes)
        self._watchdog = Watchdog(self.parts, self._on_stuck)
        _log.info("health at %s", self._server.url)

    def parts(self) -> list[Vitals]:
        """Return the states of the event loop and of the workers' supervisor."""
        return [self._health.vitals(), *self._workers()]

    def metrics(self) -> bytes:
        """Return the process' series and those of its gateway."""
        return render([HealthFamilies(self._name, Role.GATEWAY, self.parts())]) + self._series()

    def close(self) -> None:
        """Close the port."""
        self._watchdog.close()
        self._server.close()

    def _ask(self) -> Future[Facts]:
        answer: Future[Facts] = Future()

        def tell() -> None:
            answer.set_result(Facts(joined=True, draining=self._is_stopping()))

        self._loop.call_soon_threadsafe(tell)
        return answer

    def _on_stuck(self, why: str) -> None:
        """Only log: the workers that this process watches serve on, so it does not end by
        itself.
        """
        _log.critical("%s is not live: %s; start it again", self._name, why)
