"""Counts the work that clients ask for: seconds of prefill, and tokens of decode.

Owned by the gateway. Refused requests count too, because with more replicas they would have been
served. Each gateway tells its totals to the others, so that all of them know the same demand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mooncake.engine.cost import RunningMean, StepCostModel

SHARE_WINDOW = 512
"""Requests over which the share of prompts that is found in caches is averaged."""


class Offered(NamedTuple):
    """Sums over requests."""

    requests: float = 0.0
    prefill_s: float = 0.0
    """Predicted seconds to compute the prompts, without what caches hold."""
    prefill_s2: float = 0.0
    """The sum of the squares of these seconds."""
    output_tokens: float = 0.0
    """Expected tokens of the answers."""
    context_tokens: float = 0.0
    """The sum, over these tokens, of the context that each attends to."""

    def plus(self, other: Offered) -> Offered:
        return Offered(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, before: Offered) -> Offered:
        """Return what came after `before`. Smaller sums are those of a process that began anew."""
        if self.requests < before.requests:
            return self
        return Offered(*(max(0.0, a - b) for a, b in zip(self, before, strict=True)))


class DemandMeter:
    """Sums up what clients ask this gateway for, and knows the sums of other gateways."""

    def __init__(self) -> None:
        self.total = Offered()
        """What this gateway was asked for since it started."""
        self._taken = Offered()
        self._peers: dict[str, Offered] = {}
        self._taken_of: dict[str, Offered] = {}
        self._cached_share = RunningMean(0.0, SHARE_WINDOW)

    @property
    def has_grown(self) -> bool:
        """True if this gateway was asked for something since the last `take`."""
        return self.total != self._taken

    def offer(
        self,
        num_prompt_tokens: int,
        num_cached_tokens: int | None,
        num_output_tokens: float,
        cost: StepCostModel,
        chunk_tokens: int,
    ) -> None:
        """Count a request. `num_cached_tokens`: None if it was not placed, so that the usual share
        is taken to be cached. `cost`, `chunk_tokens`: of a worker that computes prompts.
        """
        if num_cached_tokens is None:
            num_cached_tokens = round(self._cached_share.value * num_prompt_tokens)
        else:
            self._cached_share.add(num_cached_tokens / max(1, num_prompt_tokens))
        num_new = num_prompt_tokens - num_cached_tokens
        seconds = cost.prefill_s(num_new, num_cached_tokens, chunk_tokens)
        context = num_prompt_tokens + num_output_tokens / 2
        self.total = self.total.plus(
            Offered(1.0, seconds, seconds**2, num_output_tokens, num_output_tokens * context)
        )

    def on_peer(self, gateway_id: str, sums: Sequence[float]) -> None:
        """Take the totals of another gateway. What it was asked for before it was met here does not
        count.
        """
        usable = len(sums) == len(Offered._fields)
        if not usable or not all(math.isfinite(value) and value >= 0 for value in sums):
            return
        self._peers[gateway_id] = Offered(*sums)
        self._taken_of.setdefault(gateway_id, self._peers[gateway_id])

    def forget(self, gateway_id: str) -> None:
        """Forget a gateway that has gone."""
        self._peers.pop(gateway_id, None)
        self._taken_of.pop(gateway_id, None)

    def take(self) -> Offered:
        """Return what all gateways were asked for since the last call."""
        grown, self._taken = self.total.since(self._taken), self.total
        for gateway_id, total in self._peers.items():
            grown = grown.plus(total.since(self._taken_of[gateway_id]))
            self._taken_of[gateway_id] = total
        return grown
