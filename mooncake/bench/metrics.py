"""The figures of a finished benchmark, defined as in `vllm bench serve`. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from mooncake.base import ConfigError
from mooncake.bench.endpoint import Output
from mooncake.bench.server_counters import NO_DRAFTS, DraftCounts
from mooncake.telemetry.stats import percentile

GOODPUT_NAMES = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A distribution of times, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: list[tuple[float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """All figures of one benchmark run: the content of its table and its JSON file."""

    num_completed: int
    num_failed: int
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_good: int | None
    """Requests within all limits of the goodput; None: there are no limits."""
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    spreads: dict[str, Spread]
    """ttft, tpot, itl, e2el, client_queue_time -> its distribution."""
    drafts: DraftCounts = NO_DRAFTS
    """The counts of drafts, as far as the server has reported them."""
    expert_balance_before: float | None = None
    """The mean rows of ranks that share experts, divided by the most, from the server's start to
    the run.
    """
    expert_balance: float | None = None
    """The same for the windows that ended in the run. None: none ended, or no ranks share
    experts.
    """

    @property
    def request_throughput(self) -> float:
        return self.num_completed / self.duration_s

    @property
    def request_goodput(self) -> float | None:
        return None if self.num_good is None else self.num_good / self.duration_s

    @property
    def output_throughput(self) -> float:
        return self.num_output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.duration_s


def metrics_of(
    outputs: Sequence[Output],
    duration_s: float,
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> Metrics:
    """Return the figures of `outputs`. Failed requests count as failed and nowhere else."""
    good = [output for output in outputs if output.success]
    series = {
        "ttft": [output.ttft_s for output in good],
        "tpot": [output.tpot_s for output in good if output.num_output_tokens > 1],
        "itl": [gap for output in good for gap in output.itls_s],
        "e2el": [output.latency_s for output in good],
        "client_queue_time": [output.queued_s for output in good],
    }
    return Metrics(
        num_completed=len(good),
        num_failed=len(outputs) - len(good),
        duration_s=duration_s,
        num_input_tokens=sum(output.num_prompt_tokens for output in good),
        num_output_tokens=sum(output.num_output_tokens for output in good),
        num_good=sum(_within(output, goodput_ms) for output in good) if goodput_ms else None,
        max_output_tokens_per_s=float(_busiest_second(good)),
        max_concurrent_requests=_most_at_once(good),
        spreads={name: spread(values, percentiles) for name, values in series.items()},
    )


def spread(values_s: Sequence[float], percentiles: Sequence[float]) -> Spread:
    """Return the distribution of `values_s` (seconds) in milliseconds; zeros when empty."""
    values = [value * 1000 for value in values_s] or [0.0]
    return Spread(
        mean=statistics.fmean(values),
        median=percentile(values, 50),
        std=statistics.pstdev(values),
        percentiles=[(p, percentile(values, p)) for p in percentiles],
    )


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Return the limits in "ttft:300 tpot:50" in milliseconds.

    Raises:
        ConfigError: a word does not have that form.
    """
    limits: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in GOODPUT_NAMES or not limits[name] >= 0:
            raise ConfigError(
                f"goodput: {word!r} is not NAME:MILLISECONDS with NAME one of "
                f"{', '.join(GOODPUT_NAMES)}"
            )
    return limits


def _within(output: Output, limits_ms: Mapping[str, float]) -> bool:
    times_s = {"ttft": output.ttft_s, "tpot": output.tpot_s, "e2el": output.latency_s}
    return all(times_s[name] * 1000 <= limit for name, limit in limits_ms.items())


def _busiest_second(outputs: Sequence[Output]) -> int:
    """Return how many events with text came in the busiest whole second after the first start."""
    first_s = min((output.start_s for output in outputs), default=0.0)
    buckets: dict[int, int] = {}
    for output in outputs:
        at_s = output.start_s + output.ttft_s - first_s
        for gap in (0.0, *output.itls_s):
            at_s += gap
            buckets[int(at_s)] = buckets.get(int(at_s), 0) + 1
    return max(buckets.values(), default=0)


def _most_at_once(outputs: Sequence[Output]) -> int:
    """Return the largest number of requests that ran at the same time. A request that ends at the
    moment when another starts does not overlap it.
    """
    changes = [(output.start_s, 1) for output in outputs]
    changes += [(output.start_s + output.latency_s, -1) for output in outputs]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
