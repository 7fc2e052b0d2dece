"""What clients see of accepted requests: tokens given to their sinks, and recorded as given.

Owned by the desk. A first token comes from prefill, the second from decode: after the hand-over and
the rest of the step that decode is in, so up to twice as late as any later one. Where gaps between
tokens have a limit, the first is therefore given together with the second.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from mooncake.base import RequestState, TokensEvent
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.patience import Deadlines
from mooncake.scheduler.record import RequestRecord
from mooncake.telemetry.events import FirstToken, Recorder, Tokens

MAX_HELD_GAPS = 3.0
"""A first token waits for the second at most so many times the limit on gaps, and never beyond the
limit on itself: by then the hand-over has gone wrong, and there is no more to be gained.
"""


@dataclass(frozen=True, slots=True)
class _Held:
    """A first token that waits for the second."""

    record: RequestRecord
    event: TokensEvent
    worker_id: str
    until_s: float


class Delivery:
    """Gives tokens to sinks; a sink may end its request while it is given some."""

    def __init__(self, config: SchedulerConfig, recorder: Recorder) -> None:
        self._config = config
        self._recorder = recorder
        self._held: dict[str, _Held] = {}
        self._deadlines = Deadlines()

    def give(self, record: RequestRecord, event: TokensEvent, worker_id: str, now: float) -> None:
        """Give the next tokens of a request, or keep the first one for a moment."""
        until_s = self._until_s(record, now) if event.start == 0 else now
        if until_s > now:
            self._held[record.request_id] = _Held(record, event, worker_id, until_s)
            self._deadlines.add(record.request_id, until_s)
            return
        self.give_held(record.request_id, now)
        if record.state is not RequestState.FINISHED:
            self._give(record, event, worker_id, now)

    def give_held(self, request_id: str, now: float) -> None:
        """Give what is kept of a request, if anything is."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._give(held.record, held.event, held.worker_id, now)

    def forget(self, request_id: str) -> None:
        """Nobody wants any more of a request."""
        self._held.pop(request_id, None)

    def tick(self, now: float) -> float | None:
        """Give what has been kept for long enough; returns when to come again."""
        while (request_id := self._deadlines.pop_due(now)) is not None:
            held = self._held.get(request_id)
            if held is not None and held.until_s <= now:
                self.give_held(request_id, now)
        return self._deadlines.next_s

    def check_integrity(self, accepted: Container[str]) -> None:
        """Raise AssertionError when something is kept of a request that has ended."""
        for request_id in self._held:
            assert request_id in accepted, f"a token of {request_id}, which has ended, was kept"

    def _until_s(self, record: RequestRecord, now: float) -> float:
        """Return until when the first token of a request may be kept; `now`: not at all."""
        request, config = record.request, self._config
        tbt_slo_s = request.tbt_slo_s if request.tbt_slo_s is not None else config.tbt_slo_s
        ttft_slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else config.ttft_slo_s
        if tbt_slo_s is None or record.placement is None or record.placement.prefill is None:
            return now
        until_s = now + MAX_HELD_GAPS * tbt_slo_s
        return until_s if ttft_slo_s is None else min(until_s, record.accepted_s + ttft_slo_s)

    def _give(self, record: RequestRecord, event: TokensEvent, worker_id: str, now: float) -> None:
        request_id = record.request_id
        if event.start == 0:
            num_cached = record.num_cached_tokens or 0
            self._recorder.record(
                FirstToken(
                    request_id=request_id,
                    at_s=now,
                    worker_id=worker_id,
                    num_cached_tokens=num_cached,
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
