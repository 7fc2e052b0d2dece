"""The recent status: latencies, hit rate, output rate and refusals of the last minute.

Its memory is bounded under any load. The cluster page shows it. `metrics.py` has the series that
are kept and summed over gateways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from mooncake.telemetry.events import Refused
from mooncake.telemetry.stats import percentile

WINDOW_S = 60.0
MAX_SAMPLES = 4096
MAX_REFUSALS = 20

Value = TypeVar("Value")


class RecentRefusal(msgspec.Struct, frozen=True, kw_only=True):
    ago_s: float
    request_id: str
    status: int
    reason: str


class RecentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the last `window_s` seconds. A latency is None when nothing was measured."""

    window_s: float
    ttft_s_p50: float | None
    ttft_s_p99: float | None
    tbt_s_p50: float | None
    """The median of single gaps between tokens."""
    tbt_s_p99: float | None
    num_prompt_tokens: int
    """The prompt tokens of requests that got their first token."""
    num_cached_tokens: int
    """The part of `num_prompt_tokens` that was reused."""
    output_tokens_per_s: float
    refusals: list[RecentRefusal]
    """The newest refusals first, whatever their age."""


class _Samples(Generic[Value]):
    """Values with their times, at most `MAX_SAMPLES`. The oldest are dropped first."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, Value]] = deque(maxlen=MAX_SAMPLES)

    def add(self, at_s: float, value: Value) -> None:
        self._values.append((at_s, value))

    def since(self, start_s: float) -> list[Value]:
        while self._values and self._values[0][0] < start_s:
            self._values.popleft()
        return [value for _, value in self._values]


class Recent:
    """Keeps the last minute. `Metrics`, which follows each request, tells it."""

    def __init__(self) -> None:
        self._ttft_s: _Samples[float] = _Samples()
        self._gap_s: _Samples[float] = _Samples()
        self._prompts: _Samples[tuple[int, int]] = _Samples()
        self._outputs: deque[tuple[int, int]] = deque(maxlen=int(WINDOW_S) + 1)
        """Pairs of a whole second and its number of tokens; a list of all events would be too long
        at a busy gateway.
        """
        self._refusals: deque[Refused] = deque(maxlen=MAX_REFUSALS)

    def refused(self, event: Refused) -> None:
        self._refusals.appendleft(event)

    def first_token(
        self, at_s: float, ttft_s: float, num_prompt_tokens: int, num_cached_tokens: int
    ) -> None:
        self._ttft_s.add(at_s, ttft_s)
        self._prompts.add(at_s, (num_prompt_tokens, num_cached_tokens))

    def tokens(self, at_s: float, number: int, gap_s: float | None) -> None:
        """Count output tokens; `gap_s`: the time since those before, if there were any."""
        second = int(at_s)
        if self._outputs and self._outputs[-1][0] == second:
            number += self._outputs.pop()[1]
        self._outputs.append((second, number))
        if gap_s is not None:
            self._gap_s.add(at_s, gap_s)

    def status(self, now: float) -> RecentStatus:
        """Return the status of the time up to `now`, on the events' clock."""
        start_s = now - WINDOW_S
        ttft_s, gap_s = self._ttft_s.since(start_s), self._gap_s.since(start_s)
        prompts = self._prompts.since(start_s)
        return RecentStatus(
            window_s=WINDOW_S,
            ttft_s_p50=_percentile(ttft_s, 50),
            ttft_s_p99=_percentile(ttft_s, 99),
            tbt_s_p50=_percentile(gap_s, 50),
            tbt_s_p99=_percentile(gap_s, 99),
            num_prompt_tokens=sum(number for number, _ in prompts),
            num_cached_tokens=sum(number for _, number in prompts),
            output_tokens_per_s=_rate(self._outputs, now),
            refusals=[
                RecentRefusal(
                    ago_s=max(0.0, now - refused.at_s),
                    request_id=refused.request_id,
                    status=refused.status,
                    reason=refused.reason,
                )
                for refused in self._refusals
            ],
        )


def _percentile(values: list[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


RATE_S = 5
"""The output rate is averaged over this many whole seconds."""


def _rate(outputs: Iterable[tuple[int, int]], now: float) -> float:
    """Return tokens per second over the last whole seconds before the present one."""
    this = int(now)
    return sum(number for second, number in outputs if this - RATE_S <= second < this) / RATE_S
