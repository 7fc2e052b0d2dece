"""Grants: numbers by which peers may write to memory here, and whether one is over for good.

A grant is one writer's permission for some memory. Each of its writes carries the number, and the
owner's side refuses a number that was revoked. The owner keeps one word a slot, the least number
that is still good there; numbers of a slot only grow, so a number that was never issued here (a
lead issues them for its followers) is good until somebody revokes it. The words lie in memory that
peers of this host can read. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from enum import IntEnum
from typing import Protocol

from mooncake.base.errors import TransferError

NUM_SLOTS = 2**16
"""Grants that may be open at a time."""


class Fence(IntEnum):
    """Whether a revoked grant may still be written by. The largest of several is what counts."""

    CLOSED = 0
    """No: its memory may be used for others."""
    OPEN = 1
    """A writer has a copy in hand. It is known when that ends, or the writer's process."""
    UNKNOWN = 2
    """Hardware may write, and nobody here can tell when it will have."""


class Words(Protocol):
    """Numbers below 2^64, by slot; 0 at first."""

    def __getitem__(self, slot: int, /) -> int: ...

    def __setitem__(self, slot: int, number: int, /) -> None: ...


class Grants:
    """The grants of one engine."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._lock = threading.Lock()
        self._free = list(range(NUM_SLOTS - 1, -1, -1))
        self._open: set[int] = set()
        self._last = 0

    @property
    def num_open(self) -> int:
        """Grants that were issued here and not revoked."""
        return len(self._open)

    def issue(self) -> int:
        """Return a new number, never 0. Raises TransferError when too many are open."""
        with self._lock:
            if not self._free:
                raise TransferError(f"more than {NUM_SLOTS} grants are open")
            self._last += 1
            number = self._last * NUM_SLOTS + self._free.pop()
            self._open.add(number)
            return number

    def revoke(self, number: int) -> None:
        """Refuse a number from now on; nothing happens when it was revoked before."""
        slot = number % NUM_SLOTS
        with self._lock:
            if self._words[slot] <= number:
                self._words[slot] = number + 1
            if number in self._open:
                self._open.remove(number)
                self._free.append(slot)

    def close(self) -> None:
        """Let go of the words: nobody writes here by a grant any more."""
        with self._lock:
            self._words = defaultdict(int)

    def permit(self, number: int) -> Permit:
        """Return what a write by this number needs."""
        return Permit(self._words, number)


class Permit:
    """One grant, as those see it who write by it: a `regions.Withdrawable`."""

    __slots__ = ("_slot", "_words", "number")

    def __init__(self, words: Words, number: int) -> None:
        self._words = words
        self._slot = number % NUM_SLOTS
        self.number = number

    @property
    def withdrawn(self) -> str | None:
        """Why nothing may be written by it any more, or None."""
        if self._words[self._slot] <= self.number:
            return None
        return revoked(self.number)


def revoked(number: int) -> str:
    """Say why nothing may be written by a number any more."""
    return f"grant {number} was revoked"
