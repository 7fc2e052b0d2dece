"""Runs the grammar library's work on threads, each job under a time limit.

The library cannot be interrupted, and a grammar of 300 bytes can keep it busy for hours. So a job
past its limit fails and is abandoned. Its thread ends whenever the library returns, and a new
thread takes the next job. Threads are daemons, so an abandoned one does not keep the process alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from mooncake.base import InternalError, Unavailable
from mooncake.base.threads import start_deep_thread

T = TypeVar("T")

MAX_ABANDONED = 3
"""The most threads that may be busy with abandoned jobs, each of which takes a core. Beyond that,
jobs are refused.
"""

logger = logging.getLogger(__name__)


class TookTooLong(InternalError):
    """A job exceeded its time limit."""


class Job(Generic[T]):
    """One piece of work and, once it has ended, its result."""

    __slots__ = ("_error", "_value", "ended", "is_awaited", "started_s", "work")

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.started_s: float | None = None
        self.ended = False
        self.is_awaited = False
        """Whether a waiter must be woken at its end."""
        self._value: T | None = None
        self._error: BaseException | None = None

    def end(self, value: T | None = None, error: BaseException | None = None) -> None:
        """Set the result."""
        self._value, self._error = value, error
        self.ended = True

    def outcome(self) -> T:
        """Return the value, or raise the error, of a job that has ended."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # None only where T allows it


class GrammarJobs:
    """A few threads that run jobs in order of arrival, each for at most `limit_s` seconds.

    One lock guards everything, and only waiters with something to do are woken: a step of many
    sequences submits a job for each, and waits for each.
    """

    def __init__(self, num_threads: int, limit_s: float, name: str) -> None:
        self._limit_s = limit_s
        self._name = name
        self._lock = threading.Lock()
        self._work_to_do = threading.Condition(self._lock)
        self._ends = threading.Condition(self._lock)
        self._num_idle = 0
        self._queue: deque[Job[object]] = deque()
        self._running: dict[Job[object], None] = {}
        self._num_abandoned = 0
        self._closed = False
        for _ in range(num_threads):
            start_deep_thread(self._work, self._name)

    @property
    def num_abandoned(self) -> int:
        """The number of threads that are still busy with abandoned jobs."""
        return self._num_abandoned

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Queue `work`. Never blocks. While too many threads are busy with abandoned jobs, the job
        fails at once as Unavailable, because another worker may do it.
        """
        job = Job(work)
        with self._lock:
            if self._running:
                self._abandon_late()
            if self._closed:
                job.end(error=Unavailable("this worker's model is closed"))
            elif self._num_abandoned >= MAX_ABANDONED:
                job.end(error=Unavailable("grammars of other requests keep all threads busy"))
            else:
                self._queue.append(job)  # type: ignore[arg-type]  # a queue of any outcomes
                if self._num_idle:
                    self._work_to_do.notify()
        return job

    def wait(self, job: Job[T]) -> T:
        """Return the result of `job`. Blocks until about `limit_s` after the job has started.

        Raises:
            TookTooLong: the job exceeded its limit. A failed job raises its own error.
        """
        if not job.ended:
            with self._lock:
                while not job.ended:
                    job.is_awaited = True
                    self._ends.wait(self._limit_s / 8)
                    self._abandon_late()
        return job.outcome()

    def close(self) -> None:
        """Let each thread end as soon as nothing is left for it to do; refuse further jobs. Never
        blocks.
        """
        with self._lock:
            self._closed = True
            self._work_to_do.notify_all()

    def _abandon_late(self) -> None:
        now = time.monotonic()
        for job in list(self._running):
            if job.started_s is not None and now - job.started_s > self._limit_s:
                del self._running[job]
                job.end(error=TookTooLong(f"the grammar takes more than {self._limit_s:g} s"))
                self._ends.notify_all()
                self._num_abandoned += 1
                logger.error(
                    "a grammar exceeded %g s; %d threads are busy with such grammars",
                    self._limit_s, self._num_abandoned,
                )  # fmt: skip
                start_deep_thread(self._work, self._name)

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._closed:
                        return
                    self._num_idle += 1
                    self._work_to_do.wait()
                    self._num_idle -= 1
                job = self._queue.popleft()
                job.started_s = time.monotonic()
                self._running[job] = None
            value, problem = None, None
            try:
                value = job.work()
            except BaseException as error:  # a panic of the library is no Exception
                problem = error
            with self._lock:
                if job not in self._running:
                    self._num_abandoned -= 1
                    return  # it was abandoned: another thread has taken this one's place
                del self._running[job]
                job.end(value, problem)
                if job.is_awaited:
                    self._ends.notify_all()
            del job, value, problem  # what they hold is not to wait for the next job
