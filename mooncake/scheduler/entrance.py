"""The entrance: permits and turns, taken together when a request comes and given back when it goes.

Owned by the desk. Whether the cluster can serve a request within its limits is not asked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from mooncake.base import GenerateRequest
from mooncake.scheduler.admission import Permits, Rejection
from mooncake.scheduler.fairness import Standing, Turns


class Entrance:
    """Counts who is in the house, and knows whose turn it is."""

    def __init__(self, max_inflight: int) -> None:
        self._permits = Permits(max_inflight)
        self._turns = Turns()

    def enter(self, request: GenerateRequest, now: float) -> Standing | Rejection:
        """Give a permit, to be kept (`stay`) or given back (`turn_away`); returns the request's
        standing, or the refusal when there is no permit for one of its class and tenant.
        """
        self._turns.note(request.priority, request.tenant, now)
        standing = self._turns.standing(request.priority, request.tenant, now)
        return self._permits.take(request.request_id, standing.share) or standing

    def turn_away(self, request: GenerateRequest) -> None:
        """It is not taken after all."""
        self._permits.give(request.request_id)

    def stay(self, request: GenerateRequest, standing: Standing) -> None:
        """It is accepted."""
        num_tokens = len(request.prompt_tokens)
        self._turns.take(request.priority, request.tenant, standing.order[1], num_tokens)

    def began(self, request: GenerateRequest, standing: Standing) -> None:
        """It has its first token: its turn has come."""
        self._turns.began(request.priority, standing.order[1])

    def leave(self, request: GenerateRequest, num_output_tokens: int) -> None:
        """It has ended."""
        self._permits.give(request.request_id)
        num_prompt = len(request.prompt_tokens)
        self._turns.ended(request.priority, request.tenant, num_prompt, num_output_tokens)

    def check_integrity(self, requests: Collection[GenerateRequest]) -> None:
        """Raise AssertionError unless exactly these are in the house."""
        self._permits.check_integrity({request.request_id for request in requests})
        self._turns.check_integrity(Counter((r.priority, r.tenant) for r in requests))
