"""Prometheus families of what went over each transfer link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from mooncake.launch.host.families import families
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


def link_families(worker: str, links: Sequence[LinkSnapshot]) -> Iterator[Metric]:
    """Yield the families of one worker's links: counters of each link, a histogram of each NIC."""
    rows = [((worker, link.protocol, link.nic, link.peer), link) for link in links]
    yield from families(CounterMetricFamily, "transfer_", COUNTS, LABELS, rows)
    text = "time from posting a slice to its arrival"
    latency = HistogramMetricFamily("mooncake_transfer_slice_seconds", text, labels=LATENCY_LABELS)
    of_nics: dict[tuple[str, ...], list[LinkSnapshot]] = {}
    for labels, link in rows:
        of_nics.setdefault(labels[:-1], []).append(link)
    for nic, of_nic in of_nics.items():
        counts = map(sum, zip(*(link.latency_buckets for link in of_nic), strict=True))
        buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
        latency.add_metric(nic, buckets, sum_value=sum(link.latency_s for link in of_nic))
    yield latency
