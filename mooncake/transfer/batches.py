"""Tracks batches under way and which of their parts threads have in hand, so that each batch ends
exactly once; and cuts batches into slices: adjacent copies are merged, long ones cut, small ones
grouped.

Threads `begin` a part of a job before they touch memory for it and `finish` it after. No part of a
stopped job begins, and the job ends when no part is in hand. So nothing touches memory for it after
its end. One connection carries a slice in one request; its pieces may be scattered at both ends.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from mooncake.base.clock import Clock
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.mailbox import Mailbox
from mooncake.transfer.engine import Op, TransferBatch, TransferDone, TransferOp

_ALIGN = 4096


@dataclass(frozen=True, kw_only=True)
class SliceLimits:
    """Sizes of slices on one kind of link."""

    target_bytes: int = 4 * 2**20
    """No slice is longer than this (rounded up to whole pages)."""
    min_bytes: int = 4 * 2**20
    """A batch uses no more connections than it has pieces of this size. On two cores a second
    connection made 1 and 4 MiB slower and changed nothing from 16 MiB on.
    """
    max_pieces: int = 256
    """Ranges one slice may scatter and gather."""


class Slice(msgspec.Struct, frozen=True):
    """Part of a batch that travels as one request."""

    pieces: tuple[TransferOp, ...]
    num_bytes: int

    @property
    def piece_bytes(self) -> int:
        """Bytes of each piece, where all have one size; 0 if there is none."""
        return self.pieces[0].num_bytes if self.pieces else 0


def merge_ops(ops: Iterable[TransferOp]) -> list[TransferOp]:
    """Return `ops` in order with empty ones left out and neighbours joined.

    Two ops are joined when the second begins where the first ends, on both sides.
    """
    merged: list[TransferOp] = []
    for op in ops:
        if op.num_bytes == 0:
            continue
        if merged and _continues(merged[-1], op):
            last = merged[-1]
            merged[-1] = TransferOp(
                last.local_region,
                last.local_offset,
                last.remote_region,
                last.remote_offset,
                last.num_bytes + op.num_bytes,
            )
        else:
            merged.append(op)
    return merged


def _continues(last: TransferOp, op: TransferOp) -> bool:
    return (
        last.local_region == op.local_region
        and last.remote_region == op.remote_region
        and last.local_offset + last.num_bytes == op.local_offset
        and last.remote_offset + last.num_bytes == op.remote_offset
    )


def choose_slice_bytes(num_bytes: int, num_connections: int, limits: SliceLimits) -> int:
    """Return the slice length that spreads `num_bytes` evenly over connections, in whole pages."""
    num_slices = -(-num_bytes // limits.target_bytes)
    worth = max(1, min(num_connections, num_bytes // limits.min_bytes))
    num_slices = max(1, -(-num_slices // worth)) * worth
    length = -(-num_bytes // num_slices)
    return max(_ALIGN, -(-length // _ALIGN) * _ALIGN)


def cut_slices(ops: Sequence[TransferOp], slice_bytes: int, max_pieces: int) -> list[Slice]:
    """Return `ops` in order as slices of at most `slice_bytes` bytes and `max_pieces` pieces."""
    if slice_bytes < 1 or max_pieces < 1:
        raise ValueError(
            f"a slice of {slice_bytes} bytes and {max_pieces} ops can hold nothing; both "
            "must be at least 1"
        )
    slices: list[Slice] = []
    pieces: list[TransferOp] = []
    room = slice_bytes
    for op in ops:
        done = 0
        while done < op.num_bytes:
            length = min(room, op.num_bytes - done)
            pieces.append(_part(op, done, length))
            done += length
            room -= length
            if room == 0 or len(pieces) == max_pieces:
                slices.append(Slice(tuple(pieces), slice_bytes - room))
                pieces, room = [], slice_bytes
    if pieces:
        slices.append(Slice(tuple(pieces), slice_bytes - room))
    return slices


def _part(op: TransferOp, start: int, length: int) -> TransferOp:
    if length == op.num_bytes:
        return op
    return TransferOp(
        op.local_region,
        op.local_offset + start,
        op.remote_region,
        op.remote_offset + start,
        length,
    )


def plan_slices(
    ops: Sequence[TransferOp], num_connections: int, limits: SliceLimits
) -> list[Slice]:
    """Return merged `ops` cut for parallel connections: slices of about equal size, in order."""
    num_bytes = ops[0].num_bytes if len(ops) == 1 else sum(op.num_bytes for op in ops)
    if num_bytes == 0:
        return []
    is_small = num_bytes <= limits.target_bytes and num_bytes < 2 * limits.min_bytes
    if is_small and len(ops) <= limits.max_pieces:
        return [Slice(tuple(ops), num_bytes)]
    slice_bytes = choose_slice_bytes(num_bytes, num_connections, limits)
    return cut_slices(ops, slice_bytes, limits.max_pieces)


class Job:
    """One batch under way. Thread-safe; its `ops` are merged, and none is empty."""

    def __init__(
        self,
        batch_id: int,
        batch: TransferBatch,
        now: float,
        on_end: Callable[[Job], None],
    ) -> None:
        self.batch_id = batch_id
        self.op: Op = batch.op
        self.peer: SegmentRef = batch.peer
        self.grant = batch.grant
        self.question = batch.question
        self.answer = b""
        self.deadline_s = batch.deadline_s
        self.started_s = now
        self.ops: Sequence[TransferOp] = ()
        self.num_bytes = 0
        self.protocol = ""
        """The protocol that moves it; if several were tried, the last."""
        self.nics: set[str] = set()
        """See `TransferDone.nics`."""
        self.num_tried = 0
        """Backends the router has tried; only the thread that has the job now touches it."""
        self.error: str | None = None
        self._on_end = on_end
        self._lock = threading.Lock()
        self._num_left = -1  # not known yet
        self._num_in_hand = 0
        self._ended = False

    def set_ops(self, ops: Sequence[TransferOp]) -> None:
        """Set the checked ops of the batch, once, before a backend gets the job."""
        self.ops = list(ops) if self.question else merge_ops(ops)
        self.num_bytes = sum(op.num_bytes for op in self.ops)

    def set_answer(self, answer: bytes, num_bytes: int) -> None:
        """Record the answer to the job's question, behind which `num_bytes` come."""
        self.answer, self.num_bytes = answer, num_bytes

    @property
    def stopped(self) -> bool:
        """True if the job has failed or is to end early: no further part of it begins."""
        return self.error is not None

    @property
    def ended(self) -> bool:
        """True if the job has ended: nothing touches memory for it any more."""
        return self._ended

    def expect(self, num_parts: int) -> None:
        """Declare how many parts the job has. A job of 0 parts ends at once, successfully."""
        with self._lock:
            self._num_left = num_parts
            ends = self._settle()
        if ends:
            self._on_end(self)

    def begin(self) -> bool:
        """Take a part in hand; False when the job was stopped and the part must be forgotten."""
        with self._lock:
            if self.error is not None:
                return False
            self._num_in_hand += 1
            return True

    def finish(self, error: str | None = None, nics: Iterable[str] = ()) -> None:
        """End a part in hand, which `nics` carried; `error` fails the job."""
        self._put_down(1, error, nics)

    def give_back(self) -> None:
        """Release a part in hand that is not done. The part begins again later, unless the job is
        stopped.
        """
        self._put_down(0, None)

    def _put_down(self, num_done: int, error: str | None, nics: Iterable[str] = ()) -> None:
        with self._lock:
            self.nics.update(nics)
            self._num_in_hand -= 1
            if error is None:
                self._num_left -= num_done
            elif self.error is None:
                self.error = error
            ends = self._settle()
        if ends:
            self._on_end(self)

    def stop(self, error: str) -> None:
        """Fail the job: it ends as soon as no part is in hand. A second call does not change the
        reason.
        """
        with self._lock:
            if self._ended:
                return
            if self.error is None:
                self.error = error
            ends = self._settle()
        if ends:
            self._on_end(self)

    def _settle(self) -> bool:
        """Return whether the job ends now; the caller then calls `_on_end` without the lock."""
        if self._ended or self._num_in_hand > 0:
            return False
        self._ended = self.error is not None or self._num_left == 0
        return self._ended


@dataclass(slots=True, eq=False)
class Part:
    """One slice of a job under way; it may have to be sent more than once."""

    job: Job
    slice: Slice
    num_failures: int = 0


MAX_OPEN_BATCHES = 65536
"""Batches that one engine may have under way; one more fails at once, through its event."""


class BatchTable:
    """The open batches of one engine, and the endings that were not received yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._deadlines: list[tuple[float, int]] = []
        self.done: Mailbox[TransferDone] = Mailbox()
        """The endings; they can still be received after it was closed."""
        self._next_id = 1

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
            protocol=job.protocol,
            nics=tuple(sorted(job.nics)),
            answer=job.answer if job.error is None else b"",
        )
        with self._lock:
            del self._jobs[job.batch_id]
            self.done.put(done)

    def check_integrity(self) -> None:
        """Raise AssertionError when a batch that ended is still listed."""
        with self._lock:
            for batch_id, job in self._jobs.items():
                assert batch_id == job.batch_id < self._next_id
