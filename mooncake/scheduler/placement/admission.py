"""The Conductor's answers: a placement, or the early rejection of a request that would miss its
limits.

Pure. A placement can explain why blocks of its prompt are not reused. Every rejection says why and
when to retry (Mooncake, FAST'25, Algorithm 1: HTTP 429).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec

from mooncake.base import (
    BlockSource,
    Failure,
    GenerateRequest,
    IdSource,
    MooncakeError,
    Overloaded,
    Unavailable,
    WorkerRef,
)
from mooncake.base.cluster_mode import ClusterMode
from mooncake.base.errors import ContextTooLong
from mooncake.base.request import CacheHits, CacheMisses, CacheUse
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.choice_replay import ChoiceFacts
from mooncake.scheduler.placement.worker_choice import DecodeOption, PrefillOption
from mooncake.telemetry.receipt import PlacementFacts

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
JITTER = 0.25
"""Up to this share is added to the retry advice at random, so that clients refused together do not
return together.
"""
BATCH_AHEAD_S = 0.5
"""Batch work goes to a prefill worker with at most this many seconds queued. This is enough that
the worker never idles, and so little that other requests are hardly delayed.
"""
NOT_IDLE = "not_idle"
NO_WORKER = "no_decode_worker"
WEIGHTS_CHANGED = "weights_changed"
NO_ROOM_REASONS = frozenset({"tbt_limit", "decode_full"})
"""Reasons of rejections that fewer sequences on decode would have avoided."""
OWN_FULL = "request_decode_full"
"""The reason where decode is full and only the request's own limit forbids to wait for room."""
OWN_LIMIT_REASONS = frozenset({"request_ttft_limit", "request_tbt_limit", OWN_FULL})
"""Reasons of rejections by a limit of the request's own, which holds for no other request. They are
not among `NO_ROOM_REASONS`: no worker changes its role for such a request.
"""
YIELDING_REASONS = NO_ROOM_REASONS | {OWN_FULL}
"""Reasons of rejections that end when batch work makes room."""


@dataclass(frozen=True, slots=True)
class PrefixEnds:
    """Explains why blocks of a prompt are not reused: it compares what placement knew about each
    with what happened. Only keys of the request's own chain are looked up. They depend on its
    tenant and salt, so the reasons reveal nothing about what others cached.

    The fields are positions along the blocks. Each says where one stretch ends; it begins where the
    one before ends. Nothing is known about the blocks after the last.
    """

    planned: int
    """The placement counted on the blocks before this position."""
    fetchable: int
    """Pools hold the blocks from `planned` to here."""
    held: int
    """Workers hold the blocks from `fetchable` to here."""
    removed: int
    """The last block before here was removed lately. No worker holds the block at `held`."""

    def use(
        self, num_tokens: int, block_tokens: int, num_cached_tokens: int, fetched: CacheHits | None
    ) -> CacheUse:
        """Return what became of a prompt of `num_tokens`, in tokens, when its worker reused this
        many of them, including `fetched` blocks.
        """
        stop = (num_tokens - 1) // block_tokens
        have = min(num_cached_tokens // block_tokens, stop)
        hits = msgspec.structs.asdict(fetched or CacheHits())
        left = have
        for tier in hits:  # never more than were reused, whatever the worker says
            hits[tier] = min(hits[tier], left)
            left -= hits[tier]
        hits["hbm"] += left
        misses = dict.fromkeys(CacheMisses.__struct_fields__, 0)
        for reason, end in (
            ("fetch_failed", self.planned),
            ("recomputed", self.fetchable),
            ("out_of_reach", self.held),
            ("evicted", self.removed),
            ("not_seen", stop),
        ):
            misses[reason] = max(0, min(end, stop) - have)
            have += misses[reason]
        return CacheUse(
            hits=CacheHits(**{name: number * block_tokens for name, number in hits.items()}),
            misses=CacheMisses(**{name: n * block_tokens for name, n in misses.items()}),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The workers of a request, and the predictions made for it."""

    prefill: WorkerRef | None
    """None when the decode worker does the whole request."""
    decode: WorkerRef
    sources: tuple[BlockSource, ...]
    """The blocks that are fetched by the worker that computes the prompt."""
    predicted_ttft_s: float
    predicted_tbt_s: float
    num_cached_tokens: int
    """Leading tokens that are reused: those of the computing worker, then those it fetches."""
    num_fetch_blocks: int
    num_replicate_blocks: int = 0
    """Leading blocks that the prefill worker also puts into the pool of its node."""
    prefix_ends: PrefixEnds
    """The reasons why the blocks that follow are not reused."""
    must_wait: bool = False
    """Decode has no room for the request now."""
    facts: ChoiceFacts | None = None
    """What the choice was made from, where it is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A request that is not accepted, and the reason."""

    status: int
    error_type: str
    reason: str
    """A short name, for counters."""
    message: str
    retry_after_s: float | None = None
    facts: PlacementFacts | None = None
    """What the workers were chosen from with which it would miss a limit, where that is kept."""

    @property
    def permanent(self) -> bool:
        """True if this request would be refused later, too."""
        if self.reason == WEIGHTS_CHANGED:
            return True
        return self.status < 500 and self.status != Overloaded.http_status

    def failure(self) -> Failure:
        """Return the failure as the client gets it."""
        return Failure(
            status=self.status,
            error_type=self.error_type,
            message=self.message,
            retry_after_s=self.retry_after_s,
        )


def reject(
    kind: type[MooncakeError], reason: str, message: str, retry_after_s: float | None = None
) -> Rejection:
    """Return a rejection with the status of `kind`; the retry advice is kept within bounds."""
    if retry_after_s is not None:
        retry_after_s = min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)
    return Rejection(
        status=kind.http_status,
        error_type=kind.error_type,
        reason=reason,
        message=message,
        retry_after_s=retry_after_s,
    )


def spread_retry(rejection: Rejection, ids: IdSource) -> Rejection:
    """Return the rejection with up to a quarter added to its retry advice, at random."""
    if rejection.retry_after_s is None:
        return rejection
    factor = 1 + JITTER * ids.integer(16) / (1 << 16)
    return replace(rejection, retry_after_s=round(rejection.retry_after_s * factor, 3))


def check_limits(
    config: SchedulerConfig,
    request: GenerateRequest,
    ttft_s: float,
    tbt_s: float,
    share: float = 1.0,
) -> Rejection | None:
    """Return a rejection when a predicted time exceeds a limit of the request, which may use all of
    its own limits and `share` of the cluster's. Its own limit on the first token may be longer than
    the cluster's, and then replaces it.
    """
    ttft_slo_s = config.ttft_slo_s
    if ttft_slo_s is not None and request.ttft_slo_s is not None:
        ttft_slo_s = max(ttft_slo_s, request.ttft_slo_s)
    limits = [
        (
            "ttft_limit", "The first token would come in about", ttft_s,
            _stricter(request.ttft_slo_s, ttft_slo_s, share),
        ),
        (
            "tbt_limit", "Tokens would come about every", tbt_s,
            _stricter(request.tbt_slo_s, config.tbt_slo_s, share),
        ),
    ]  # fmt: skip
    limits.sort(key=lambda limit: not limit[-1][1])  # its own first, for which nobody yields
    for reason, words, predicted_s, (limit_s, is_own) in limits:
        if predicted_s > limit_s:
            which, advice = ("this request's own", ", or allow more") if is_own else ("the", "")
            return reject(
                Overloaded,
                f"request_{reason}" if is_own else reason,
                f"{words} {_shown(predicted_s)}, which is over {which} limit of {_shown(limit_s)}. "
                f"Retry later{advice}.",
                predicted_s - limit_s if reason == "ttft_limit" else predicted_s / limit_s,
            )
    return None


def _stricter(own_s: float | None, cluster_s: float | None, share: float) -> tuple[float, bool]:
    """Return the limit that binds, and whether it is the request's own."""
    shared_s = math.inf if cluster_s is None else share * cluster_s
    if own_s is not None and own_s < shared_s:
        return own_s, True
    return shared_s, False


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 1 else f"{round(seconds, 2):g} s"


def check_room(
    config: SchedulerConfig, request: GenerateRequest, decode: DecodeOption
) -> Rejection | None:
    """Return a rejection when decode has no room and there is a limit on gaps."""
    if not decode.full or config.tbt_limit_s(request) is None:
        return None
    is_own = config.tbt_slo_s is None
    whose = "this request's own" if is_own else "the"
    return reject(
        Overloaded,
        OWN_FULL if is_own else "decode_full",
        f"All decode workers are full, so {whose} limit on gaps between tokens cannot be met. "
        "Retry later.",
        2.0,
    )


def check_idle(
    config: SchedulerConfig,
    prefill: PrefillOption,
    decode: DecodeOption,
    tbt_s: float,
    share: float,
) -> Rejection | None:
    """Return a rejection unless batch work would fill idle capacity: hardly any work waits at the
    prefill worker, and decode has room and stays well within other requests' limit on gaps.
    """
    limit_s = math.inf if config.tbt_slo_s is None else share * config.tbt_slo_s
    busy = prefill.queue_s > BATCH_AHEAD_S or tbt_s > limit_s
    if not busy and not decode.full and not decode.num_short_blocks:
        return None
    return not_idle()


def not_idle() -> Rejection:
    """Return the rejection of batch work that has to wait."""
    return reject(
        Overloaded, NOT_IDLE, "The cluster is busy; batch work waits until it is not.", 5.0
    )


def no_decode() -> Rejection:
    """Return the rejection for a cluster without a usable decode worker."""
    return reject(
        Unavailable,
        NO_WORKER,
        "No decode worker is up (starting or restarting). Retry later.",
        2.0,
    )


def too_large(num_tokens: int) -> Rejection:
    """Return the rejection of a request that no worker could hold, even an empty one."""
    return reject(
        ContextTooLong,
        "too_large",
        f"The {num_tokens} tokens of this prompt do not fit the KVCache of any worker.",
    )


def draining() -> Rejection:
    """Return the rejection of a server that shuts down."""
    return reject(Unavailable, "draining", "The server is shutting down.", 5.0)


def closed(mode: ClusterMode) -> Rejection:
    """Return the rejection while an operator wants that no requests are taken."""
    state = "sleeps (/wake_up)" if mode.sleep_level else "is paused (/resume)"
    return reject(Unavailable, "closed", f"The server {state}; retry later.", 5.0)


def weights_changed() -> Rejection:
    """Return the end of a request whose tokens come from weights that no worker has any more."""
    text = "The server got other weights while this request ran. Send it again."
    return reject(Unavailable, WEIGHTS_CHANGED, text)
