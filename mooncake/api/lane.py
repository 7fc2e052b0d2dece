"""Runs slow work of requests (tokenizing, compiling schemas) on a few separate threads, fairly
among tenants.

A lane owns the threads and the work that waits for them. A full lane refuses at once, so that work
does not pile up, unless it was made to have room for all. Tenants take turns. A caller that gives
up frees its place at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from mooncake.base import Unavailable

MAX_TENANTS = 512
"""Number of tenants. When there are more, those without a waiting item are forgotten."""

Item = TypeVar("Item")
RETRY_S = 1.0
"""Retry advice when a lane is full: its work takes milliseconds, seldom seconds."""
Result = TypeVar("Result")


class FairQueue(Generic[Item]):
    """Waiting items by tenant; the tenant whose work has taken the least time comes first. It has
    no clock: its owner reports how long a piece of work took. A tenant without a waiting item
    always gets a place. No tenant gets more than half of the places that others leave. Threads may
    share it.
    """

    def __init__(self, num_places: float) -> None:
        """`num_places` may be infinite, if what adds items is bounded elsewhere."""
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
        """Return the next item and its tenant, or None if nothing waits."""
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
        """Remove an item, if it still waits."""
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


class Lane:
    """Runs one kind of slow work, fairly among tenants. Used in the event loop."""

    def __init__(self, name: str, num_threads: int, num_places: float) -> None:
        """`num_places` pieces of work may wait at most, as in a `FairQueue`. `name` describes the
        work; it appears in refusals.
        """
        self._name = name
        self._num_threads = num_threads
        self._waiting: FairQueue[_Work] = FairQueue(num_places)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._num_busy = 0

    @property
    def num_waiting(self) -> int:
        """Number of pieces of work that no thread has begun."""
        return len(self._waiting)

    async def run(self, work: Callable[[], Result], tenant: str = "") -> Result:
        """Call `work` in a thread and return its result. Cancelling removes it from the queue; work
        that has begun runs to its end, and its result is dropped.

        Raises:
            Unavailable: the lane is full, or this tenant has too much of it.
        """
        found: Future[Any] = Future()
        piece = _Work(work, found)
        if not self._waiting.add(tenant, piece):
            raise Unavailable(
                f"too many requests wait here ({self._name}); try again", retry_after_s=RETRY_S
            )
        with self._lock:
            begins = self._num_busy < self._num_threads
            self._num_busy += begins
        if begins:
            self._pool.submit(self._drain)
        try:
            result: Result = await asyncio.wrap_future(found)
        except asyncio.CancelledError:
            self._waiting.discard(tenant, piece)
            raise
        return result

    def _drain(self) -> None:
        """Run the waiting work in a thread, until none is left."""
        while True:
            with self._lock:  # so that nothing is added unseen between the look and the end
                taken = self._waiting.take()
                if taken is None:
                    self._num_busy -= 1
                    return
            tenant, piece = taken
            began_s = time.monotonic()
            piece.do()
            self._waiting.charge(tenant, time.monotonic() - began_s)

    def close(self) -> None:
        """Begin no more work. Does not wait for running work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Look(Generic[Result]):
    """Asks for something in a thread, once at a time. All callers that ask meanwhile share the
    answer, so many of them cost as much as one. Used in the event loop.
    """

    def __init__(self, ask: Callable[[], Result]) -> None:
        self._ask = ask
        self._asking: asyncio.Future[Result] | None = None

    async def result(self) -> Result:
        """Return the answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._ask))
        return await asyncio.shield(self._asking)


class _Work:
    """One piece of work and the future that waits for its result."""

    def __init__(self, work: Callable[[], Any], found: Future[Any]) -> None:
        self._work = work
        self._found = found

    def do(self) -> None:
        if not self._found.set_running_or_notify_cancel():
            return
        try:
            self._found.set_result(self._work())
        except BaseException as error:
            self._found.set_exception(error)
