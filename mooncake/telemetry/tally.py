"""Series of what happens at every token. One thread fills them, without a lock.

`prometheus_client` takes a lock for each sum and each bucket. That was a fifth of all that a token
cost the gateway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Tally:
    """A Prometheus histogram of one series. One thread observes; any thread may collect."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        labels: dict[str, str],
        bounds: Sequence[float],
        counter: tuple[str, str] | None = None,
    ) -> None:
        """bounds: the largest value of each bucket, rising. One more bucket takes larger values.
        counter: the name and text of a counter that is the sum of all values.
        """
        self._name, self._text, self._labels = name, text, labels
        self._labelnames = tuple(labels)
        self._bounds = tuple(bounds)
        self._counter = counter
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """Yield the series with their present values. The registry calls this."""
        values = list(self._labels.values())
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        histogram = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        histogram.add_metric(values, buckets, self._sum)
        yield histogram
        if self._counter is not None:
            counter = CounterMetricFamily(*self._counter, labels=self._labelnames)
            counter.add_metric(values, self._sum)
            yield counter
