"""A mailbox: items that other threads put for one loop, with a descriptor that the loop waits for.

Every port that a driver polls keeps its events in a mailbox.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
EventT_co = TypeVar("EventT_co", covariant=True)


class Polled(Protocol[EventT_co]):
    """A port whose events a driver's loop takes."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when an event is there."""

    def poll(self) -> Sequence[EventT_co]:
        """Return the events since the last call, oldest first, without waiting."""

    def close(self) -> None:
        """End what runs. Afterwards nothing of it touches memory."""


class Mailbox(Generic[T]):
    """Items in the order in which they were put, by any thread."""

    def __init__(self, bound: int | None = None) -> None:
        """Keep at most `bound` items; None: there is no bound."""
        self._bound = bound
        self._items: list[T] = []
        self._lock = threading.Lock()
        self._rung = False
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.bell: Callable[[], bool] | None = None
        """Called when there is something to receive. It returns whether a thread that is awake will
        receive that; if so, the descriptor does not become readable.
        """

    def put(self, item: T) -> bool:
        """Add an item and make the descriptor readable. Returns False when the mailbox is full."""
        with self._lock:
            if self._bound is not None and len(self._items) >= self._bound:
                return False
            self._items.append(item)
            self._announce()
            return True

    def announce(self) -> None:
        """Do as if an item were put."""
        with self._lock:
            self._announce()

    def _announce(self) -> None:
        if not (self._rung or (self.bell is not None and self.bell())):
            self._ring()

    def ring(self) -> None:
        """Make the descriptor readable without putting an item."""
        with self._lock:
            self._ring()

    def _ring(self) -> None:
        if not self._rung and self._descriptor >= 0:
            self._rung = True
            os.eventfd_write(self._descriptor, 1)

    @property
    def is_empty(self) -> bool:
        """True if there are no items."""
        return not self._items

    def fileno(self) -> int:
        """Return the descriptor, readable while there is something to receive."""
        return self._descriptor

    def receive(self) -> list[T]:
        """Take all items out, oldest first, without waiting."""
        if not self._items and not self._rung:  # no lock: loops ask often, mostly in vain
            return []
        with self._lock:
            if self._rung and self._descriptor >= 0:
                os.eventfd_read(self._descriptor)
            self._rung = False
            items, self._items = self._items, []
            return items

    def close(self) -> None:
        """Free the descriptor; items can still be put and received. A second call does nothing."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
