"""A queue pair from one of our NICs to one of a peer's NICs, and the slices it carries. It also
decides which of many pairs stay open when their number is limited.

Requests of one pair end in order: only every n-th success is reported, and the last of each run.
Pairs are closed by SIEVE eviction: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

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
    """A slice that was posted to the NIC and has not ended."""

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
        """True if the queue pair is connected and has nothing to do."""
        return self.state is EndpointState.READY and self.is_idle

    @property
    def room(self) -> int:
        """The number of requests that the queue pair can still take."""
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


Key = TypeVar("Key", bound=Hashable)


class EndpointPool(Generic[Key]):
    """Holds at most `cap` keys. `touch` takes constant time; all other calls may look at every
    key.
    """

    def __init__(self, cap: int) -> None:
        if cap < 1:
            raise ValueError(f"a pool must hold at least one endpoint, not {cap}")
        self.cap = cap
        self._keys: list[Key] = []
        """Oldest first."""
        self._visited: dict[Key, bool] = {}
        self._hand = 0
        """Index of the key that the hand points at; it may be past the end."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._visited

    @property
    def has_room(self) -> bool:
        """True if one more key may be added."""
        return len(self._keys) < self.cap

    def add(self, key: Key) -> None:
        """Take a new key. Raises ValueError when it is in already or there is no room."""
        if key in self._visited or not self.has_room:
            raise ValueError(f"the pool is full, or has {key!r} already")
        if self._hand == len(self._keys):
            self._hand = 0  # past the end, the hand stands for the oldest key, not for a future one
        self._keys.append(key)
        self._visited[key] = False

    def touch(self, key: Key) -> None:
        """Mark `key` as used: the hand passes it over once."""
        self._visited[key] = True

    def remove(self, key: Key) -> None:
        """Forget `key`. Raises KeyError."""
        del self._visited[key]
        index = self._keys.index(key)
        del self._keys[index]
        self._hand -= index < self._hand

    def victim(self, may_leave: Callable[[Key], bool] = lambda _key: True) -> Key | None:
        """Return the key that should leave next, without removing it; None when none may leave.

        The hand goes from old to new, clears marks as it passes and stops at the first key without
        one that may leave.
        """
        for _ in range(2 * len(self._keys)):
            key = self._keys[self._hand % len(self._keys)]
            self._hand = self._hand % len(self._keys) + 1
            if not may_leave(key):
                continue
            if not self._visited[key]:
                return key
            self._visited[key] = False
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless keys, marks, hand and cap agree."""
        assert len(self._keys) == len(self._visited) <= self.cap
        assert set(self._keys) == self._visited.keys()
        assert 0 <= self._hand <= len(self._keys)
