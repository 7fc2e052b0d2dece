"""Grants are numbers by which peers may write to memory here. This module also tells when one is
over for good.

A grant is one writer's permission for some memory. Each of its writes carries the number, and the
owner's side refuses a number that was revoked. The owner keeps one word for each slot: the least
number that is still valid there. The numbers of a slot only grow. So a number that was never issued
here is valid until it is revoked (a lead issues numbers for its followers). The words lie in memory
that peers of this host can read. Thread-safe.
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
    """The answer to whether a revoked grant may still be written by. Of several answers the largest
    counts.
    """

    CLOSED = 0
    """No write is possible: the memory may be used for others."""
    OPEN = 1
    """A writer has a copy in hand. Its end will be known, or the end of the writer's process."""
    UNKNOWN = 2
    """Hardware may still write, and nobody here can tell when it is done."""


class Words(Protocol):
    """Numbers below 2^64, one for each slot; 0 at first."""

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
        """Release the words. After this nobody writes here by a grant."""
        with self._lock:
            self._words = defaultdict(int)

    def permit(self, number: int) -> Permit:
        """Return what a write by this number must hold."""
        return Permit(self._words, number)


class Permit:
    """One grant as a writer holds it: a `regions.Withdrawable`."""

    __slots__ = ("_slot", "_words", "number")

    def __init__(self, words: Words, number: int) -> None:
        self._words = words
        self._slot = number % NUM_SLOTS
        self.number = number

    @property
    def withdrawn(self) -> str | None:
        """The reason why nothing may be written by it any more, or None."""
        if self._words[self._slot] <= self.number:
            return None
        return revoked(self.number)


def revoked(number: int) -> str:
    """Return the error text for a grant number that was revoked."""
    return f"grant {number} was revoked"
