"""The limits of one API key: requests and tokens a minute, requests at a time. Takes `now`.

An `Account` owns its key's budgets and permits; only `http.access` enters and leaves.
"""

from __future__ import annotations

from mooncake.api.config import ApiKey
from mooncake.base import Overloaded

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
"""Advice when too many requests of a key run: when one ends is not known."""


class Limited(Overloaded):
    """Raised when a key's limit is reached; metrics count it under the short name `reason`."""

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class Budget:
    """Units a minute, refilled evenly. Holds at most a minute's worth; may go below zero."""

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
        """Take the limits of `key`; a budget whose limit is the same keeps its level."""
        if key.requests_per_min != self.key.requests_per_min:
            self._requests = _budget(key.requests_per_min)
        if key.tokens_per_min != self.key.tokens_per_min:
            self._tokens = _budget(key.tokens_per_min)
        self.key = key

    def enter(self, now: float) -> None:
        """Take a permit for one request; `leave` gives it back.

        Tokens are counted when they have been used, so one request may exceed the limit. The next
        one is then refused until the budget has recovered.

        Raises:
            Limited: a limit is reached; says which, and when to retry. No permit is taken.
        """
        key = self.key
        if key.max_concurrent and self.num_running >= key.max_concurrent:
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
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0, now)):
            raise Limited(
                f"Rate limit of key {key.name!r}: {key.tokens_per_min} tokens a minute.",
                "key_tokens_per_min",
                wait_s,
            )
        if self._requests is not None:
            self._requests.spend(1.0, now)
        self.num_running += 1

    def leave(self) -> None:
        """Give back the permit of one request."""
        assert self.num_running > 0, f"key {self.key.name!r} gave back a permit it did not have"
        self.num_running -= 1

    def charge(self, num_tokens: int, now: float) -> None:
        """Count tokens of prompts or answers; a negative number gives them back."""
        if self._tokens is not None:
            self._tokens.spend(num_tokens, now)


def _budget(per_min: int | None) -> Budget | None:
    return Budget(per_min) if per_min else None
