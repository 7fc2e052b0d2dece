"""Adapter: the threads that do the work of one disk, or of a bucket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from mooncake.base.vital_thread import VitalThread


class DiskThreads:
    """Threads that run the jobs of one disk, urgent ones first."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._ready = threading.Condition()
        self._jobs: tuple[deque[Callable[[], None]], ...] = (deque(), deque())
        self._closed = False
        self._threads = [VitalThread(self._run, f"{name}-{n}") for n in range(num_threads)]
        self._started = False

    def put(self, job: Callable[[], None], *, urgent: bool = False) -> None:
        """Have a thread run a job. The first job starts the threads."""
        with self._ready:
            self._jobs[0 if urgent else 1].append(job)
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            self._ready.notify()

    def close(self) -> None:
        """Wait for the jobs that run, and drop those that wait."""
        with self._ready:
            self._closed = True
            for jobs in self._jobs:
                jobs.clear()
            self._ready.notify_all()
            started = self._started
        if started:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._closed and not any(self._jobs):
                    self._ready.wait()
                if self._closed:
                    return
                job = (self._jobs[0] or self._jobs[1]).popleft()
            job()
