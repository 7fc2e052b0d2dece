"""Batches under way: which parts of a batch are in hand, and that it ends exactly once.

A job counts its parts. Threads `begin` a part before they touch memory for it and `finish` it
after; once a job was told to stop no part begins, and it ends when none is in hand. So after the
end nothing of it touches memory. What a batch has to say to its peer is one part more, the last:
it can be begun when all others are done, and then the job cannot be stopped any more.
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
from mooncake.transfer.engine import Notice, Op, TransferBatch, TransferDone, TransferOp
from mooncake.transfer.plan import Slice, merge_ops


class Job:
    """One batch on its way; thread-safe. `ops` are merged and never empty ranges."""

    def __init__(
        self,
        batch_id: int,
        batch: TransferBatch,
        now: float,
        on_end: Callable[[Job], None],
        on_arrival: Callable[[Job], None] = lambda _job: None,
    ) -> None:
        """`on_arrival` is called where there is something to say, when all bytes are there."""
        self.batch_id = batch_id
        self.op: Op = batch.op
        self.peer: SegmentRef = batch.peer
        self.deadline_s = batch.deadline_s
        self.notify = batch.notify
        self.started_s = now
        self.ops: Sequence[TransferOp] = ()
        self.num_bytes = 0
        self.num_tried = 0
        """Ways the router has tried; only the thread that has the job now touches it."""
        self.error: str | None = None
        self._on_end = on_end
        self._on_arrival = on_arrival
        self._lock = threading.Lock()
        self._num_left: int | None = None
        self._num_in_hand = 0
        self._arrived = False
        self._said = False
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

    @property
    def arrived(self) -> bool:
        """All bytes are there, and it can be said."""
        return self._arrived

    def expect(self, num_parts: int) -> None:
        """Say of how many parts the job consists; with 0 it ends, successful."""
        with self._lock:
            self._num_left = num_parts + (self.notify is not None)
            is_due = self._settle()
        is_due(self)

    def say(self) -> bool:
        """Take what is to be said in hand, as a part that only its answer ends; False when the job
        was stopped before.
        """
        with self._lock:
            assert self._arrived
            if self.error is not None:
                return False
            self._num_in_hand += 1
            self._said = True
            return True

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
            is_due = self._settle()
        is_due(self)

    def give_back(self) -> None:
        """A part in hand is not done and will be begun again (or never, when stopped)."""
        with self._lock:
            self._num_in_hand -= 1
            is_due = self._settle()
        is_due(self)

    def stop(self, error: str) -> None:
        """Fail the job: it ends as soon as no part is in hand. The first reason stays; where the
        peer is being told, it is too late for any.
        """
        with self._lock:
            if self._ended or self._said:
                return
            if self.error is None:
                self.error = error
            is_due = self._settle()
        is_due(self)

    def _settle(self) -> Callable[[Job], None]:
        """Look whether the job ends, or all its bytes have just arrived; return whom to tell."""
        if self._ended or self._num_in_hand > 0:
            return _nobody
        if self.error is not None or self._num_left == 0:
            self._ended = True
            return self._on_end
        if self._num_left == 1 and self.notify is not None and not self._arrived:
            self._arrived = True
            return self._on_arrival
        return _nobody


def _nobody(_job: Job) -> None:
    """Nothing is to be told."""


@dataclass(slots=True, eq=False)
class Part:
    """One slice of a job on its way; it may have to go more than once."""

    job: Job
    slice: Slice
    num_failures: int = 0


MAX_OPEN_BATCHES = 65536
"""Batches one engine has under way; what comes on top fails at once, through its event."""
MAX_NOTICES = 4096
"""Words of peers that wait to be taken; what comes on top is refused."""


class BatchBook:
    """All batches of one engine that have not ended, and what has not yet been polled: endings, and
    words of peers.
    """

    def __init__(self, clock: Clock, on_settled: Callable[[Job], None] = lambda _job: None) -> None:
        """`on_settled` is called for a job with something to say, when it can be said or never
        will.
        """
        self._clock = clock
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._done: deque[TransferDone] = deque()
        self._notices: deque[Notice] = deque()
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
            job = Job(self._next_id, batch, self._clock.now(), self._end, self._on_settled)
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
            self._wake()
        if job.notify is not None:
            self._on_settled(job)

    def deliver(self, notices: Sequence[Notice]) -> int:
        """Keep what a peer has said until it is taken; return for how many there was room."""
        with self._lock:
            room = 0 if self._closed else MAX_NOTICES - len(self._notices)
            for notice in notices[:room]:
                self._notices.append(notice)
                self._wake()
            return min(room, len(notices))

    def _wake(self) -> None:
        if not self._closed and len(self._done) + len(self._notices) == 1:
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
            if done and not (self._closed or self._notices):
                os.eventfd_read(self._wake_fd)
            return done

    def take_notices(self) -> list[Notice]:
        """Return what peers have said since the last call."""
        if not self._notices:
            return []
        with self._lock:
            notices = list(self._notices)
            self._notices.clear()
            if notices and not (self._closed or self._done):
                os.eventfd_read(self._wake_fd)
            return notices

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
