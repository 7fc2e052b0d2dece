"""Keeps the slices for one peer that no connection carries at the moment.

Slices wait here before they are sent, and come back when their connection breaks. A READ may be
sent again at once. A WRITE waits until the peer confirms that nothing of the first try can reach
its memory any more (a fence). So no late packet lands after the second try.

A circuit breaker tells whether a path is worth trying: it opens on failures and closes by itself.
It never blocks a path for good. An open breaker lets one attempt through when its time has come
(half-open), and waits longer only while attempts keep failing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mooncake.transfer.batches import Job, Part, Slice


@dataclass(frozen=True, kw_only=True)
class BreakerLimits:
    """How long a path rests after it broke."""

    first_s: float = 0.05
    """The rest after the second failure in a row. After the first failure the path may be tried
    again at once.
    """
    longest_s: float = 5.0


class Breaker:
    """The state of one path. Closed: use it. Open: do not use it. Half-open: one attempt is under
    way to find out.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.num_failures = 0
        """Failures in a row."""
        self._open_until_s = 0.0
        self._probing = False

    @property
    def is_closed(self) -> bool:
        """True if there was no failure since the last success."""
        return self.num_failures == 0

    def may_try(self, now: float) -> bool:
        """Return whether to send now: always when closed, one attempt when half-open."""
        return self.is_closed or (not self._probing and now >= self._open_until_s)

    def tried(self) -> None:
        """Record an attempt: while the breaker is half-open no other may start before its outcome
        is known.
        """
        self._probing = not self.is_closed

    def succeeded(self) -> None:
        """Record that bytes have arrived: the breaker closes."""
        self.num_failures = 0
        self._probing = False

    def failed(self, now: float) -> None:
        """Record that the path broke, or did not come up."""
        self.num_failures += 1
        self._probing = False
        rests = min(self.num_failures - 2, 20)
        wait_s = 0.0 if rests < 0 else min(self._limits.longest_s, self._limits.first_s * 2**rests)
        self._open_until_s = now + wait_s

    def untried(self) -> None:
        """Record that the attempt ended for reasons that have nothing to do with the path."""
        self._probing = False

    def next_try_s(self) -> float | None:
        """Return when an open breaker turns half-open; None when closed, or during an attempt."""
        return None if self.is_closed or self._probing else self._open_until_s


_LOG = logging.getLogger(__name__)

Fence = str | int
"""What the peer has to confirm as ended: a connection, by its id, or a queue pair, by its
number.
"""


class RetryQueue:
    """Slices for one peer: those to send, oldest first, and WRITEs held for a fence.
    Thread-safe.
    """

    def __init__(self, engine_id: str, max_failures: int) -> None:
        """Fail the batch of a slice whose connection broke `max_failures` times."""
        self._engine_id = engine_id
        self._max_failures = max_failures
        self._lock = threading.Lock()
        self._ready: deque[Part] = deque()
        self._held: dict[Fence, list[Part]] = {}
        self.closed = False

    def __len__(self) -> int:
        """Return the number of slices to send."""
        return len(self._ready)

    @property
    def fences(self) -> Sequence[Fence]:
        """What the peer has yet to confirm, oldest first."""
        return list(self._held)

    @property
    def is_fenced(self) -> bool:
        """True if the peer has something to confirm."""
        return bool(self._held)

    @property
    def num_held(self) -> int:
        """WRITEs that wait for a fence."""
        with self._lock:
            return sum(map(len, self._held.values()))

    def put(self, job: Job, slices: Sequence[Slice]) -> None:
        """Queue the slices of a new job; stop the job when the queue is closed."""
        job.expect(len(slices))
        with self._lock:
            if not self.closed:
                self._ready.extend(Part(job, each) for each in slices)
        if self.closed:
            job.stop("the transfer engine is closed")

    def first(self) -> Part | None:
        """Return the next slice whose job goes on, without taking it."""
        with self._lock:
            while self._ready and self._ready[0].job.stopped:
                self._ready.popleft()
            return self._ready[0] if self._ready else None

    def pop(self) -> Part:
        """Take the slice that `first` returned. Only for a queue that one thread uses."""
        return self._ready.popleft()

    def put_back(self, parts: Sequence[Part]) -> None:
        """Queue slices again that were taken and not begun; they come before all others."""
        self._ready.extendleft(reversed(parts))

    def take_unfenced(self) -> Part | None:
        """Return the next slice, begun in its job; None while the peer has a fence to confirm."""
        with self._lock:
            while self._ready and not self._held:
                part = self._ready.popleft()
                if part.job.begin():
                    return part
        return None

    def again(self, parts: Sequence[Part]) -> None:
        """Queue slices again that no connection carries now, unless their jobs were stopped."""
        with self._lock:
            self._ready.extendleft(part for part in reversed(parts) if not part.job.stopped)
        for part in parts:
            part.job.give_back()

    def hold(self, fence: Fence, parts: Sequence[Part]) -> None:
        """Keep WRITEs, still in hand in their jobs, until the peer confirms `fence`."""
        if parts:
            with self._lock:
                self._held.setdefault(fence, []).extend(parts)

    def hold_instead(self, old: Iterable[Fence], new: Fence) -> None:
        """Let the fence `new` replace the fences `old`, which will not be confirmed."""
        with self._lock:
            moved = [part for fence in old for part in self._held.pop(fence, [])]
        self.hold(new, moved)

    def confirm(self, fences: Iterable[Fence]) -> None:
        """Queue the parts that waited until the peer confirmed these fences."""
        with self._lock:
            parts = [part for fence in fences for part in self._held.pop(fence, [])]
        self.again(parts)

    def count_failure(self, parts: Iterable[Part], error: str) -> None:
        """Count that the connection of these slices broke. If that has happened to a slice too
        often, its job ends with `error`.
        """
        for part in parts:
            part.num_failures += 1
            if part.num_failures >= self._max_failures:
                part.job.stop(error)

    def give_up(self, job: Job) -> None:
        """End the held parts of a stopped job without the peer's confirmation. Its fences stay: the
        peer learns of them when it can be reached.
        """
        with self._lock:
            parts = [part for held in self._held.values() for part in held if part.job is job]
            for held in self._held.values():
                held[:] = [part for part in held if part.job is not job]
        if parts:
            _LOG.warning(
                "batch %d to %s ends without confirmation: the peer does not answer; when it "
                "does, it is told to apply no more",
                job.batch_id,
                self._engine_id,
            )
        self.again(parts)

    def fail_ready(self, error: str, chosen: Callable[[Part], bool] = lambda _part: True) -> None:
        """Fail the jobs of the `chosen` slices among those that wait to be sent."""
        with self._lock:
            waiting, self._ready = self._ready, deque()
            parts: list[Part] = []
            for part in waiting:
                (parts if chosen(part) else self._ready).append(part)
        for part in parts:
            part.job.stop(error)

    def fail_held(self, error: str) -> None:
        """Fail the jobs of all WRITEs that wait for a fence. The fences stay."""
        with self._lock:
            parts = [part for held in self._held.values() for part in held]
            for held in self._held.values():
                held.clear()
        self.fail(parts, error)

    def fail(self, parts: Sequence[Part], error: str) -> None:
        """Fail the jobs of slices in hand that no connection carries now."""
        for part in parts:
            part.job.stop(error)
        self.again(parts)

    def close(self) -> None:
        """Forget what waits to be sent, and take no more. The jobs were stopped before."""
        with self._lock:
            self.closed = True
            self._ready.clear()
