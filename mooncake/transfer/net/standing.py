"""Decides whether the proofs by which an engine's sessions were opened are still valid, and ends
sessions where they are not.

A session is between keys. The certificate that says whose keys they are expires. A certificate that
a cluster secret has signed also becomes invalid when that secret is removed. But its holder may get
another certificate for the same keys. An engine whose credential was renewed makes a new handshake
with each owner, on a separate connection. Then both ends know each other's newest certificates, and
sessions go on untouched. A session that fails two looks in a row is ended, at both ends.

A proof is remembered while a session depends on it, and otherwise until the second look after.
However many keys come and go, no key of an open session is forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, Any, Protocol

from mooncake.base.errors import MooncakeError
from mooncake.identity.credential import Certificate, Credential, objection
from mooncake.telemetry.audit import audit
from mooncake.transfer.net.blocking import shake_hands
from mooncake.transfer.net.endpoint import PeerKey, address_of, new_stream
from mooncake.transfer.net.io_loop import IoLoop

if TYPE_CHECKING:
    from mooncake.transfer.net.handshake import ConnectingSide

LOOK_S = 2.0
"""Seconds between two looks at all sessions."""
ANSWER_S = 5.0
"""How long an owner may take for another handshake."""
_LOG = logging.getLogger(__name__)


class Watched(Protocol):
    """The sessions of one protocol at one end."""

    def look(self, standing: Standing) -> Iterable[PeerKey]:
        """End sessions that failed two looks in a row. Return the owners that fail now and did not
        fail before.
        """

    def owners(self) -> Iterable[PeerKey]:
        """Return the owners with whom we have sessions."""


class Standing:
    """The newest certificates that peers have proven; they decide whether sessions go on.
    Thread-safe except for `look`, which one thread calls.
    """

    def __init__(self, credential: Credential, unix_time: Callable[[], float]) -> None:
        self._credential = credential
        self._unix_time = unix_time
        self._lock = threading.Lock()
        self._newest: dict[bytes, tuple[bytes, Certificate]] = {}
        """The newest certificate, also as it was signed, by the key that signs."""
        self._owners: dict[str, Certificate] = {}
        """What each owner has proven to us, by engine id."""
        self._used: set[bytes | str] = set()
        """The owners that have proven something, or were asked about, since the last look."""
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._forgotten: list[str] = []
        self._shown = credential.signed
        self._thread: threading.Thread | None = None

    @property
    def num_known(self) -> int:
        """Number of certificates that are remembered, of clients and of owners."""
        return len(self._newest) + len(self._owners)

    def watch(self, watched: Watched) -> None:
        """Look at these sessions too, for as long as `watched` lives."""
        with self._lock:
            self._watched.add(watched)

    def learn(self, signed: bytes, certificate: Certificate, owner: str = "") -> None:
        """Record what a peer has just proven. `owner`: the engine for which the peer acts as
        owner.
        """
        key = certificate.signing_key
        with self._lock:
            self._newest[key] = signed, certificate
            self._used.add(key)
            if owner:
                self._owners[owner] = certificate
                self._used.add(owner)

    def objection(self, certificate: Certificate) -> str | None:
        """Return why a peer that has proven a certificate may have no session any more. Return None
        if this certificate, or a newer one of the same keys, is valid.
        """
        key = certificate.signing_key
        with self._lock:
            self._used.add(key)
            signed, newest = self._newest.get(key, (b"", certificate))
        return objection(newest, self._unix_time(), self._credential, signed)

    def objection_to(self, engine_id: str) -> str | None:
        """Return the same for an owner; None also if it has proven nothing yet."""
        with self._lock:
            self._used.add(engine_id)
            certificate = self._owners.get(engine_id)
        return None if certificate is None else self.objection(certificate)

    def forget(self, engine_id: str) -> None:
        """Forget an owner, with whom all sessions end at this look."""
        self._forgotten.append(engine_id)

    def keep_looking(self, loop: IoLoop, connect: Callable[[str], ConnectingSide]) -> None:
        """Look now and every `LOOK_S`, in `loop`. `connect`: begins a handshake with an engine."""
        try:
            self.look(connect)
        finally:  # whatever happens in a look: without a next one no session would end any more
            loop.call_later(LOOK_S, lambda: self.keep_looking(loop, connect))

    def look(self, connect: Callable[[str], ConnectingSide]) -> None:
        """End the sessions that are no longer valid; prove ourselves again if that may help."""
        with self._lock:
            watched = list(self._watched)
        doubted = {key for each in watched for key in each.look(self)}
        with self._lock:
            self._used.difference_update(self._forgotten)
            self._forgotten.clear()
            for known in (self._newest, self._owners):
                _keep(known, self._used)
            self._used.clear()
        if self._credential.signed is not self._shown:
            if self._is_proving:
                return  # the next look does it
            self._shown = self._credential.signed
            doubted = {key for each in watched for key in each.owners()}
        if doubted and not self._is_proving:
            self._thread = threading.Thread(
                target=_prove_to, args=(sorted(doubted), connect), name="proofs", daemon=True
            )
            self._thread.start()

    @property
    def _is_proving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def _keep(known: dict[Any, Any], used: Set[bytes | str]) -> None:
    for each in [each for each in known if each not in used]:
        del known[each]


def ended(what: str, who: str, reason: str) -> None:
    """Log that a session ends because its proof is no longer valid."""
    _LOG.warning("%s with %s ends: %s", what, who, reason)
    audit("session_ended", what=what, peer=who, reason=reason)


def _prove_to(owners: Iterable[PeerKey], connect: Callable[[str], ConnectingSide]) -> None:
    for key in owners:
        try:
            address = address_of(key.endpoint)
            with new_stream(address) as sock:
                sock.settimeout(ANSWER_S)
                sock.connect(address)
                shake_hands(sock, connect(key.engine_id), time.monotonic() + ANSWER_S)
        except (OSError, EOFError, MooncakeError) as error:
            _LOG.info("%s was not told of the renewed credential: %s", key.engine_id, error)
        except Exception:  # the other owners are still told
            _LOG.exception("%s was not told of the renewed credential", key.engine_id)
