"""The health of a worker in this process, for any thread; the routes that answer probes; and the
watchdog that ends a process whose loop no longer turns.

Owns no worker. It asks the loop that drives one, and notices when no answer comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from http import HTTPStatus

import msgspec

from mooncake.base import Clock, MonotonicClock
from mooncake.base.threads import VitalThread
from mooncake.base.tls_files import TlsFiles
from mooncake.launch.host.http_server import PROMETHEUS, Answer, Route, document
from mooncake.telemetry.health import Probe, Status, Vitals, judge

ANSWER_S = 0.5
"""A question waits this long for a busy loop. After that it is answered from the loop's last
report.
"""
LOOK_S = 1.0
"""Time between two looks of a watchdog. The time between two looks counts as no more than twice
this: a process that was stopped meanwhile is not stuck."""

PROBE_PATHS = {
    "/health": Probe.READY,
    "/health/startup": Probe.STARTUP,
    "/health/ready": Probe.READY,
    "/health/live": Probe.LIVE,
}


class Facts(msgspec.Struct, frozen=True):
    """What a loop reports about itself when it is asked."""

    joined: bool
    draining: bool


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a process' health port."""

    host: str = "127.0.0.1"
    port: int = 0
    """The port; 0: any free one."""
    tls: TlsFiles | None = None
    """Files on the machine of the process; None: plain HTTP."""


class Health:
    """Keeps the state of one worker for its probes. All methods may be called from any thread."""

    def __init__(self, limit_s: float, clock: Clock | None = None) -> None:
        """`limit_s`: a loop that has not turned for this long counts as stuck."""
        self._limit_s = limit_s
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._starting = ("starting", 0, 0)
        self._failure = ""
        self._facts = Facts(joined=False, draining=False)
        self._ask: Callable[[], Future[Facts]] | None = None
        self._asked: Future[Facts] | None = None
        """The question that has no answer yet."""
        self._looked_s = 0.0
        self._stuck_s = 0.0

    def starting(self, what: str, num_done: int = 0, num_whole: int = 0) -> None:
        """Report what the start is doing now; a total of 0 means that it is not counted."""
        with self._lock:
            self._ask, self._asked = None, None
            self._starting = (what, num_done, num_whole)

    def watch(self, ask: Callable[[], Future[Facts]]) -> None:
        """Count the worker as started. `ask` returns the loop's report; its future is cancelled if
        the loop has ended.
        """
        with self._lock:
            self._starting = ("", 0, 0)
            self._facts = Facts(joined=False, draining=False)
            self._ask, self._asked = ask, None
            self._looked_s, self._stuck_s = self._clock.now(), 0.0

    def fail(self, why: str) -> None:
        """Report that the worker cannot go on: the process will end soon, or should be ended."""
        with self._lock:
            self._failure = why

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def vitals(self) -> Vitals:
        """Return the worker's state now. Waits at most `ANSWER_S` for an answer."""
        with self._lock:
            if self._ask is not None and not self._failure:
                self._look(self._ask)
            what, num_done, num_whole = self._starting
            return Vitals(
                starting=what,
                num_done=num_done,
                num_whole=num_whole,
                joined=self._facts.joined,
                draining=self._facts.draining,
                stuck_s=self._stuck_s,
                limit_s=self._limit_s,
                failure=self._failure,
            )

    def _look(self, ask: Callable[[], Future[Facts]]) -> None:
        now = self._clock.now()
        passed_s, self._looked_s = now - self._looked_s, now
        waiting_s = 0.0
        if self._asked is None:
            self._asked, waiting_s, passed_s = ask(), ANSWER_S, 0.0
        try:
            self._facts = self._asked.result(waiting_s)
        except CancelledError:  # the loop has ended in good order
            self._facts = Facts(joined=False, draining=True)
        except TimeoutError:
            self._stuck_s += min(passed_s, 2 * LOOK_S)
            return
        self._asked, self._stuck_s = None, 0.0


class Watchdog:
    """Looks at `parts` every `LOOK_S`, in a thread of its own. It calls `stuck(why)` when the loop
    of a part has not turned for its limit. Without a watchdog, time counts only while probes ask.
    """

    def __init__(self, parts: Callable[[], Sequence[Vitals]], stuck: Callable[[str], None]) -> None:
        self._parts = parts
        self._stuck = stuck
        self._closed = threading.Event()
        self._thread = VitalThread(self._run, "watchdog")
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        told = False
        while not self._closed.wait(LOOK_S):
            stuck = [part.reason for part in self._parts() if part.status is Status.STUCK]
            if stuck and not told:
                self._stuck(stuck[0])
            told = bool(stuck)


def probe_routes(parts: Callable[[], Sequence[Vitals]]) -> dict[str, Route]:
    """Return the routes that answer probes. A process has the state of the worst of its `parts`."""

    def route(probe: Probe) -> Route:
        def act(_: object) -> Answer:
            ok, verdict = judge(probe, parts())
            status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
            return document(status, msgspec.to_builtins(verdict))

        return Route("GET", act)

    return {path: route(probe) for path, probe in PROBE_PATHS.items()}


def metrics_route(metrics: Callable[[], bytes]) -> dict[str, Route]:
    """Return the route of metrics in Prometheus' text format."""
    return {"/metrics": Route("GET", lambda _: Answer(HTTPStatus.OK, PROMETHEUS, metrics()))}
