"""Keeps the peers that one backend talks to, and knows which of them could not be reached lately.

One directory serves every protocol: it creates a peer when a batch first names it, fails at once
what the peer has just refused (`peer_health`), and forgets peers that ended. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from mooncake.base.errors import ConfigError, TransferError
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.peer_key import PeerKey
from mooncake.transfer.net.standing import Standing, ended
from mooncake.transfer.peer_health import PeerHealth

_MANY_PEERS = 1024
"""With so many peers, those that have nothing to do are forgotten before a new one is made."""

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
