"""Who is served, and who waits: the admission permits and the queue of accepted requests that are
placed on no worker.

Owned by the request manager. Whether the cluster can serve a request within its limits is the
Conductor's decision.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator

from mooncake.base import Flow, GenerateRequest, Overloaded, Priority
from mooncake.scheduler.fairness import Order, QueuePosition, Turns
from mooncake.scheduler.placement.admission import Rejection, reject
from mooncake.scheduler.requests.read_ahead import ReadAhead
from mooncake.scheduler.requests.record import RequestRecord

TENANT_RATIO = 6
"""A tenant that is alone holds at most 6 / 7 of all permits."""
RETRY_WAITING_S = 0.25
_Entry = tuple[Order, int, RequestRecord]
"""(turn and class, number of arrival, request)"""


def permits_of_one(max_inflight: int) -> int:
    """Return how many of `max_inflight` permits a tenant gets that is alone."""
    return math.ceil(max_inflight * TENANT_RATIO / (TENANT_RATIO + 1))


class AdmissionPermits:
    """Gives at most `max_inflight` permits, and one more for each further (tenant, class). Each
    sequence holds one, by request id, so that none is released twice. It also keeps the turns of
    those that hold one.

    A tenant may hold at most `TENANT_RATIO` times the permits that are free (dynamic thresholds:
    Choudhury and Hahne, IEEE/ACM ToN 1998), so that a tenant which is alone leaves some. What
    floods leave cannot be enough for any number of tenants, and a permit is never taken back.
    Therefore a tenant without a request in a class is always admitted: above `max_inflight`, each
    (tenant, class) has one permit.
    """

    def __init__(self, max_inflight: int, turns: Turns | None = None) -> None:
        self._max_inflight = max_inflight
        self._held: set[str] = set()
        self._held_by: Counter[Flow] = Counter()
        """(class, tenant) -> permits."""
        self.turns = turns or Turns()

    def acquire(self, request: GenerateRequest, now: float) -> QueuePosition | Rejection:
        """Take a permit; call `confirm` or `cancel` afterwards. Returns the request's queue
        position, or a rejection when its tenant already has a request of this class and may hold no
        more.
        """
        flow = request.flow
        self.turns.note_arrival(flow, now)
        queue_position = self.turns.queue_position(flow, request.prompt_price, now)
        num_held = len(self._held)
        num_own = sum(self._held_by[priority, request.tenant] for priority in Priority)
        none_left = num_held >= math.ceil(self._max_inflight * queue_position.share)
        none_for_it = num_own >= TENANT_RATIO * (self._max_inflight - num_held)
        if self._held_by[flow] and (none_left or none_for_it):
            return reject(
                Overloaded,
                "too_many_requests",
                f"{num_held} of at most {self._max_inflight} sequences are being served, "
                f"{num_own} of them for you, and the rest is kept for others. Retry later.",
                1.0,
            )
        assert request.request_id not in self._held, "a permit was taken twice"
        self._held.add(request.request_id)
        self._held_by[flow] += 1
        return queue_position

    def cancel(self, request: GenerateRequest) -> None:
        """Give back the permit of a request that was refused after all."""
        assert request.request_id in self._held, "a permit was given back twice"
        self._held.remove(request.request_id)
        self._held_by[request.flow] -= 1
        if not self._held_by[request.flow]:
            del self._held_by[request.flow]

    def confirm(self, request: GenerateRequest, queue_position: QueuePosition) -> None:
        """Accept the request: its tenant's next turn comes after it."""
        self.turns.add(request.flow, queue_position, request.prompt_price)

    def release(self, request: GenerateRequest, num_output_tokens: int) -> None:
        """Give back the permit of a request that has ended."""
        self.cancel(request)
        self.turns.remove(request.flow, request.prompt_price, num_output_tokens)

    def check_integrity(self, requests: Collection[GenerateRequest]) -> None:
        """Raise AssertionError unless exactly these requests hold a permit."""
        holders = {request.request_id for request in requests}
        assert self._held == holders, "permits and requests disagree"
        flows = Counter(request.flow for request in requests)
        assert self._held_by == flows
        assert len(self._held) <= self._max_inflight + max(0, len(flows) - 1)
        self.turns.check_integrity(flows)


class PendingQueue:
    """Keeps accepted requests that are placed on no worker, ordered by turn, class and arrival.

    It holds requests whose worker was lost or full while no other had room (at most `max_queue`; a
    further one fails with 503). It also holds batch work until capacity is idle or the work is due
    (bounded by the permits). They are retried in the order of their turns.
    """

    def __init__(self, bound: int, read_ahead: ReadAhead) -> None:
        self._bound = bound
        self._read_ahead = read_ahead
        self._queue: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_bounded = 0
        self._num_added = 0
        self.next_retry_s = 0.0
        """When the requests here are to be tried again; set by `on_retried`."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[str]:
        return (record.request_id for _, _, record in self._queue)

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
        entry = record.queue_position.order, self._num_added, record
        assert record.request_id not in self._entries, "a request waits twice"
        self._entries[record.request_id] = entry
        insort(self._queue, entry)
        self._advance_read_ahead(now)
        return True

    def on_retried(self, now: float) -> None:
        """Record that all requests here have been tried, and set the next time."""
        self.next_retry_s = now + RETRY_WAITING_S
        self._advance_read_ahead(now)

    def _advance_read_ahead(self, now: float) -> None:
        self._read_ahead.advance((record for _, _, record in self._queue), now)

    def remove(self, request_id: str, *, gone: bool = True) -> None:
        """Remove a request that was placed, or has ended (`gone`); other ids are ignored."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._read_ahead.forget(request_id, gone=gone)
            self._queue.remove(entry)
            self._num_bounded -= not _is_batch(entry[0])

    def check_integrity(self) -> None:
        """Raise AssertionError when a request waits twice or the limit was exceeded."""
        assert sorted(self._entries.values()) == self._queue, "queue and entries disagree"
        self._read_ahead.check_integrity(self._entries)
        lost = sum(not _is_batch(order) for order, _, _ in self._queue)
        assert lost == self._num_bounded <= self._bound


def _is_batch(order: Order) -> bool:
    return order[1] == Priority.BATCH.order
