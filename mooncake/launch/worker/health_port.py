"""The health port of a process: a worker's is open before the weights are read, and until the
process ends. What looks after workers and has no API (`--headless`) has one too.

Owns the server, the watchdog, and what is known about the current worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mooncake.base import MooncakeError, Role
from mooncake.launch.host.build import revision
from mooncake.launch.host.families import render
from mooncake.launch.host.health import (
    Health,
    HealthSettings,
    Watchdog,
    metrics_route,
    probe_routes,
)
from mooncake.launch.host.http_server import HttpServer, url_of
from mooncake.launch.worker.metrics import health_families
from mooncake.telemetry.health import Vitals

if TYPE_CHECKING:
    from mooncake.launch.worker.worker import Worker

_log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::")


class HealthPort:
    """Answers probes and shows metrics of one process: of a worker through all its lives, or of
    what looks after workers and has no API.
    """

    def __init__(
        self,
        settings: HealthSettings,
        name: str,
        role: Role,
        *,
        limit_s: float,
        own_host: str,
        others: Callable[[], Sequence[Vitals]] = tuple,
        on_stuck: Callable[[str], None] | None = None,
        series: Callable[[], bytes] = bytes,
    ) -> None:
        """Open the port. When a loop has not turned for `limit_s`, `on_stuck` is told why, or
        the process ends. `own_host` is this machine's address, for the URL of a port that listens
        on all of its addresses. `others` returns the states of further parts of the process,
        `series` further metrics.

        Raises:
            ConfigError: the address cannot be bound, or a file of `tls` is wrong.
        """
        self.health = Health(limit_s)
        self._name = name
        self._role = role
        self._others = others
        self._series = series
        self._worker: Worker | None = None
        revision()  # as it is now
        routes = probe_routes(self.parts) | metrics_route(self.metrics)
        self._server = HttpServer(settings.host, settings.port, routes, "health-port", settings.tls)
        host = own_host if self._server.host in WILDCARDS else self._server.host
        self.url = url_of(host, self._server.port, self._server.scheme)
        self._watchdog = Watchdog(self.parts, on_stuck or self._end_process)

    def parts(self) -> list[Vitals]:
        """Return the states of the loop and of the other parts."""
        return [self.health.vitals(), *self._others()]

    @contextlib.contextmanager
    def of(self, worker: Worker, role: Role) -> Iterator[None]:
        """Report about `worker`, which is driven inside this block. A fault in it is reported until
        the process ends.
        """
        self._worker, self._role = worker, role
        worker.tell(self.health)
        try:
            yield
        except MooncakeError as error:
            self.health.fail(error.message)
            raise
        except Exception as error:
            self.health.fail(f"it failed ({type(error).__name__}); its log says why")
            raise
        finally:
            self._worker = None

    def metrics(self) -> bytes:
        """Return the process' series in Prometheus' text format."""
        worker, parts = self._worker, self.parts()
        own = health_families(self._name, self._role, parts)
        # A loop that hangs would not answer.
        of_worker = () if worker is None or parts[0].stuck_s else worker.families()
        return render([*own, *of_worker]) + self._series()

    def close(self) -> None:
        self._watchdog.close()
        self._server.close()

    def _end_process(self, why: str) -> None:
        """End the process at once and print the stacks of all threads. Peers then notice, and
        another worker takes over.
        """
        _log.critical("%s: %s, so the process ends; stacks follow", self._name, why)
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.flush()
        os._exit(1)
