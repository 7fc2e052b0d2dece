"""What looks after the process of one worker of this machine, in a thread of `mooncake serve` or in
an actor of Ray. Imports no ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from mooncake.launch.cluster.supervision.worker_handle import Begin, Told, WorkerHandle, start_at
from mooncake.launch.host import machine_facts

SAVE_S = 5.0
"""Part of the time to stop in which a pool node may write to its disks what is worth keeping."""


class State(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the process of a worker."""

    pid: int
    """0: there is none yet."""
    boot_id: str
    """The boot id of the machine that it runs on."""
    what: str
    done: int
    whole: int
    ready: bool


class WorkerEnded(Exception):
    """The process of a worker has ended, and nobody told it to."""


class Attendant:
    """Looks after one process after another. `run` blocks; the other methods answer from any
    thread.
    """

    def __init__(self, *, is_pool: bool) -> None:
        self._is_pool = is_pool
        self._told = Told()
        self._handle: WorkerHandle | None = None
        self._lock = threading.Lock()
        self._leaving: tuple[float, bool] | None = None
        """Set once the worker is to stop: see `stop`."""
        self._lets_go = False

    def run(
        self, place: Path, begin: Begin, start: Callable[[Path], None] = start_at
    ) -> str | None:
        """Start the worker's process by `start`, or adopt it if it runs, and return when it has
        ended or was let go: None, or why the worker cannot start.

        Raises:
            MooncakeError: no process stays.
            WorkerEnded: the process has ended by itself.
        """
        handle = WorkerHandle(place, begin, start)
        try:
            with self._lock:
                self._handle = handle
            if self._leaving is not None:
                self.stop(*self._leaving)
            if self._lets_go:
                handle.cut()
            told: Told | None = handle.first
            while told is not None:
                if told.refusal:
                    return told.refusal
                self._told = told
                told = handle.receive()
        finally:
            self._told = Told()
            with self._lock:
                self._handle = None
            handle.close()
        if self._leaving is None and not self._lets_go:
            raise WorkerEnded(begin.settings.worker_id)
        return None

    def is_wanted(self) -> bool:
        """Return whether a process is still to be started."""
        return not self._lets_go

    def state(self) -> State:
        told = self._told
        return State(
            told.pid, machine_facts.boot_id(), told.what, told.done, told.whole, told.ready
        )

    def stop(self, drain_s: float, waits: bool) -> None:
        """End `run`, once what the worker does has ended or `drain_s` have passed. `waits`: see
        `Worker.leave`. A pool node that is told so again saves nothing any more.
        """
        with self._lock:
            limit_s = SAVE_S if self._is_pool and self._leaving is None else drain_s
            self._leaving = drain_s, waits
            if self._handle is not None:
                self._handle.leave(limit_s, waits=waits)

    def let_go(self) -> None:
        """End `run`. The process serves on for as long as it waits for another supervisor."""
        with self._lock:
            self._lets_go = True
            if self._handle is not None:
                self._handle.cut()
