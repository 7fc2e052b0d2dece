"""The health port of a worker's process: open before the weights are read, and until the process
ends.

Owns the server, the watchdog, and what is known about the current worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.registry import Collector

from mooncake.base import MooncakeError, Role
from mooncake.launch.host.health import Health, HealthSettings, Watchdog, open_health_port
from mooncake.launch.host.http_server import url_of
from mooncake.launch.worker.metrics import HealthFamilies, render

_log = logging.getLogger(__name__)

WILDCARDS = ("0.0.0.0", "::")


class Told(Protocol):
    """A worker (`process.Worker`), as the health port sees it."""

    def tell(self, health: Health) -> None:
        """Have `health` ask it from now on."""

    def families(self) -> list[Collector]:
        """Return its figures."""


class HealthPort:
    """Answers probes and shows metrics of the worker in this process, through all its lives."""

    def __init__(
        self,
        settings: HealthSettings,
        worker_id: str,
        role: Role,
        *,
        limit_s: float,
        own_host: str,
    ) -> None:
        """Open the port. The process ends when its loop has not turned for `limit_s`. `own_host` is
        this machine's address, for the URL of a port that listens on all of its addresses.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self.health = Health(limit_s)
        self._worker_id = worker_id
        self._role = role
        self._worker: Told | None = None
        self._server = open_health_port(settings, lambda: [self.health.vitals()], self.metrics)
        host = own_host if self._server.host in WILDCARDS else self._server.host
        self.url = url_of(host, self._server.port, self._server.scheme)
        self._watchdog = Watchdog(lambda: [self.health.vitals()], self._end_process)

    @contextlib.contextmanager
    def of(self, worker: Told, role: Role) -> Iterator[None]:
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
        worker, vitals = self._worker, self.health.vitals()
        own = HealthFamilies(self._worker_id, self._role, [vitals])
        if worker is None or vitals.stuck_s:  # no answer would come
            return render([own])
        return render([own, *worker.families()])

    def close(self) -> None:
        """Close the port and end the watchdog."""
        self._watchdog.close()
        self._server.close()

    def _end_process(self, why: str) -> None:
        """End the process at once and print the stacks of all threads. Peers then notice, and
        another worker takes over.
        """
        _log.critical("%s: %s, so the process ends; stacks follow", self._worker_id, why)
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.flush()
        os._exit(1)
