"""`mooncake bench throughput|latency`: an engine in this process, timed from outside.

The engine is passed in as one function, built by `launch`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from mooncake.bench.samples import Sample
from mooncake.telemetry.stats import percentile

Generate = Callable[[Sequence[Sample]], int]
"""Runs all samples at once to their full length. Returns how many tokens were generated."""

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """Throughput of one batch of requests."""

    elapsed_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    def lines(self) -> list[str]:
        requests, total, output = (
            number / self.elapsed_s
            for number in (self.num_requests, self.num_tokens, self.num_output_tokens)
        )
        return [
            f"Throughput: {requests:.2f} requests/s, {total:.2f} total tokens/s, "
            f"{output:.2f} output tokens/s",
            f"Total num prompt tokens:  {self.num_prompt_tokens}",
            f"Total num output tokens:  {self.num_output_tokens}",
        ]

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def document(self) -> dict[str, Any]:
        return {
            "elapsed_time": self.elapsed_s,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_tokens,
            "requests_per_second": self.num_requests / self.elapsed_s,
            "tokens_per_second": self.num_tokens / self.elapsed_s,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """Latencies of equal batches run one after the other."""

    seconds: tuple[float, ...]

    @property
    def percentiles(self) -> dict[int, float]:
        return {percent: percentile(self.seconds, percent) for percent in PERCENTILES}

    def lines(self) -> list[str]:
        return [
            f"Avg latency: {statistics.fmean(self.seconds)} seconds",
            *(
                f"{percent}% percentile latency: {value} seconds"
                for percent, value in self.percentiles.items()
            ),
        ]

    def document(self) -> dict[str, Any]:
        return {
            "avg_latency": statistics.fmean(self.seconds),
            "latencies": list(self.seconds),
            "percentiles": {str(percent): value for percent, value in self.percentiles.items()},
        }


def throughput(
    generate: Generate, samples: Sequence[Sample], clock: Callable[[], float] = time.perf_counter
) -> Throughput:
    """Run `samples` as one batch and return the measured throughput."""
    start_s = clock()
    num_output_tokens = generate(samples)
    return Throughput(
        elapsed_s=clock() - start_s,
        num_requests=len(samples),
        num_prompt_tokens=sum(sample.num_prompt_tokens for sample in samples),
        num_output_tokens=num_output_tokens,
    )


def latency(
    generate: Generate,
    batches: Sequence[Sequence[Sample]],
    num_warmups: int,
    done: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Latency:
    """Run the batches one after the other and return the times of all but the warm-ups.

    `done` is called after each batch.
    """
    seconds = []
    for number, batch in enumerate(batches):
        start_s = clock()
        generate(batch)
        if number >= num_warmups:
            seconds.append(clock() - start_s)
        done()
    return Latency(seconds=tuple(seconds))
