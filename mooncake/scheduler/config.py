"""The settings of scheduling: limits, thresholds, time-outs. Frozen; created by `launch`."""

from __future__ import annotations

import msgspec

from mooncake.base import ConfigError, GenerateRequest, Role
from mooncake.scheduler.scaling.config import ScalingConfig

POLICIES = ("kvcache-centric", "local-cache-aware", "load-balance", "round-robin", "random")
"""Names of the ways to choose a prefill worker."""
ADMISSIONS = ("predicted", "early", "late")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the Conductor and the gateway.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    policy: str = "kvcache-centric"
    ttft_slo_s: float | None = None
    """Refuse a request whose predicted time to first token is longer. None = no limit."""
    tbt_slo_s: float | None = None
    """Refuse a request that would raise the predicted gap between tokens above this. None = no
    limit.
    """
    admission: str = "predicted"
    """When the limit on gaps is checked. "late": after the prompt was computed (the work of refused
    requests is lost). "early": on arrival, against the current load of decode. "predicted": on
    arrival, against the worse of the current load and the load predicted for the moment this
    request would start to decode.
    """
    recheck_decode: bool = False
    """Check the limit on gaps again after the prompt was computed, and refuse a request that would
    miss it: its work is lost, but requests that decode already keep their pace. "late" implies it.
    """
    kvcache_balancing_threshold: float = 1.0
    """Fetching a longer prefix from another node is considered only where that prefix is longer
    than this many times the local one (Mooncake, FAST'25, Algorithm 1). 1 = always.
    """
    fetch_remote: bool = True
    """Workers may fetch prefixes from pools of other nodes, whatever the policy (except
    local-cache-aware). False = each node uses its own pool only, like an engine with a local cache.
    """
    max_inflight: int = 1024
    """Number of permits: requests that are accepted and have not ended."""
    max_queue: int = 256
    """How many of these may wait for a worker after their worker was lost or full."""
    max_attempts: int = 3
    """Failed placements of one request before it fails."""
    read_ahead_bytes: int = 2 << 30
    """While requests are pending, up to this many bytes of their prefixes are loaded from SSD ahead
    of time. An engine that joins is told to load up to this many bytes of the busiest prefixes.
    0 = blocks are loaded when a worker fetches them.
    """
    replace_wait_s: float = 300.0
    """How long a request whose worker was lost waits for another worker: as long as an engine may
    need to load its weights.
    """
    heartbeat_timeout_s: float = 10.0
    """A worker that has sent nothing for this long is lost. Dead processes are noticed at once by
    their supervisor; this is for processes that hang.
    """
    stall_timeout_s: float = 300.0
    """A placed request without a token for this long (and ten times the prediction) is placed
    again.
    """
    gap_timeout_s: float = 5.0
    """The same for a request whose later tokens have arrived while earlier ones are missing."""
    whole_on_decode_max_tokens: int = 0
    """Prompts with at most this many tokens to compute may run whole on a decode worker, where that
    is faster. 0 = only when no prefill worker is alive, and for the last tokens of requests that
    were decoding on a worker that left.
    """
    require_transport: str | None = None
    """Workers that move KV by any other transport are not used. None: any transport that they
    share.
    """
    needs_prefill: bool = False
    """The cluster should have prefill workers: without one it is not ready, although decode workers
    would run whole requests.
    """
    role_switching: bool = False
    """Workers change between prefill and decode when the balance of load has moved for long."""
    role_switch_after_s: float = 30.0
    """How long one role must lack workers, and the other have one to spare, before one changes."""
    role_switch_drain_s: float = 10.0
    """How long a worker that changes may finish its requests; the rest moves to other workers."""
    autoscale: str | None = None
    """The bounds for the number of replicas, as `ScalingConfig.parse` reads them. None: the advice
    knows none, but wants one of each role at least.
    """
    uses_per_s_per_copy: float = 0.02
    """A block that is used more often than this gets a second copy in another pool, and so on. 0 =
    blocks are not replicated.
    """
    local_bytes_per_s: float = 4e9
    """First guess of the bandwidth from the pool of the worker's own node."""
    remote_bytes_per_s: float = 1e9
    """First guess of the bandwidth from another node's pool."""
    ssd_bytes_per_s: float = 6e9
    """First guess of the bandwidth with which a pool node loads blocks from its disks."""
    object_bytes_per_s: float = 4e9
    """The same for its bucket. Both are high: one read shows that a tier is slower, but one that is
    taken to be slower than computing is not read.
    """
    fetch_latency_s: float = 0.002
    """Latency of any fetch, whatever its size."""
    expected_output_tokens: float = 256.0
    """First guess of an output's length; refined by finished requests."""

    @property
    def reads_remote(self) -> bool:
        """Whether workers read blocks from other nodes, or only from their own."""
        return self.fetch_remote and self.policy != "local-cache-aware"

    def may_be_zero(self, role: Role) -> bool:
        """Return whether the cluster may have no worker of a role while nothing is asked for."""
        return self.autoscale is not None and self.scaling.bounds(role).least == 0

    @property
    def scaling(self) -> ScalingConfig:
        """The settings of the scaling policy."""
        return ScalingConfig() if self.autoscale is None else ScalingConfig.parse(self.autoscale)

    def ttft_limit_s(self, request: GenerateRequest) -> float | None:
        """Return the limit on the first token: the request's own in place of the cluster's."""
        return request.ttft_slo_s if request.ttft_slo_s is not None else self.ttft_slo_s

    def tbt_limit_s(self, request: GenerateRequest) -> float | None:
        """Return the limit on gaps between tokens: the stricter of the request's own and the
        cluster's, because a step takes equally long for all sequences in it.
        """
        limits = [limit for limit in (request.tbt_slo_s, self.tbt_slo_s) if limit is not None]
        return min(limits, default=None)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"policy: {self.policy!r} is not one of {', '.join(POLICIES)}",
                param="policy",
            )
        if self.admission not in ADMISSIONS:
            raise ConfigError(
                f"admission: {self.admission!r} is not one of {', '.join(ADMISSIONS)}",
                param="admission",
            )
        if self.autoscale is not None:
            ScalingConfig.parse(self.autoscale)
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: must be above 0, not {value}", param=name)
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not value >= 0:
                raise ConfigError(f"{name}: must not be negative, not {value}", param=name)
        if not self.kvcache_balancing_threshold >= 1:
            raise ConfigError(
                "kvcache_balancing_threshold: must be at least 1, not "
                f"{self.kvcache_balancing_threshold}",
                param="kvcache_balancing_threshold",
            )


_POSITIVE = (
    "ttft_slo_s", "tbt_slo_s", "max_inflight", "max_queue", "max_attempts", "heartbeat_timeout_s",
    "stall_timeout_s", "gap_timeout_s", "local_bytes_per_s", "remote_bytes_per_s",
    "ssd_bytes_per_s", "object_bytes_per_s",
)  # fmt: skip
_NOT_NEGATIVE = (
    "replace_wait_s", "whole_on_decode_max_tokens", "fetch_latency_s", "expected_output_tokens",
    "uses_per_s_per_copy", "role_switch_after_s", "role_switch_drain_s", "read_ahead_bytes",
)  # fmt: skip
