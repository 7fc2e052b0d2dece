"""The waiting room: requests that are in the house and placed nowhere.

Owned by the desk. Here are those whose worker was lost while no other could take over, or was full
(bound `max_queue`; one more fails with 503), and batch work until something is idle (bound: the
permits). They are called in the order of their turns.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from mooncake.base import Priority
from mooncake.scheduler.fairness import Order
from mooncake.scheduler.read_ahead import ReadAhead
from mooncake.scheduler.record import RequestRecord

RETRY_WAITING_S = 0.25


class WaitingRoom:
    """Requests by id, in order of class, turn and coming."""

    def __init__(self, bound: int, read_ahead: ReadAhead) -> None:
        self._bound = bound
        self._read_ahead = read_ahead
        self._records: dict[str, RequestRecord] = {}
        self._line: list[tuple[Order, int, str]] = []
        self._places: dict[str, tuple[Order, int, str]] = {}
        self._num_lost = 0
        self._num_offered = 0
        self.next_call_s = 0.0
        """When those here are to be tried again; `called` sets it."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[str]:
        return (request_id for _, _, request_id in self._line)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._places

    @property
    def has_batch(self) -> bool:
        """Whether batch work waits here; it stands at the end of the line."""
        return bool(self._line) and _is_batch(self._line[-1][0])

    def offer(self, record: RequestRecord, now: float) -> bool:
        """Let a request in; False when there is no room. Batch always has room."""
        if not _is_batch(record.standing.order):
            if self._num_lost >= self._bound:
                return False
            self._num_lost += 1
        if not self._line:
            self.next_call_s = now + RETRY_WAITING_S
        self._num_offered += 1
        place = record.standing.order, self._num_offered, record.request_id
        assert record.request_id not in self._places, "a request waits twice"
        self._places[record.request_id] = place
        self._records[record.request_id] = record
        insort(self._line, place)
        self._go_on(now)
        return True

    def called(self, now: float) -> None:
        """All who are here have been tried, or will have been in this moment."""
        self.next_call_s = now + RETRY_WAITING_S
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        self._read_ahead.go_on((self._records[request_id] for request_id in self), now)

    def remove(self, request_id: str, *, gone: bool = True) -> None:
        """Let a request out, which is placed now, or `gone`; others than those here are ignored."""
        place = self._places.pop(request_id, None)
        if place is not None:
            del self._records[request_id]
            self._read_ahead.forget(request_id, gone=gone)
            self._line.remove(place)
            self._num_lost -= not _is_batch(place[0])

    def check_integrity(self) -> None:
        """Raise AssertionError when somebody waits twice or there are too many."""
        assert sorted(self._places.values()) == self._line, "the line and the places disagree"
        assert self._records.keys() == self._places.keys()
        self._read_ahead.check_integrity(self._places)
        lost = sum(not _is_batch(order) for order, _, _ in self._line)
        assert lost == self._num_lost <= self._bound


def _is_batch(order: Order) -> bool:
    return order[0] == Priority.BATCH.order
