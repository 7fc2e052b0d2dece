"""Prometheus families of what went over each transfer link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from mooncake.transfer.link_stats import LATENCY_BOUNDS_S, LinkSnapshot

LABELS = ["worker", "protocol", "nic", "peer"]
LATENCY_LABELS = LABELS[:-1]
"""Labels of the latency histogram. It has many series, so it sums over all peers."""
COUNTS: dict[str, tuple[str, Callable[[LinkSnapshot], float]]] = {
    "bytes": ("bytes moved over a link", lambda link: link.num_bytes),
    "busy_seconds": (
        "time during which something was under way; bytes divided by this is the link's speed",
        lambda link: link.busy_s,
    ),
    "retries": ("slices that were sent again", lambda link: link.num_retries),
    "failures": ("number of times that the link broke", lambda link: link.num_failures),
}
"""Name of a counter of a link -> its help text, and how its value is read."""
_BOUNDS = [*(f"{bound:g}" for bound in LATENCY_BOUNDS_S), "+Inf"]


class LinkFamilies:
    """Collects the metrics of one worker's links for Prometheus."""

    def __init__(self, worker: str, links: Sequence[LinkSnapshot]) -> None:
        self._worker = worker
        self._links = links

    def collect(self) -> Iterator[Metric]:
        """Yield the families: counters of each link, a histogram of each NIC."""
        for name, (text, value_of) in COUNTS.items():
            counter = CounterMetricFamily(f"mooncake_transfer_{name}", text, labels=LABELS)
            for link in self._links:
                counter.add_metric(self._labels(link), value_of(link))
            yield counter
        text = "time from posting a slice to its arrival"
        latency = HistogramMetricFamily(
            "mooncake_transfer_slice_seconds", text, labels=LATENCY_LABELS
        )
        of_nics: dict[tuple[str, ...], list[LinkSnapshot]] = {}
        for link in self._links:
            of_nics.setdefault((self._worker, link.protocol, link.nic), []).append(link)
        for labels, links in of_nics.items():
            counts = map(sum, zip(*(link.latency_buckets for link in links), strict=True))
            buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
            latency.add_metric(labels, buckets, sum_value=sum(link.latency_s for link in links))
        yield latency

    def _labels(self, link: LinkSnapshot) -> list[str]:
        return [self._worker, link.protocol, link.nic, link.peer]
