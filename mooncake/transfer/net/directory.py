"""Keeps the peers that one backend talks to, and knows which of them could not be reached lately.

One directory serves every protocol: it creates a peer when a batch first names it, fails at once
what the peer has just refused, except one attempt at a time, and forgets peers that ended. Attempts
become rarer but never stop: a peer that refuses now (an older release, another secret) may accept
later. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mooncake.base.bounded_map import BoundedMap
from mooncake.base.errors import ConfigError, TransferError
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.net.endpoint import PeerKey
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.retries import Breaker, BreakerLimits
from mooncake.transfer.net.standing import Standing, ended

PROBES = BreakerLimits(first_s=0.05, longest_s=2.0)
PROBE_S = 30.0
"""An attempt that has had no outcome for this long counts as over."""
MAX_REMEMBERED = 4_096
"""Peers that failed. When there are more, the one that failed first is forgotten."""

Key = tuple[str, str]
"""(endpoint, engine id)"""


@dataclass
class _Failure:
    breaker: Breaker
    reason: str
    tried_s: float = 0.0
    """Time at which the last attempt began."""


class PeerHealth:
    """Attempts to connect, by peer. A connection that worked and then broke is not a failed
    attempt.
    """

    def __init__(
        self, limits: BreakerLimits = PROBES, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._now = now
        self._failures: BoundedMap[Key, _Failure] = BoundedMap(MAX_REMEMBERED)
        self._lock = threading.Lock()

    def refusal(self, key: Key) -> str | None:
        """Return why nothing is sent to a peer now, or None. If the last attempt failed, a caller
        that gets None makes the next attempt, and must report its outcome to `reached`, `failed` or
        `unknown`.
        """
        with self._lock:
            failure = self._failures.get(key)
            if failure is None:
                return None
            now = self._now()
            if now >= failure.tried_s + PROBE_S:
                failure.breaker.untried()
            if not failure.breaker.may_try(now):
                return failure.reason
            failure.breaker.tried()
            failure.tried_s = now
            return None

    def reached(self, key: Key) -> None:
        """Record that the peer has let us in."""
        with self._lock:
            self._failures.pop(key, None)

    def failed(self, key: Key, reason: str) -> None:
        """Record that the peer refused, or did not answer."""
        with self._lock:
            failure = self._failures.get(key)
            if failure is None:
                failure = self._failures[key] = _Failure(Breaker(self._limits), reason)
            failure.reason = reason
            failure.breaker.failed(self._now())

    def unknown(self, key: Key) -> None:
        """Record that an attempt ended for reasons that have nothing to do with the peer."""
        with self._lock:
            if key in self._failures:
                self._failures[key].breaker.untried()


_MANY_PEERS = 1024
"""Number of peers from which idle ones are forgotten before a new one is made."""

PeerT = TypeVar("PeerT")


class PeerUnreachable(TransferError):
    """Nothing goes to this peer now; the message has the reason."""


class PeerDirectory(Generic[PeerT]):
    """All peers of one backend, by endpoint and engine id."""

    def __init__(
        self,
        protocol: str,
        credentials: Credentials,
        make: Callable[[PeerKey], PeerT],
        end: Callable[[PeerT, str], None],
        forget_unused: Callable[[PeerT], bool] = lambda _peer: False,
    ) -> None:
        """Find peers by their endpoints of `protocol`.

        make: returns a new peer; raises ConfigError if the endpoint is malformed.
        end: ends the peer's sessions with us soon; from any thread.
        forget_unused: ends a peer and returns True when it has nothing to do, else returns False.
        """
        self.credentials = credentials
        self.lock = threading.RLock()
        """Held while peers are added and removed. A caller that finds and uses a peer under this
        lock can be sure that the peer is not forgotten in between.
        """
        self._protocol = protocol
        self._make = make
        self._end = end
        self._forget_unused = forget_unused
        self._peers: dict[tuple[str, str], PeerT] = {}
        """Peers by plain tuples of their keys' fields: these are made faster, and each batch needs
        one.
        """
        self._health = PeerHealth()
        self._closed = False
        self._doubted: set[PeerKey] = set()
        """Owners to which the last look objected."""
        credentials.standing.watch(self)

    def look(self, standing: Standing) -> set[PeerKey]:
        """End peers whose certificates failed two looks in a row; see `Standing`."""
        before, self._doubted = self._doubted, set()
        with self.lock:
            peers = [(PeerKey(*key), peer) for key, peer in self._peers.items()]
        for key, peer in peers:
            reason = standing.objection_to(key.engine_id)
            if reason is not None:
                self._doubted.add(key)
                if key in before:
                    ended(f"our {self._protocol} session", key.engine_id, reason)
                    self._end(peer, reason)
                    standing.forget(key.engine_id)
        return self._doubted - before

    def owners(self) -> list[PeerKey]:
        """Return the peers that exist now."""
        with self.lock:
            return [PeerKey(*key) for key in self._peers]

    def _key(self, ref: SegmentRef) -> tuple[str, str]:
        return ref.endpoints.get(self._protocol, ""), ref.engine_id

    def find(self, ref: SegmentRef) -> PeerT | None:
        """Return the peer that `ref` names, or None if it has not been created."""
        return self._peers.get(self._key(ref))

    def open(self, ref: SegmentRef) -> PeerT:
        """Return the peer that `ref` names; a new one is created if needed. Raises
        PeerUnreachable.
        """
        key = self._key(ref)
        refusal = "the transfer engine is closed" if self._closed else self._health.refusal(key)
        if refusal is not None:
            raise PeerUnreachable(refusal)
        peer = self._peers.get(key)
        if peer is None:
            with self.lock:
                peer = self._peers.get(key) or self._add(PeerKey(*key))
        return peer

    def _add(self, key: PeerKey) -> PeerT:
        if len(self._peers) >= _MANY_PEERS:
            for old, peer in list(self._peers.items()):
                if self._forget_unused(peer):
                    self._peers.pop(old, None)
        try:
            peer = self._peers[key] = self._make(key)
        except ConfigError as error:
            raise PeerUnreachable(error.message) from error
        return peer

    def reached(self, key: PeerKey) -> None:
        """Note that the peer has accepted a connection of ours."""
        self._health.reached(key)

    def failed(self, key: PeerKey, reason: str) -> None:
        """Note that an attempt to reach the peer has failed."""
        self._health.failed(key, reason)

    def ended(self, key: PeerKey, refusal: str | None) -> None:
        """Forget a peer. `refusal` says why it could not be reached; None if it could."""
        with self.lock:
            self._peers.pop(key, None)
        # After that: a request which this lets through must not find the peer that has ended.
        if refusal is not None:
            self._health.failed(key, refusal)
        else:
            self._health.unknown(key)

    def all(self) -> list[PeerT]:
        """Return the peers that exist now."""
        with self.lock:
            return list(self._peers.values())

    def close(self) -> list[PeerT]:
        """Create no more peers. Return those that exist, for the caller to end."""
        with self.lock:
            self._closed = True
            return list(self._peers.values())
