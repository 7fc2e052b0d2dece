"""The Prometheus series by name. `telemetry.metrics` sets each one, and a test proves it.

Owns the `prometheus_client` objects; knows no events.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from mooncake.base import Role, WorkerLoad


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


disable_created_metrics()  # type: ignore[no-untyped-call]
"""Without this, the library adds to each counter and histogram a gauge with the time of its first
value, which nobody needs. The library's only switch for it is this one, for the whole process.
"""
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 15, 20,
    25, 30, 35, 40, 80, 160, 640, 2560,
)  # fmt: skip
"""The buckets are finer around 30 s, the limit of the alert on late first tokens."""
_HELD_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10)
_GAP_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5,
    10, 20, 40,
)  # fmt: skip
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 1920, 7680)
_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000
)  # fmt: skip
_ERROR_RATIO = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_BURST = (1, 2, 4, 8, 16, 32)

MAX_TENANTS = 1000
"""At most this many tenants have counters of their own, because a file of keys may change often."""
OTHER_TENANTS = "(others)"
"""The label of all tenants beyond `MAX_TENANTS`."""

MAX_GONE_WORKERS = 64
"""The counters of this many lost workers are kept: long enough for a last scrape, and a worker that
comes back continues its counters.
"""


class BuildInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What software a process runs: the labels of `build_info`."""

    version: str
    revision: str
    """The commit of git; empty when it is not known."""
    role: str
    layout: str
    """The beginning of the KV layout's fingerprint, which all workers of one cluster share."""


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How the KVCache is set up: the labels of `cache_config_info`, by vLLM's names."""

    block_size: str
    cache_dtype: str
    enable_prefix_caching: str
    num_gpu_blocks: str
    """KV blocks of one engine."""


def set_infos(registry: CollectorRegistry, model_name: str, *infos: BuildInfo | CacheInfo) -> None:
    """Add a series that is always 1 for each of `infos`, whose fields are its labels."""
    for info in infos:
        name, text = _INFOS[type(info)]
        labels = {"model_name": model_name, **msgspec.structs.asdict(info)}
        Gauge(f"mooncake:{name}", text, list(labels), registry=registry).labels(**labels).set(1)


_INFOS: dict[type, tuple[str, str]] = {
    BuildInfo: ("build_info", "Always 1; the labels say what this gateway runs."),
    CacheInfo: (
        "cache_config_info",
        "Always 1; the labels say how engines' KVCache is set up. Only if the gateway's process "
        "starts them, and is told how many blocks they have.",
    ),
}


class RequestSeries:
    """Series about requests, bound to one `model_name`."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"mooncake:{name}", text, ["model_name"], registry=registry).labels(
                model_name
            )

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"mooncake:{name}", text, ["model_name"], registry=registry).labels(
                model_name
            )

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"mooncake:{name}", text, ["model_name"], buckets=buckets, registry=registry
            ).labels(model_name)

        def labelled(name: str, text: str, label: str) -> _Labelled:
            names = ["model_name", label]
            return _Labelled(
                Counter(f"mooncake:{name}", text, names, registry=registry), model_name
            )

        self.running = gauge(
            "num_requests_running", "Requests that have produced their first token."
        )
        self.waiting = gauge("num_requests_waiting", "Requests without a first token so far.")
        self.batches = gauge("batches_running", "Batches that this gateway runs.")
        self.batch_lines_asked = gauge("batch_lines_asked", "Batch lines that are being asked.")
        self.batch_lines_left = gauge("batch_lines_left", "Batch lines without a result so far.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens reused, not computed.")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens found in any tier.")
        self.hits_by_tier = labelled(
            "prompt_tokens_hit", "Prompt tokens reused, by the place they came from.", "tier"
        )
        self.misses = labelled(
            "prompt_tokens_missed",
            "Prompt tokens of reusable blocks that were computed, by reason.", "reason",
        )  # fmt: skip
        self.planned_fetch_blocks = counter(
            "planned_fetch_blocks", "Blocks the Conductor told workers to fetch from a pool node."
        )
        self.requeued = counter("requests_requeued", "Attempts lost because a worker failed.")
        self.resumed = counter("requests_resumed", "Requests placed again after a lost attempt.")
        self.success = labelled(
            "request_success", "Requests that finished or were aborted.", "finished_reason"
        )
        self.failure = labelled("request_failure", "Accepted requests that failed.", "status")
        self.placements = labelled(
            "placements", "Placements by the role that computes the prompt.", "prompt_on"
        )
        self.slo = labelled(
            "request_slo", "Finished requests by their limits, met or missed.", "outcome"
        )
        self._refusals = Counter(
            "mooncake:requests_rejected",
            "Requests refused before any work was done.",
            ["model_name", "reason", "status"],
            registry=registry,
        )
        self._model_name = model_name
        self.ttft_s = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        own = {"model_name": model_name}
        self.gap_s = Tally(
            registry, "mooncake:inter_token_latency_seconds", "Gap between tokens.", own, _GAP_S
        )
        self.slow_gap_s = histogram(
            "request_tbt_seconds", "Mean of the slowest 10 % of a request's gaps.", _GAP_S
        )
        self.time_per_token_s = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _GAP_S
        )
        self.e2e_s = histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S)
        self.queue_s = histogram("request_queue_time_seconds", "Arrival to placement.", _TTFT_S)
        self.prefill_s = histogram(
            "request_prefill_time_seconds", "First placement to first token.", _REQUEST_S
        )
        self.decode_s = histogram("request_decode_time_seconds", "First token to end.", _REQUEST_S)
        self.loop_held_s = histogram(
            "event_loop_held_seconds",
            "Time in which one piece of the gateway's own work stopped its streams.",
            _HELD_S,
        )
        self.ttft_error_s = histogram(
            "ttft_prediction_error_seconds", "Absolute error of the predicted TTFT.", _TTFT_S
        )
        self.ttft_error_ratio = histogram(
            "ttft_prediction_error_ratio",
            "Absolute error of the predicted TTFT, as a share of the measured TTFT.",
            _ERROR_RATIO,
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt length.", _TOKENS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Output length.", _TOKENS
        )
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens of requests.", _TOKENS)
        self.tokens_per_event = Tally(
            registry,
            "mooncake:tokens_per_event",
            "Tokens per event to the client.",
            own,
            _BURST,
            counter=("mooncake:generation_tokens", "Tokens generated."),
        )

    def refused(self, reason: str, status: int) -> None:
        self._refusals.labels(self._model_name, reason, str(status)).inc()


class TenantSeries:
    """Series that name tenants. They are for operators, so they have a registry of their own."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._tenants: dict[str, tuple[Counter, Counter]] = {}
        self._tokens = [
            Counter(f"mooncake:tenant_{name}", text, ["model_name", "tenant"], registry=registry)
            for name, text in (
                ("prompt_tokens", "Prompt tokens of a tenant's ended requests. For operators."),
                ("generation_tokens", "Output tokens of a tenant's ended requests. For operators."),
            )
        ]

    def used_by(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHER_TENANTS
        if tenant not in self._tenants:
            prompt, output = (each.labels(self._model_name, tenant) for each in self._tokens)
            self._tenants[tenant] = prompt, output
        prompt, output = self._tenants[tenant]
        prompt.inc(num_prompt_tokens)
        output.inc(num_output_tokens)


class _Labelled:
    """A family of counters with `model_name` filled in."""

    def __init__(self, family: Counter, model_name: str) -> None:
        self._family = family
        self._model_name = model_name

    def labels(self, value: str) -> Counter:
        return self._family.labels(self._model_name, value)


class WorkerSeries:
    """Series about workers, labelled with the worker's name and role."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name

        def gauge(name: str, text: str) -> Gauge:
            labels = ["model_name", "worker", "role"]
            return Gauge(f"mooncake:{name}", text, labels, registry=registry)

        self._up = Gauge(
            "mooncake:workers_up", "Live workers.", ["model_name", "role"], registry=registry
        )
        self._lost = Counter(
            "mooncake:workers_lost", "Workers lost.", ["model_name", "role"], registry=registry
        )
        self._wanted = Gauge(
            "mooncake:desired_replicas",
            "Replicas of a role that the predicted load needs to keep the limits.",
            ["model_name", "role"],
            registry=registry,
        )
        self._without_pool = Gauge(
            "mooncake:engines_without_pool",
            "Engines that write to no pool: their node has none, and others have one.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self._nodes: dict[str, tuple[Role, str]] = {}
        """The role of each live worker, and its node."""
        self._gauges = {name: gauge(name, text) for name, (text, _) in _LOADS.items()}
        self._cost_error = gauge(
            "cost_model_error_ratio", "Mean relative error of predicted step times."
        )
        labels = ["model_name", "worker", "name"]
        self._counts = Counter(
            "mooncake:worker_events", "Counters that a worker reports.", labels, registry=registry
        )
        self._accepted_at = Counter(
            f"mooncake:{_ACCEPTED_AT.removesuffix('_')}",
            "Accepted drafts, by their position among a step's drafts of a sequence.",
            ["model_name", "position"],
            registry=registry,
        )
        self._gone: dict[str, None] = {}
        """Lost workers whose counters are still kept. The one that left first comes first."""
        self._named = {
            (from_pool, name): Counter(
                f"mooncake:{_RENAMED.get(name, name)}", text, ["model_name"], registry=registry
            ).labels(model_name)
            for from_pool, counts in ((False, _ENGINE_COUNTS), (True, _POOL_COUNTS))
            for name, text in counts.items()
        }

    def joined(self, worker_id: str, role: Role, num_blocks: int, node_id: str) -> None:
        """Start the series of a worker."""
        self._nodes[worker_id] = role, node_id
        self._count_engines_without_pool()
        self._gone.pop(worker_id, None)
        self._up.labels(self._model_name, role.value).inc()
        self._lost.labels(self._model_name, role.value)
        blocks = self._gauges["worker_blocks"]
        blocks.labels(self._model_name, worker_id, role.value).set(num_blocks)

    def wanted(self, role: Role, number: int) -> None:
        """Set how many replicas of a role there should be."""
        self._wanted.labels(self._model_name, role.value).set(number)

    def left(self, worker_id: str, role: Role) -> None:
        """Remove the gauges of a lost worker. Its counters go only after many more workers were
        lost.
        """
        self._nodes.pop(worker_id, None)
        self._count_engines_without_pool()
        self._up.labels(self._model_name, role.value).dec()
        self._lost.labels(self._model_name, role.value).inc()
        for gauge in (*self._gauges.values(), self._cost_error):
            gauge.remove(self._model_name, worker_id, role.value)
        self._gone[worker_id] = None
        if len(self._gone) > MAX_GONE_WORKERS:
            first = next(iter(self._gone))
            del self._gone[first]
            self._counts.remove_by_labels({"worker": first})

    def _count_engines_without_pool(self) -> None:
        workers = self._nodes.values()
        pools = {node for role, node in workers if role is Role.KVSTORE}
        engines = [node for role, node in workers if role in (Role.PREFILL, Role.DECODE)]
        self._without_pool.set(sum(node not in pools for node in engines) if pools else 0)

    def reported(
        self, worker_id: str, role: Role, load: WorkerLoad, cost_error_ratio: float | None
    ) -> None:
        """Set the gauges of a worker to its newest load."""
        for name, (_, value_of) in _LOADS.items():
            gauge = self._gauges[name].labels(self._model_name, worker_id, role.value)
            gauge.set(value_of(load))
        if cost_error_ratio is not None:
            self._cost_error.labels(self._model_name, worker_id, role.value).set(cost_error_ratio)

    def count(self, worker_id: str, role: Role, name: str, amount: float) -> None:
        """Add the growth of a worker's counter `name` since its last report."""
        if amount <= 0:
            return
        self._counts.labels(self._model_name, worker_id, name).inc(amount)
        if name.startswith(_ACCEPTED_AT):
            position = name.removeprefix(_ACCEPTED_AT)
            self._accepted_at.labels(self._model_name, position).inc(amount)
        named = self._named.get((role == Role.KVSTORE, name))
        if named is not None:
            named.inc(amount)


_ACCEPTED_AT = "spec_decode_num_accepted_tokens_per_pos_"
"""The name of an engine's counter of accepted drafts, without the position's number."""
_ENGINE_COUNTS = {
    "preemptions": "Sequences preempted for lack of blocks.",
    "spec_decode_num_drafts": "Steps of a sequence that computed drafts of its next tokens.",
    "spec_decode_num_draft_tokens": "Drafts computed.",
    "spec_decode_num_accepted_tokens": "Accepted drafts: tokens that needed no step of their own.",
    "blocks_fetched": "KV blocks fetched from a pool node.",
    "blocks_prefetched": "KV blocks of busy prefixes fetched before a request asked for them.",
    "fetches_failed": "Fetches of blocks that failed (each counts as a miss).",
    "blocks_put": "KV blocks written through to a pool node.",
    "blocks_fetched_corrupt": "KV blocks that arrived from a pool node with a wrong checksum.",
    "blocks_pushed_compared": "KV blocks that decode has compared with the checksums of what "
    "prefill sent.",
    "blocks_pushed_corrupt": "KV blocks that differed from what prefill sent; they were computed "
    "again.",
}
"""Counters of an engine that have a series without a worker's name -> their help text."""
_POOL_COUNTS = {"blocks_evicted": "KV blocks that a pool node evicted."}
"""The same of a pool node."""
_RENAMED = {"preemptions": "num_preemptions", "blocks_evicted": "pool_blocks_evicted"}
"""Counters of workers -> the name of their series, if that is another."""


def _usage(load: WorkerLoad) -> float:
    total = load.num_total_blocks
    return (total - load.num_free_blocks) / total if total else 0.0


_LOADS: dict[str, tuple[str, Callable[[WorkerLoad], float]]] = {
    "worker_requests_running": ("Sequences in a worker's batch.", lambda load: load.num_running),
    "worker_requests_waiting": ("Sequences waiting on a worker.", lambda load: load.num_waiting),
    "worker_queued_tokens": (
        "Prompt tokens accepted, not yet computed.", lambda load: load.num_queued_tokens,
    ),
    "worker_context_tokens": (
        "Tokens in the KV of running sequences.", lambda load: load.num_context_tokens,
    ),
    "worker_blocks": ("KV blocks of a worker.", lambda load: load.num_total_blocks),
    "worker_free_blocks": (
        "KV blocks free, cached ones included.", lambda load: load.num_free_blocks,
    ),
    "worker_cached_blocks": (
        "Free KV blocks that hold reusable content.", lambda load: load.num_cached_blocks,
    ),
    "kv_cache_usage_perc": ("Share of a worker's KV blocks in use, 0 to 1.", _usage),
}  # fmt: skip
"""Gauge of a worker -> its help text, and how its value is read from a load report."""
