"""Delivery of tokens to clients: calls their sinks and records what was delivered.

Owned by the request manager. The first token comes from prefill. The second comes from decode,
after the hand-over and the rest of decode's current step. So this gap may be twice as long as later
ones. Where gaps have a limit, the first token is therefore held and delivered with the second.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from mooncake.base import RequestOutput, RequestState
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.requests.record import HeldFirst, RequestRecord
from mooncake.telemetry.events import FirstToken, Recorder, Tokens

MAX_HELD_GAPS = 3.0
"""A first token is held for at most this many times the limit on gaps, and never past the TTFT
limit: by then the hand-over has gone wrong and waiting gains nothing.
"""


Item = TypeVar("Item")


class Deadlines(Generic[Item]):
    """Requests by deadline, the earliest first. An entry stays when its request ends, so the caller
    of `pop_due` checks whether the deadline still counts.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._num_added = 0

    def add(self, item: Item, at_s: float) -> None:
        """Add a deadline."""
        self._num_added += 1
        heapq.heappush(self._heap, (at_s, self._num_added, item))

    def pop_due(self, now: float) -> Item | None:
        """Remove and return the request with the earliest deadline, if that has passed."""
        return heapq.heappop(self._heap)[2] if self._heap and self._heap[0][0] <= now else None

    @property
    def next_s(self) -> float | None:
        """The earliest deadline; None when there is none."""
        return self._heap[0][0] if self._heap else None


class OutputDelivery:
    """Delivers tokens to sinks. A sink may abort its request while it is being called."""

    def __init__(self, config: SchedulerConfig, recorder: Recorder) -> None:
        self._config = config
        self._recorder = recorder
        self._deadlines: Deadlines[RequestRecord] = Deadlines()

    def deliver(
        self, record: RequestRecord, event: RequestOutput, worker_id: str, now: float
    ) -> None:
        """Deliver the next tokens of a request, or hold its first token."""
        until_s = self._until_s(record, now) if event.start == 0 else now
        if until_s > now:
            record.held_first = HeldFirst(event, worker_id, until_s)
            self._deadlines.add(record, until_s)
            return
        self.deliver_held(record, now)
        if record.state is not RequestState.FINISHED:
            self._send(record, event, worker_id, now)

    def deliver_held(self, record: RequestRecord, now: float) -> None:
        """Deliver the held token of a request, if it has one."""
        held, record.held_first = record.held_first, None
        if held is not None:
            self._send(record, held.output, held.worker_id, now)

    def tick(self, now: float) -> float | None:
        """Deliver the tokens that were held long enough; return when to call again."""
        while (record := self._deadlines.pop_due(now)) is not None:
            if record.held_first is not None and record.held_first.until_s <= now:
                self.deliver_held(record, now)
        return self._deadlines.next_s

    def _until_s(self, record: RequestRecord, now: float) -> float:
        """Return until when the first token of a request may be held; `now`: it is not held."""
        tbt_slo_s = self._config.tbt_limit_s(record.request)
        ttft_slo_s = self._config.ttft_limit_s(record.request)
        if tbt_slo_s is None or record.placement is None or record.placement.prefill is None:
            return now
        until_s = now + MAX_HELD_GAPS * tbt_slo_s
        return until_s if ttft_slo_s is None else min(until_s, record.accepted_s + ttft_slo_s)

    def _send(
        self, record: RequestRecord, event: RequestOutput, worker_id: str, now: float
    ) -> None:
        request_id = record.request_id
        if event.start == 0:
            num_cached = record.num_cached_tokens or 0
            self._recorder.record(
                FirstToken(
                    request_id=request_id,
                    at_s=now,
                    worker_id=worker_id,
                    num_cached_tokens=num_cached,
                    cache=record.cache,
                )
            )
        self._recorder.record(
            Tokens(
                request_id=request_id,
                at_s=now,
                start=event.start,
                num_tokens=len(event.tokens),
                worker_id=worker_id,
            )
        )
        record.sink(event)
