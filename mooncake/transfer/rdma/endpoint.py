"""A queue pair from one of our NICs to one of a peer's NICs, and the slices it carries.

Requests of one pair end in order: only every n-th success is reported, and the last of each run.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from mooncake.base.errors import TransferError
from mooncake.transfer.batches import Part
from mooncake.transfer.rdma.nic import Nic, QueuePair, WorkRequest

_SEQUENCE_BITS = 40
_SEQUENCE_MASK = 2**_SEQUENCE_BITS - 1
NUM_SERIALS: int = 2 ** (64 - _SEQUENCE_BITS)
"""Endpoints that may exist at a time: the numbers of requests have 64 bits."""


@dataclass(frozen=True, order=True, slots=True)
class Path:
    """The names of one of our NICs and of one of the peer's, as a path."""

    local: str
    remote: str


class EndpointState(Enum):
    """The state of an endpoint."""

    OPENING = "opening"
    READY = "ready"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Posted:
    """A slice that the NIC has in hand."""

    part: Part
    last_work_id: int
    num_requests: int
    posted_s: float


def serial_of(work_id: int) -> int:
    """Return the serial number of the endpoint a request belongs to."""
    return work_id >> _SEQUENCE_BITS


class Endpoint:
    """One queue pair. The NIC owns the memory of its slices until they have ended, or until
    `close`.
    """

    def __init__(self, serial: int, path: Path, nic: Nic, signal_every: int) -> None:
        self.serial = serial
        self.path = path
        self.state = EndpointState.OPENING
        self.leaving = False
        """True if it makes room for another: it gets nothing new and closes when it is idle."""
        self.num_bytes = 0
        self._nic = nic
        self._signal_every = signal_every
        self._pair: QueuePair = nic.new_pair()
        self._posted: deque[Posted] = deque()
        self._num_requests = 0
        self._next_sequence = 0
        self._num_silent = 0

    @property
    def pair(self) -> QueuePair:
        return self._pair

    @property
    def is_idle(self) -> bool:
        """True if nothing is under way."""
        return not self._posted

    @property
    def may_retire(self) -> bool:
        """True if it is connected and has nothing to do."""
        return self.state is EndpointState.READY and self.is_idle

    @property
    def room(self) -> int:
        """Number of requests that it can still take."""
        return self._nic.depth - self._num_requests

    def send(self, parts: Sequence[tuple[Part, Sequence[WorkRequest]]], now: float) -> None:
        """Post slices, each with its copies. The copies get their numbers and signals here.

        Raises TransferError when the NIC refuses. Some of `parts` may then be posted, so all count
        as posted: close the endpoint.
        """
        run: list[WorkRequest] = []
        for part, requests in parts:
            for request in requests:
                self._num_silent += 1
                signalled = self._num_silent >= self._signal_every
                if signalled:
                    self._num_silent = 0
                run.append(replace(request, work_id=self._work_id(), signalled=signalled))
            self._posted.append(Posted(part, run[-1].work_id, len(requests), now))
            self._num_requests += len(requests)
            self.num_bytes += part.slice.num_bytes
        run[-1] = replace(run[-1], signalled=True)
        self._num_silent = 0
        self._pair.post(run)

    def _work_id(self) -> int:
        self._next_sequence = (self._next_sequence + 1) & _SEQUENCE_MASK
        return self.serial << _SEQUENCE_BITS | self._next_sequence

    def complete(self, work_id: int) -> list[Posted]:
        """Return the slices that have arrived with this request."""
        return self._take(lambda posted: posted.last_work_id <= work_id)

    def first_at(self, work_id: int) -> Part | None:
        """Return the slice that a request belongs to, and keep it under way."""
        for posted in self._posted:
            if work_id <= posted.last_work_id:
                return posted.part
        return None

    def complete_before(self, work_id: int) -> list[Posted]:
        """Return the slices that had arrived when this request failed."""
        return self._take(lambda posted: posted.last_work_id < work_id)

    def _take(self, ended: Callable[[Posted], bool]) -> list[Posted]:
        done = []
        while self._posted and ended(self._posted[0]):
            posted = self._posted.popleft()
            self._num_requests -= posted.num_requests
            self.num_bytes -= posted.part.slice.num_bytes
            done.append(posted)
        return done

    def carries(self, wanted: Callable[[Part], bool]) -> bool:
        """Return whether a slice under way is `wanted`."""
        return any(wanted(posted.part) for posted in self._posted)

    def close(self) -> list[Part]:
        """Destroy the pair and return what was under way: the NIC touches none of it any more."""
        self.state = EndpointState.CLOSED
        with contextlib.suppress(TransferError):  # a device that failed reaches no memory either
            self._pair.close()
        parts = [posted.part for posted in self._posted]
        self._posted.clear()
        self._num_requests = self.num_bytes = 0
        return parts
