"""Who is let in: permits, and early rejection of what could not meet its limits.

Pure. A refusal always says why and when to come back (Mooncake, FAST'25, Algorithm 1: HTTP 429).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mooncake.base import Failure, GenerateRequest, IdSource, MooncakeError, Overloaded, Unavailable
from mooncake.base.errors import ContextTooLong
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.decode_choice import DecodeOption
from mooncake.scheduler.prefill_choice import PrefillOption

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
JITTER = 0.25
"""Share of the advice that is random: clients refused together should not come back together."""
BATCH_AHEAD_S = 0.5
"""Batch work is given to a prefill worker with no more than this to do: enough that it never stands
idle, little enough that a change of mind costs nothing.
"""
NOT_IDLE = "not_idle"
NO_ROOM_REASONS = frozenset({"tbt_limit", "decode_full"})
"""Refusals that fewer sequences on decode would have spared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A request is not taken."""

    status: int
    error_type: str
    reason: str
    """A short name, for counting."""
    message: str
    retry_after_s: float | None = None

    @property
    def permanent(self) -> bool:
        """Whether coming back later cannot help."""
        return self.status < 500 and self.status != Overloaded.http_status

    def failure(self) -> Failure:
        """Return what the client is told."""
        return Failure(
            status=self.status,
            error_type=self.error_type,
            message=self.message,
            retry_after_s=self.retry_after_s,
        )


def reject(
    kind: type[MooncakeError], reason: str, message: str, retry_after_s: float | None = None
) -> Rejection:
    """Return a rejection with the status of `kind`; advice on when to retry is kept in bounds."""
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
    """Return the rejection with up to a quarter added to its advice, at random."""
    if rejection.retry_after_s is None:
        return rejection
    factor = 1 + JITTER * ids.integer(16) / (1 << 16)
    return Rejection(
        status=rejection.status,
        error_type=rejection.error_type,
        reason=rejection.reason,
        message=rejection.message,
        retry_after_s=round(rejection.retry_after_s * factor, 3),
    )


def check_limits(
    config: SchedulerConfig,
    request: GenerateRequest,
    ttft_s: float,
    tbt_s: float,
    share: float = 1.0,
) -> Rejection | None:
    """Return a rejection when a predicted time is over the request's share of its limit; the
    request's own limits go before the cluster's.
    """
    ttft_slo_s = request.ttft_slo_s if request.ttft_slo_s is not None else config.ttft_slo_s
    tbt_slo_s = request.tbt_slo_s if request.tbt_slo_s is not None else config.tbt_slo_s
    if ttft_slo_s is not None and ttft_s > share * ttft_slo_s:
        return reject(
            Overloaded,
            "ttft_limit",
            f"The first token would come in about {ttft_s:.1f} s, which is over the limit of "
            f"{share * ttft_slo_s:g} s. Retry later.",
            ttft_s - share * ttft_slo_s,
        )
    if tbt_slo_s is not None and tbt_s > share * tbt_slo_s:
        return reject(
            Overloaded,
            "tbt_limit",
            f"Tokens would come about every {1e3 * tbt_s:.0f} ms, which is over the limit of "
            f"{1e3 * share * tbt_slo_s:g} ms. Retry later.",
            tbt_s / tbt_slo_s,
        )
    return None


def check_room(
    config: SchedulerConfig, request: GenerateRequest, decode: DecodeOption
) -> Rejection | None:
    """Return a rejection when decode has no room and a limit on gaps is to be kept."""
    if not decode.full or (request.tbt_slo_s is None and config.tbt_slo_s is None):
        return None
    return reject(
        Overloaded,
        "decode_full",
        "All decode workers are full, so the limit on gaps between tokens cannot be met. "
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
    """Return a rejection unless batch work would fill what is idle: hardly anything waits at the
    prefill worker, and decode has room and keeps well inside the others' limit.
    """
    limit_s = math.inf if config.tbt_slo_s is None else share * config.tbt_slo_s
    busy = prefill.queue_s > BATCH_AHEAD_S or tbt_s > limit_s
    if not busy and not decode.full and not decode.num_short_blocks:
        return None
    return not_idle()


def not_idle() -> Rejection:
    """Batch work has to wait."""
    return reject(
        Overloaded, NOT_IDLE, "The cluster is busy; batch work waits until it is not.", 5.0
    )


def no_decode() -> Rejection:
    """Nobody can decode now."""
    return reject(
        Unavailable,
        "no_decode_worker",
        "No decode worker is up (starting, restarting or draining). Retry later.",
        2.0,
    )


def too_large(num_tokens: int) -> Rejection:
    """No worker could hold the request even if it were empty."""
    return reject(
        ContextTooLong,
        "too_large",
        f"The {num_tokens} tokens of this prompt do not fit the KVCache of any worker.",
    )


def draining() -> Rejection:
    """The server is going down."""
    return reject(Unavailable, "draining", "The server is shutting down.", 5.0)


class Permits:
    """A bounded count of requests in the house, by name so that none is given back twice."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._held: set[str] = set()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take(self, request_id: str, share: float = 1.0) -> Rejection | None:
        """Take a permit; returns the refusal when there is none left, or none in the request's
        share of them.
        """
        if len(self._held) >= math.ceil(self._bound * share):
            return reject(
                Overloaded,
                "too_many_requests",
                f"{self._bound} requests are being served, which is the limit. Retry later.",
                1.0,
            )
        assert request_id not in self._held, "a permit was taken twice"
        self._held.add(request_id)
        return None

    def give(self, request_id: str) -> None:
        """Give a permit back."""
        assert request_id in self._held, "a permit was given back twice"
        self._held.remove(request_id)

    def check_integrity(self, holders: set[str]) -> None:
        """Raise AssertionError unless exactly `holders` hold a permit."""
        assert self._held == holders, "permits and requests disagree"
        assert len(self._held) <= self._bound
