"""Batches under way: which parts of a batch are in hand, and that it ends exactly once.

A job counts its parts. Threads `begin` a part before they touch memory for it and `finish` it
after; once a job was told to stop no part begins, and it ends when none is in hand. So after the
end nothing of it touches memory.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake.base.clock import Clock
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.engine import Op, TransferBatch, TransferDone, TransferOp
from mooncake.transfer.plan import Slice, merge_ops


class Job:
    """One batch on its way; thread-safe. `ops` are merged and never empty ranges."""

    def __init__(
        self, batch_id: int, batch: TransferBatch, now: float, on_end: Callable[[Job], None]
    ) -> None:
        self.batch_id = batch_id
        self.op: Op = batch.op
        self.peer: SegmentRef = batch.peer
        self.deadline_s = batch.deadline_s
        self.started_s = now
        self.ops: Sequence[TransferOp] = ()
        self.num_bytes = 0
        self.num_tried = 0
        """Ways the router has tried; only the thread that has the job now touches it."""
        self.error: str | None = None
        self._on_end = on_end
        self._lock = threading.Lock()
        self._num_left: int | None = None
        self._num_in_hand = 0
        self._ended = False

    def set_ops(self, ops: Sequence[TransferOp]) -> None:
        """Take the checked ops of the batch, once, before the job is handed to a backend."""
        self.ops = merge_ops(ops)
        self.num_bytes = sum(op.num_bytes for op in self.ops)

    @property
    def stopped(self) -> bool:
        """True once it failed or was told to stop: what is not begun need not be."""
        return self.error is not None

    @property
    def ended(self) -> bool:
        return self._ended

    def expect(self, num_parts: int) -> None:
        """Say of how many parts the job consists; with 0 it ends, successful."""
        with self._lock:
            self._num_left = num_parts
            ends = self._ends()
        if ends:
            self._on_end(self)

    def begin(self) -> bool:
        """Take a part in hand; False when the job was stopped and the part must be forgotten."""
        with self._lock:
            if self.error is not None:
                return False
            self._num_in_hand += 1
            return True

    def finish(self, error: str | None = None) -> None:
        """A part in hand is done, or failed and the job with it."""
        with self._lock:
            self._num_in_hand -= 1
            if error is None:
                assert self._num_left is not None
                self._num_left -= 1
            elif self.error is None:
                self.error = error
            ends = self._ends()
        if ends:
            self._on_end(self)

    def give_back(self) -> None:
        """A part in hand is not done and will be begun again (or never, when stopped)."""
        with self._lock:
            self._num_in_hand -= 1
            ends = self._ends()
        if ends:
            self._on_end(self)

    def stop(self, error: str) -> None:
        """Fail the job: it ends as soon as no part is in hand. The first reason stays."""
        with self._lock:
            if self._ended:
                return
            if self.error is None:
                self.error = error
            ends = self._ends()
        if ends:
            self._on_end(self)

    def _ends(self) -> bool:
        if self._ended or self._num_in_hand > 0:
            return False
        if self.error is None and self._num_left != 0:
            return False
        self._ended = True
        return True


@dataclass(slots=True, eq=False)
class Part:
    """One slice of a job on its way; it may have to go more than once."""

    job: Job
    slice: Slice
    num_failures: int = 0


MAX_OPEN_BATCHES = 65536
"""Batches one engine has under way; what comes on top fails at once, through its event."""


class BatchBook:
    """All batches of one engine that have not ended, and the endings not yet polled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._done: deque[TransferDone] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._next_id = 1
        self._closed = False

    @property
    def num_open(self) -> int:
        """Batches that have not ended."""
        return len(self._jobs)

    def open(self, batch: TransferBatch) -> Job:
        """Return the job of a new batch."""
        with self._lock:
            job = Job(self._next_id, batch, self._clock.now(), self._end)
            self._next_id += 1
            self._jobs[job.batch_id] = job
            if batch.deadline_s is not None:
                heapq.heappush(self._deadlines, (batch.deadline_s, job.batch_id))
            return job

    def get(self, batch_id: int) -> Job | None:
        """Return a batch that has not ended."""
        with self._lock:
            return self._jobs.get(batch_id)

    def open_jobs(self) -> list[Job]:
        """Return all batches that have not ended, oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def take_expired(self, now: float) -> list[Job]:
        """Return the open batches whose deadline is at or before `now`, each once."""
        expired: list[Job] = []
        if not self._deadlines:
            return expired
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                job = self._jobs.get(heapq.heappop(self._deadlines)[1])
                if job is not None:
                    expired.append(job)
        return expired

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline of an open batch."""
        if not self._deadlines:
            return None
        with self._lock:
            while self._deadlines and self._deadlines[0][1] not in self._jobs:
                heapq.heappop(self._deadlines)
            return self._deadlines[0][0] if self._deadlines else None

    def _end(self, job: Job) -> None:
        done = TransferDone(
            batch_id=job.batch_id,
            error=job.error,
            num_bytes=job.num_bytes if job.error is None else 0,
            seconds=self._clock.now() - job.started_s,
        )
        with self._lock:
            del self._jobs[job.batch_id]
            self._done.append(done)
            if not self._closed and len(self._done) == 1:
                os.eventfd_write(self._wake_fd, 1)

    def fileno(self) -> int:
        return self._wake_fd

    def poll(self) -> list[TransferDone]:
        """Return the endings since the last call."""
        if not self._done:
            return []
        with self._lock:
            done = list(self._done)
            self._done.clear()
            if not self._closed:
                os.eventfd_read(self._wake_fd)
            return done

    def close(self) -> None:
        """Close the descriptor; endings can still be polled."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake_fd)

    def check_integrity(self) -> None:
        """Raise AssertionError when a batch that ended is still listed."""
        with self._lock:
            for batch_id, job in self._jobs.items():
                assert batch_id == job.batch_id < self._next_id
