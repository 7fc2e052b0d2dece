"""Adapter: the threads that do the work of one disk, or of a bucket."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from mooncake.base.threads import VitalThread


class DiskThreads:
    """Threads that run the jobs of one disk, urgent ones first."""

    def __init__(self, num_threads: int, name: str, num_urgent: int = 0) -> None:
        """num_urgent: so many of the threads run urgent jobs only."""
        self._ready = threading.Condition()
        self._jobs: tuple[deque[Callable[[], None]], ...] = (deque(), deque())
        self._num_other = 0
        """Jobs that run and are not urgent."""
        self._max_other = num_threads - num_urgent
        self.is_closed = False
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
            self.is_closed = True
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
                while not self.is_closed and not (jobs := self._next_jobs()):
                    self._ready.wait()
                if self.is_closed:
                    return
                is_other = jobs is self._jobs[1]
                self._num_other += is_other
                job = jobs.popleft()
            job()
            if is_other:
                with self._ready:
                    self._num_other -= 1
                    self._ready.notify()  # this thread may take an urgent job next

    def _next_jobs(self) -> deque[Callable[[], None]]:
        """Return the queue with the next job; an empty one if a thread has to wait."""
        urgent, others = self._jobs
        return others if not urgent and self._num_other < self._max_other else urgent
