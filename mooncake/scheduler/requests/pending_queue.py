"""The pending queue: accepted requests that are placed on no worker.

Owned by the request manager. It holds requests whose worker was lost or full while no other had
room (at most `max_queue`; a further one fails with 503). It also holds batch work until capacity is
idle or the work is due (bounded by the permits). They are retried in the order of their turns.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from mooncake.base import Priority
from mooncake.scheduler.fairness import Order
from mooncake.scheduler.requests.read_ahead import ReadAhead
from mooncake.scheduler.requests.record import RequestRecord

RETRY_WAITING_S = 0.25


class PendingQueue:
    """Requests by id, ordered by turn, class and arrival."""

    def __init__(self, bound: int, read_ahead: ReadAhead) -> None:
        self._bound = bound
        self._read_ahead = read_ahead
        self._records: dict[str, RequestRecord] = {}
        self._queue: list[tuple[Order, int, str]] = []
        self._entries: dict[str, tuple[Order, int, str]] = {}
        self._num_bounded = 0
        self._num_added = 0
        self.next_retry_s = 0.0
        """When the requests here are to be tried again; set by `on_retried`."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[str]:
        return (request_id for _, _, request_id in self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def has_batch(self) -> bool:
        """True if batch work waits here."""
        return len(self._queue) > self._num_bounded

    def add(self, record: RequestRecord, now: float) -> bool:
        """Add a request. Returns False when the queue is full; batch work always has room."""
        if not _is_batch(record.queue_position.order):
            if self._num_bounded >= self._bound:
                return False
            self._num_bounded += 1
        if not self._queue:
            self.next_retry_s = now + RETRY_WAITING_S
        self._num_added += 1
        entry = record.queue_position.order, self._num_added, record.request_id
        assert record.request_id not in self._entries, "a request waits twice"
        self._entries[record.request_id] = entry
        self._records[record.request_id] = record
        insort(self._queue, entry)
        self._advance_read_ahead(now)
        return True

    def on_retried(self, now: float) -> None:
        """Record that all requests here have been tried, and set the next time."""
        self.next_retry_s = now + RETRY_WAITING_S
        self._advance_read_ahead(now)

    def _advance_read_ahead(self, now: float) -> None:
        self._read_ahead.advance((self._records[request_id] for request_id in self), now)

    def remove(self, request_id: str, *, gone: bool = True) -> None:
        """Remove a request that was placed, or has ended (`gone`); other ids are ignored."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            del self._records[request_id]
            self._read_ahead.forget(request_id, gone=gone)
            self._queue.remove(entry)
            self._num_bounded -= not _is_batch(entry[0])

    def check_integrity(self) -> None:
        """Raise AssertionError when a request waits twice or the limit was exceeded."""
        assert sorted(self._entries.values()) == self._queue, "queue and entries disagree"
        assert self._records.keys() == self._entries.keys()
        self._read_ahead.check_integrity(self._entries)
        lost = sum(not _is_batch(order) for order, _, _ in self._queue)
        assert lost == self._num_bounded <= self._bound


def _is_batch(order: Order) -> bool:
    return order[1] == Priority.BATCH.order
