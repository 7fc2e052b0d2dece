"""A worker's own series in Prometheus' text format: its state, load, transfer links and process.

Reads the worker between two events of its driver. The series of a gateway about its workers are
`telemetry.series`; these have names of their own, so that no sum counts anything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from mooncake import __version__
from mooncake.base import Role, WorkerLoad
from mooncake.launch.host.build import revision
from mooncake.launch.host.families import families
from mooncake.telemetry.health import Probe, Vitals, judge
from mooncake.transfer.link_stats import LATENCY_BOUNDS_S, LinkSnapshot

LABELS = ["worker", "role"]
BUILD_LABELS = [*LABELS, "version", "revision"]
BUILD = "always 1; the labels say what the process runs"
HEALTH = {
    "health": "1 if the process passes the probe",
    "loop_stuck_seconds": "time since the process' loop ran; above --step-timeout the process ends",
}
"""Name of a gauge of every process -> its help text; `health` has the label `probe` too."""


class EngineFigures(msgspec.Struct, frozen=True):
    """The figures that an engine's worker reports."""

    load: WorkerLoad
    step_stalled_s: float
    """How long its steps have made no progress, in seconds."""


GAUGES: dict[str, tuple[str, Callable[[EngineFigures], float]]] = {
    "requests_running": ("sequences in the worker's batch", lambda f: f.load.num_running),
    "requests_waiting": ("sequences that wait for the worker", lambda f: f.load.num_waiting),
    "queued_tokens": (
        "prompt tokens accepted and not yet computed",
        lambda f: f.load.num_queued_tokens,
    ),
    "context_tokens": (
        "tokens in the KV of running sequences",
        lambda f: f.load.num_context_tokens,
    ),
    "blocks": ("KV blocks of the worker", lambda f: f.load.num_total_blocks),
    "blocks_free": ("free KV blocks, cached ones included", lambda f: f.load.num_free_blocks),
    "blocks_cached": ("free blocks with reusable content", lambda f: f.load.num_cached_blocks),
    "draining": ("1 if the worker wants to leave", lambda f: int(f.load.draining)),
    "step_stalled_seconds": (
        "time for which its steps have made no progress; above --step-timeout it ends",
        lambda f: f.step_stalled_s,
    ),
}
"""Name of a figure of an engine's worker -> its help text, and how its value is read."""
COUNTS = "events"
"""The family of the counters that a worker keeps, one series for each `name`."""


def health_families(worker: str, role: Role, parts: Sequence[Vitals]) -> Iterator[Metric]:
    """Yield what probes are told about a process, which is as its worst part is."""
    values = worker, role.value
    build = GaugeMetricFamily("mooncake_build_info", BUILD, labels=BUILD_LABELS)
    build.add_metric([*values, __version__, revision()], 1)
    yield build
    health = GaugeMetricFamily("mooncake_health", HEALTH["health"], labels=[*LABELS, "probe"])
    for probe in Probe:
        health.add_metric([*values, probe.value], judge(probe, parts)[0])
    yield health
    name = "loop_stuck_seconds"
    stuck = GaugeMetricFamily(f"mooncake_{name}", HEALTH[name], labels=LABELS)
    stuck.add_metric(values, max((part.stuck_s for part in parts), default=0.0))
    yield stuck


def engine_families(worker: str, role: Role, figures: EngineFigures) -> Iterator[Metric]:
    """Yield the load and the counters of an engine's worker."""
    values = worker, role.value
    yield from families(GaugeMetricFamily, "worker_", GAUGES, LABELS, [(values, figures)])
    events = {COUNTS: ("counters that a worker keeps", float)}
    rows = [((*values, name), value) for name, value in figures.load.counters.items()]
    yield from families(CounterMetricFamily, "worker_", events, [*LABELS, "name"], rows)


LINK_LABELS = ["worker", "protocol", "nic", "peer"]
LATENCY_LABELS = LINK_LABELS[:-1]
"""Labels of the latency histogram. It has many series, so it sums over all peers."""
LINK_COUNTS: dict[str, tuple[str, Callable[[LinkSnapshot], float]]] = {
    "bytes": ("bytes moved over a link", lambda link: link.num_bytes),
    "busy_seconds": (
        "time during which a transfer was under way; bytes divided by this is the link's speed",
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
    yield from families(CounterMetricFamily, "transfer_", LINK_COUNTS, LINK_LABELS, rows)
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
