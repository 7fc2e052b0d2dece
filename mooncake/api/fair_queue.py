"""A bounded queue in which tenants take turns by the time that their work takes. It has no clock;
its owner reports how long a piece of work took.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

MAX_TENANTS = 512
"""Number of tenants. When there are more, those without a waiting item are forgotten."""

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Waiting items by tenant; the tenant whose work has taken the least time comes first. A tenant
    without a waiting item always gets a place. No tenant gets more than half of the places that
    others leave. Threads may share it.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Item]] = {}
        self._num_waiting = 0
        self._used_s: dict[str, float] = {}
        """The time that each tenant's work took. A new tenant begins with the time of the one
        served last.
        """
        self._served_s = 0.0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, tenant: str, item: Item) -> bool:
        """Add an item; return whether there was room."""
        with self._lock:
            own = self._waiting.get(tenant, deque())
            others = self._num_waiting - len(own)
            if own and 2 * len(own) >= self._num_places - others:
                return False
            if not own:
                self._used_s[tenant] = max(self._used_s.get(tenant, 0.0), self._served_s)
                self._waiting[tenant] = own
            own.append(item)
            self._num_waiting += 1
            return True

    def take(self) -> tuple[str, Item] | None:
        """Return the next item and its tenant; None: nothing waits."""
        with self._lock:
            if not self._waiting:
                return None
            tenant = min(self._waiting, key=lambda each: self._used_s[each])
            own = self._waiting[tenant]
            item = own.popleft()
            self._served_s = self._used_s[tenant]
            self._left(tenant, own)
            return tenant, item

    def discard(self, tenant: str, item: Item) -> None:
        """Remove an item that nobody wants any more, if it still waits."""
        with self._lock:
            own = self._waiting.get(tenant)
            if own is not None and item in own:
                own.remove(item)
                self._left(tenant, own)

    def _left(self, tenant: str, own: deque[Item]) -> None:
        self._num_waiting -= 1
        if not own:
            del self._waiting[tenant]

    def charge(self, tenant: str, seconds: float) -> None:
        """Record how long an item of this tenant took."""
        with self._lock:
            self._used_s[tenant] = self._used_s.get(tenant, 0.0) + seconds
            is_full = len(self._used_s) > MAX_TENANTS
            for name in self._used_s.keys() - self._waiting.keys():
                if is_full or self._used_s[name] <= self._served_s:  # it would begin there anyway
                    del self._used_s[name]
