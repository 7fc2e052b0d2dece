"""Admission permits: how many requests this gateway serves at a time, and whose turn is next.

A tenant may hold at most `TENANT_RATIO` times the permits that are free (dynamic thresholds:
Choudhury and Hahne, IEEE/ACM ToN 1998), so that a tenant which is alone leaves some. What floods
leave cannot be enough for any number of tenants, and a permit is never taken back. Therefore a
tenant without a request in a class is always admitted: above `max_inflight`, each (tenant, class)
has one permit.

Owned by the request manager. Whether the cluster can serve a request within its limits is the
Conductor's decision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from mooncake.base import Flow, GenerateRequest, Overloaded, Priority
from mooncake.scheduler.fairness import QueuePosition, Turns
from mooncake.scheduler.placement.admission import Rejection, reject

TENANT_RATIO = 6
"""A tenant that is alone holds at most 6 / 7 of all permits."""


class AdmissionPermits:
    """At most `max_inflight` permits, and one more for each further (tenant, class). Each sequence
    holds one, by request id, so that none is released twice. It also keeps the turns of those that
    hold one.
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
