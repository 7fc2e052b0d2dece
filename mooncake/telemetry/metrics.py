"""The metrics for Prometheus. Every series is derived from lifetime events, in a registry of its
own.

Names are vLLM's with the prefix `mooncake:`, so its dashboards need one word changed. The metrics
object owns the state of requests that were accepted and have not finished.

The series are kept, and summed over gateways. The recent status has the latencies, hit rate, output
rate and refusals of the last minute. Its memory is bounded under any load; the cluster page shows
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, generate_latest

from mooncake.base import FinishReason
from mooncake.telemetry.events import (
    Accepted,
    AnyEvent,
    BatchesSeen,
    Finished,
    FirstToken,
    LoopHeld,
    Placed,
    Refused,
    ReplicasWanted,
    Requeued,
    Tokens,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from mooncake.telemetry.series import (
    BuildInfo,
    CacheInfo,
    RequestSeries,
    TenantSeries,
    WorkerSeries,
    set_infos,
)
from mooncake.telemetry.stats import percentile, slow_gap_mean

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


_FINISHED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class _Live:
    accepted_s: float
    num_prompt_tokens: int
    max_tokens: int
    tenant: str
    ttft_slo_s: float | None
    tbt_slo_s: float | None
    placed_s: float | None = None
    predicted_ttft_s: float = 0.0
    waiting: bool = True
    first_token_s: float | None = None
    last_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


class Metrics:
    """A recorder that turns events into Prometheus series.

    `model_name` is the label by which vLLM's dashboards select. `infos` are shown unchanged.
    """

    def __init__(self, model_name: str, *infos: BuildInfo | CacheInfo) -> None:
        self._registry, self._operators = CollectorRegistry(), CollectorRegistry()
        set_infos(self._registry, model_name, *infos)
        self._requests = RequestSeries(self._registry, model_name)
        self._tenants = TenantSeries(self._operators, model_name)
        self._workers = WorkerSeries(self._registry, model_name)
        self.recent = Recent()
        """The same figures of the last minute, for the cluster page."""
        self._live: dict[str, _Live] = {}
        self._counters: dict[str, dict[str, float]] = {}

    def render(self, for_operator: bool = False) -> bytes:
        """Return the series in the Prometheus text format. Series that name tenants are only for
        operators.
        """
        tenants = generate_latest(self._operators) if for_operator else b""
        return generate_latest(self._registry) + tenants

    def record(self, event: AnyEvent) -> None:
        """Take one event. Events of requests that were not accepted, or have finished, are
        ignored.
        """
        match event:
            case Tokens():
                self._on_tokens(event)
            case WorkerReported():
                self._on_report(event)
            case Accepted():
                self._on_accepted(event)
            case Refused():
                self._requests.refused(event.reason, event.status)
                self.recent.refused(event)
            case Placed():
                self._on_placed(event)
            case FirstToken():
                self._on_first_token(event)
            case Requeued():
                self._on_requeued(event)
            case Finished():
                self._on_finished(event)
            case LoopHeld():
                self._requests.loop_held_s.observe(event.held_s)
            case BatchesSeen():
                self._requests.batches.set(event.num_batches)
                self._requests.batch_lines_asked.set(event.num_lines_asked)
                self._requests.batch_lines_left.set(event.num_lines_left)
            case WorkerJoined():
                self._counters[event.worker_id] = {}
                self._workers.joined(event.worker_id, event.role, event.num_blocks, event.node_id)
            case ReplicasWanted():
                self._workers.wanted(event.role, event.wanted)
            case WorkerLeft():
                self._counters.pop(event.worker_id, None)
                self._workers.left(event.worker_id, event.role)

    def _on_accepted(self, event: Accepted) -> None:
        self._live[event.request_id] = _Live(
            accepted_s=event.at_s,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            tenant=event.tenant,
            ttft_slo_s=event.ttft_slo_s,
            tbt_slo_s=event.tbt_slo_s,
        )
        self._requests.waiting.inc()

    def _on_placed(self, event: Placed) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return
        if live.placed_s is None:
            self._requests.queue_s.observe(event.at_s - live.accepted_s)
            live.placed_s = event.at_s
            live.predicted_ttft_s = event.predicted_ttft_s
        else:
            self._requests.resumed.inc()
        where = "decode" if event.prefill is None else "prefill"
        self._requests.placements.labels(where).inc()
        self._requests.planned_fetch_blocks.inc(event.num_fetch_blocks)

    def _on_first_token(self, event: FirstToken) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return
        self._leave_waiting(live)
        ttft_s = event.at_s - live.accepted_s
        live.first_token_s = live.last_token_s = event.at_s
        self._requests.ttft_s.observe(ttft_s)
        self.recent.first_token(event.at_s, ttft_s, live.num_prompt_tokens, event.num_cached_tokens)
        self._requests.prompt_tokens.inc(live.num_prompt_tokens)
        self._requests.cached_tokens.inc(event.num_cached_tokens)
        self._requests.cache_queries.inc(live.num_prompt_tokens)
        self._requests.cache_hits.inc(event.num_cached_tokens)
        if event.cache is not None:
            for tier, number in asdict(event.cache.hits).items():
                self._requests.hits_by_tier.labels(tier).inc(number)
            for reason, number in asdict(event.cache.misses).items():
                self._requests.misses.labels(reason).inc(number)
        if live.placed_s is not None:
            since_placed_s = event.at_s - live.placed_s
            self._requests.prefill_s.observe(since_placed_s)
            error_s = abs(since_placed_s - live.predicted_ttft_s)
            self._requests.ttft_error_s.observe(error_s)
            if since_placed_s > 0:
                self._requests.ttft_error_ratio.observe(error_s / since_placed_s)

    def _on_tokens(self, event: Tokens) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return
        self._requests.tokens_per_event.observe(event.num_tokens)
        gap_s = event.at_s - live.last_token_s if event.start > 0 else None
        self.recent.tokens(event.at_s, event.num_tokens, gap_s)
        if gap_s is not None:
            live.last_token_s = event.at_s
            live.gaps_s.append(gap_s)
            self._requests.gap_s.observe(gap_s)

    def _on_requeued(self, event: Requeued) -> None:
        if event.request_id in self._live:
            self._requests.requeued.inc()

    def _on_finished(self, event: Finished) -> None:
        live = self._live.pop(event.request_id, None)
        if live is None:
            return
        if live.waiting:
            self._leave_waiting(live)
        self._requests.running.dec()
        if live.tenant:
            self._tenants.used_by(live.tenant, event.num_prompt_tokens, event.num_output_tokens)
        self._requests.e2e_s.observe(event.at_s - live.accepted_s)
        self._requests.request_prompt_tokens.observe(event.num_prompt_tokens)
        self._requests.request_generation_tokens.observe(event.num_output_tokens)
        self._requests.max_tokens.observe(live.max_tokens)
        if event.reason in {*_FINISHED_WELL, FinishReason.ABORT}:
            self._requests.success.labels(event.reason.value).inc()
        else:
            self._requests.failure.labels(str(event.status)).inc()
        if live.first_token_s is not None:
            self._observe_decode(live, event)
        if event.reason in _FINISHED_WELL:
            self._requests.slo.labels(_slo_outcome(live)).inc()

    def _observe_decode(self, live: _Live, event: Finished) -> None:
        assert live.first_token_s is not None
        decode_s = event.at_s - live.first_token_s
        self._requests.decode_s.observe(decode_s)
        if event.num_output_tokens > 1:
            per_token_s = (live.last_token_s - live.first_token_s) / (event.num_output_tokens - 1)
            self._requests.time_per_token_s.observe(per_token_s)
            self._requests.slow_gap_s.observe(slow_gap_mean(live.gaps_s))

    def _leave_waiting(self, live: _Live) -> None:
        live.waiting = False
        self._requests.waiting.dec()
        self._requests.running.inc()

    def _on_report(self, event: WorkerReported) -> None:
        before = self._counters.get(event.worker_id)
        if before is None:
            return
        self._workers.reported(event.worker_id, event.role, event.load, event.cost_error_ratio)
        for name, value in event.load.counters.items():
            grown = value - before.get(name, 0.0)
            self._workers.count(event.worker_id, event.role, name, grown)
            before[name] = max(value, before.get(name, 0.0))


def _slo_outcome(live: _Live) -> str:
    """Return "met", or the limit that a successful request missed."""
    ttft_s = (live.first_token_s or live.accepted_s) - live.accepted_s
    if live.ttft_slo_s is not None and ttft_s > live.ttft_slo_s:
        return "ttft_missed"
    if live.tbt_slo_s is not None and slow_gap_mean(live.gaps_s) > live.tbt_slo_s:
        return "tbt_missed"
    return "met"
