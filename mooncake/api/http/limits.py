"""The limits of one API key (requests and tokens a minute, requests at a time), what all requests
share (bodies and log-probabilities in memory, requests at a time), and the limits on latency that a
call asks for. Takes `now`.

An `Account` owns its key's budgets and permits; only `http.access` calls `enter` and `leave`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from starlette.datastructures import Headers

from mooncake.api.backend import LatencyLimits
from mooncake.api.config import MAX_SLO_MS, ApiKey
from mooncake.api.errors import shorten
from mooncake.base import InvalidRequest, Overloaded, Priority

SLO_TTFT = "x-mooncake-slo-ttft-ms"
"""The header with a call's own limit on the time to its first token."""
SLO_TBT = "x-mooncake-slo-tbt-ms"
"""The same for the gaps between its tokens."""
_MILLISECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,3})?")
_NO_KEY = ApiKey(digest=b"", name="")
MINUTE_S = 60.0
LOGPROB_BYTES = 128
"""Memory of one log-probability until its answer is written: 117 to 145 bytes."""
BUSY_RETRY_S = 1.0
"""Retry advice when too many requests of a key run: it is not known when one ends."""


class Limited(Overloaded):
    """Raised when a key's limit is reached. Metrics count it under the short name `reason`."""

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class Budget:
    """Units a minute, refilled evenly. It holds at most a minute's worth and may go below zero."""

    def __init__(self, per_min: int) -> None:
        self.per_min = per_min
        self._level = float(per_min)
        self._at_s: float | None = None

    def level(self, now: float) -> float:
        """Return how many units are left at `now`; below zero, how many too many were spent."""
        if self._at_s is not None and now > self._at_s:
            refill = (now - self._at_s) * self.per_min / MINUTE_S
            self._level = min(float(self.per_min), self._level + refill)
        self._at_s = now if self._at_s is None else max(now, self._at_s)
        return self._level

    def spend(self, amount: float, now: float) -> None:
        """Take `amount`, even if less is left; a negative amount gives units back."""
        self._level = min(float(self.per_min), self.level(now) - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Return after how many seconds `amount` (at most a minute's worth) will be left."""
        missing = min(amount, self.per_min) - self.level(now)
        return max(0.0, missing * MINUTE_S / self.per_min)


class Account:
    """The budgets and running requests of one key."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.num_running = 0
        self._requests = _budget(key.requests_per_min)
        self._tokens = _budget(key.tokens_per_min)

    def change(self, key: ApiKey) -> None:
        """Use the limits of `key` from now on. A budget whose limit is the same keeps its level."""
        if key.requests_per_min != self.key.requests_per_min:
            self._requests = _budget(key.requests_per_min)
        if key.tokens_per_min != self.key.tokens_per_min:
            self._tokens = _budget(key.tokens_per_min)
        self.key = key

    def enter(self, now: float, *, repeats: bool = False) -> None:
        """Take a permit for one request; `leave` gives it back.

        Tokens are counted when they have been used, so one request may exceed the limit. The next
        one is then refused until the budget has recovered. A request that `repeats` another one,
        which has paid, only counts against the limit on requests a minute and takes no permit.

        Raises:
            Limited: a limit is reached; the message says which, and when to retry. No permit is
                taken.
        """
        key = self.key
        if key.max_concurrent and self.num_running >= key.max_concurrent and not repeats:
            raise Limited(
                f"Rate limit of key {key.name!r}: {key.max_concurrent} requests at a time.",
                "key_concurrency",
                BUSY_RETRY_S,
            )
        if self._requests is not None and (wait_s := self._requests.wait_s(1.0, now)):
            raise Limited(
                f"Rate limit of key {key.name!r}: {key.requests_per_min} requests a minute.",
                "key_requests_per_min",
                wait_s,
            )
        if self._tokens is not None and not repeats and (wait_s := self._tokens.wait_s(1.0, now)):
            raise Limited(
                f"Rate limit of key {key.name!r}: {key.tokens_per_min} tokens a minute.",
                "key_tokens_per_min",
                wait_s,
            )
        if self._requests is not None:
            self._requests.spend(1.0, now)
        self.num_running += not repeats

    def leave(self, *, repeats: bool = False) -> None:
        """Give back the permit of one request, if it has one: see `enter`."""
        if repeats:
            return
        assert self.num_running > 0, f"key {self.key.name!r} gave back a permit it did not have"
        self.num_running -= 1

    def charge(self, num_tokens: int, now: float) -> None:
        """Count tokens of prompts or answers; a negative number gives them back."""
        if self._tokens is not None:
            self._tokens.spend(num_tokens, now)


class Shares:
    """Units that running requests share: bytes in memory, or the requests themselves. No key holds
    more than half of what the others leave, so that a newcomer finds some. However many keys do so,
    each may hold `least`, even above the limit.
    """

    def __init__(self, limit: int, least: int) -> None:
        self._limit = limit
        self._least = least
        self._held: dict[str | None, int] = {}

    def take(self, holder: str | None, amount: int) -> bool:
        """Take `amount` for a key. `holder` is None if keys are not needed: then all requests count
        as one client's. Return whether there was enough; otherwise nothing is taken.
        """
        own = self._held.get(holder, 0)
        left = self._limit - (self.num_held - own)
        most = left if holder is None else max(self._least, left // 2)
        if amount and own + amount > most:
            return False
        if amount:
            self._held[holder] = own + amount
        return True

    def give_back(self, holder: str | None, amount: int) -> None:
        """Give back what was taken."""
        left = self._held.pop(holder, 0) - amount
        assert left >= 0, "more is given back than was taken"
        if left:
            self._held[holder] = left

    def held_by(self, holder: str | None) -> int:
        """Return how much one holder has."""
        return self._held.get(holder, 0)

    @property
    def num_held(self) -> int:
        return sum(self._held.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when more is held than exists."""
        assert self.num_held <= self._limit + self._least * len(self._held)
        assert all(held > 0 for held in self._held.values())


class InFlight:
    """What one running request holds of the common shares. `refused` is called at each refusal."""

    def __init__(
        self,
        requests: Shares,
        bodies: Shares,
        logprobs: Shares,
        key: str | None,
        refused: Callable[[Limited], None],
    ) -> None:
        """Count the request as running.

        Raises:
            Limited: too many requests run.
        """
        self._requests, self._bodies, self._logprobs = requests, bodies, logprobs
        self._key, self._refused = key, refused
        self._num_bytes = self._logprob_bytes = 0
        if not requests.take(key, 1):
            self._refuse("too many requests run here at a time", "requests_in_flight")

    def add_bytes(self, num_bytes: int) -> None:
        """Hold more bytes of a body.

        Raises:
            Limited: the bodies of running requests fill the memory for them.
        """
        if not self._bodies.take(self._key, num_bytes):
            self._refuse(
                "the bodies of running requests fill the memory for them "
                "(`max-inflight-body-bytes`)",
                "body_bytes_in_flight",
            )
        self._num_bytes += num_bytes

    def add_logprobs(self, number: int) -> None:
        """Hold the memory of this many log-probabilities.

        Raises:
            Limited: those of running requests may fill the memory for them.
        """
        num_bytes = number * LOGPROB_BYTES
        if not self._logprobs.take(self._key, num_bytes):
            self._refuse(
                "the log-probabilities that running requests may get fill the memory for them "
                "(`max-inflight-logprob-bytes`); a smaller max_tokens takes less",
                "logprob_bytes_in_flight",
            )
        self._logprob_bytes += num_bytes

    def end(self) -> None:
        """Give everything back."""
        self._requests.give_back(self._key, 1)
        self._logprobs.give_back(self._key, self._logprob_bytes)
        self._bodies.give_back(self._key, self._num_bytes)

    def _refuse(self, message: str, reason: str) -> NoReturn:
        limited = Limited(message, reason, BUSY_RETRY_S)
        self._refused(limited)
        raise limited


def latency_limits(headers: Headers, key: ApiKey | None, priority: Priority) -> LatencyLimits:
    """Return a call's own limits on latency: those of its headers, otherwise those of its key.
    Batch work has none.

    Raises:
        InvalidRequest: a header's value is out of its range, or the call is batch work.
    """
    of_key = key or _NO_KEY
    return LatencyLimits(
        _limit_s(SLO_TTFT, headers, priority, of_key.slo_ttft_ms, of_key.min_slo_ttft_ms),
        _limit_s(SLO_TBT, headers, priority, of_key.slo_tbt_ms, of_key.min_slo_tbt_ms),
    )


def _limit_s(
    header: str, headers: Headers, priority: Priority, default_ms: int | None, least_ms: int | None
) -> float | None:
    values = headers.getlist(header)
    is_batch = priority is Priority.BATCH
    if not values:
        return None if default_ms is None or is_batch else default_ms / 1e3
    if is_batch:
        raise InvalidRequest(
            f"{header}: batch work waits until the cluster is idle, so it has no limit on latency: "
            "ask for another class, or leave the header out",
            param=header,
        )
    given, least = ", ".join(values), least_ms or 1
    if _MILLISECONDS.fullmatch(given) and least <= float(given) <= MAX_SLO_MS:
        return float(given) / 1e3
    whose = "" if least_ms is None else " with this API key"
    raise InvalidRequest(
        f"{header}: must be a number of milliseconds from {least} to {MAX_SLO_MS}{whose}, not "
        f"{shorten(given)}",
        param=header,
    )


def _budget(per_min: int | None) -> Budget | None:
    return Budget(per_min) if per_min else None
