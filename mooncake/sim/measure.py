"""Measurements of a simulated cluster: the times of every request, and the cluster over time.

The clients' streams and lifetime events feed it. It decides nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.base import FinishReason, Overloaded
from mooncake.base.request import FinalEvent, OutputEvent, RequestOutput
from mooncake.sim.workload import Arrival
from mooncake.telemetry.events import AnyEvent, Placed, Refused
from mooncake.telemetry.stats import slow_gap_mean

WELL = (FinishReason.STOP, FinishReason.LENGTH)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in four figures; zeros where nothing was measured."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64], scale: float = 1.0) -> Spread:
        """Return the spread of `values` times `scale`."""
        if not len(values):
            return cls()
        data = np.asarray(values, dtype=np.float64) * scale
        p50, p90, p99 = np.percentile(data, (50, 90, 99))
        figures = (float(data.mean()), float(p50), float(p90), float(p99))
        mean, p50, p90, p99 = (round(figure, 6) for figure in figures)
        return cls(mean=mean, p50=p50, p90=p90, p99=p99)


class RequestMeasure:
    """One request as its client sees it."""

    __slots__ = (
        "abandoned", "arrival", "final", "first_s", "gaps_s", "last_s", "num_cached_tokens",
        "num_finals", "num_tokens", "on_final", "prefill", "refused", "shed", "slow_gap_s",
        "submitted_s",
    )  # fmt: skip

    def __init__(
        self, arrival: Arrival, submitted_s: float, on_final: Callable[[RequestMeasure], None]
    ) -> None:
        self.arrival = arrival
        self.submitted_s = submitted_s
        self.on_final = on_final
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps_s = array("d")
        self.final: FinishReason | None = None
        self.refused: str | None = None
        """Why the request was refused, if it was."""
        self.shed = False
        """Whether it was refused after its prompt had been computed."""
        self.abandoned = False
        """Whether its gateway was restarted, so that no final event will come."""
        self.num_finals = 0
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.slow_gap_s = 0.0
        self.prefill: str | None = None

    def receive(self, event: OutputEvent, now: float) -> None:
        """Record an event that the client received."""
        if isinstance(event, RequestOutput):
            if self.first_s is None:
                self.first_s = now
            else:
                self.gaps_s.append(now - self.last_s)
            self.last_s = now
            self.num_tokens += len(event.tokens)
        else:
            self._end(event)

    def _end(self, event: FinalEvent) -> None:
        self.num_finals += 1
        self.final = event.reason
        self.shed = (
            event.reason is FinishReason.ERROR
            and event.failure is not None
            and event.failure.status == Overloaded.http_status
        )
        self.num_cached_tokens = event.num_cached_tokens
        if self.gaps_s:
            self.slow_gap_s = slow_gap_mean(self.gaps_s) or 0.0
        self.on_final(self)

    @property
    def completed(self) -> bool:
        return self.final in WELL

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.submitted_s

    def inside(self, ttft_slo_s: float, tbt_slo_s: float) -> bool:
        """Whether the request kept both limits, which makes it an effective request (Mooncake,
        FAST'25, section 5: a request's TBT is the mean of its slowest tenth of gaps).
        """
        ttft_s = self.ttft_s
        return (
            self.completed
            and ttft_s is not None
            and ttft_s <= ttft_slo_s
            and self.slow_gap_s <= tbt_slo_s
        )


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at one moment. Loads are predicted times divided by their limits."""

    at_s: float
    prefill_load: float
    """The mean predicted queueing time of prefill instances, divided by the TTFT limit."""
    decode_load: float
    """The mean predicted gap between tokens of decode instances, divided by the TBT limit."""
    prefill_busy: float
    """The share of the time since the last moment in which prefill instances computed."""
    decode_busy: float
    num_decoding: int
    hit_rate: float
    """The hit rate of the prompts finished since the last moment."""
    num_completed: int
    num_rejected: int
    replicas: list[float]
    """How many copies the pools have of the 1st, 10th, 100th, 1000th, 10000th most used block."""
    holders: list[float] = []
    """How many nodes have them for prefill to use: in a pool or in a prefill instance's own
    HBM.
    """


class Measures:
    """All requests of one run; also the gateway's recorder of lifetime events."""

    def __init__(self) -> None:
        self.requests: list[RequestMeasure] = []
        self.rejected: Counter[str] = Counter()
        """Rejected requests by reason."""
        self.num_ended = 0
        self.num_completed = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self.num_placed = 0
        self.timeline: list[Moment] = []
        self._by_id: dict[str, RequestMeasure] = {}

    def begin(self, arrival: Arrival, now: float) -> RequestMeasure:
        """Record that a request is about to be submitted."""
        measure = RequestMeasure(arrival, now, self._ended)
        self.requests.append(measure)
        self._by_id[arrival.request_id] = measure
        return measure

    def abandon(self) -> None:
        """Record that the gateway restarts: its open requests have ended for their clients."""
        for measure in self._by_id.values():
            measure.abandoned = True
        self.num_ended += len(self._by_id)
        self._by_id.clear()

    def record(self, event: AnyEvent) -> None:
        """Record a lifetime event (see `telemetry.events.Recorder`)."""
        if isinstance(event, Placed):
            self.num_placed += 1
            measure = self._by_id.get(event.request_id)
            if measure is not None:
                measure.prefill = event.prefill
        elif isinstance(event, Refused):
            measure = self._by_id.get(event.request_id)
            if measure is not None:
                measure.refused = event.reason
            self.rejected[event.reason] += 1

    def _ended(self, measure: RequestMeasure) -> None:
        self.num_ended += 1
        self._by_id.pop(measure.arrival.request_id, None)
        if measure.completed:
            self.num_completed += 1
            self.hit_tokens += measure.num_cached_tokens
            self.prompt_tokens += measure.arrival.line.input_length
