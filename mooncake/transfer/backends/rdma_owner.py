"""The owner's side of RDMA: tells peers who prove themselves where our memory is, and lets them in.

It moves no byte: the NICs do. What a visitor has opened ends with its control stream, or when it
fences that stream in a later hello. Lives in the RDMA loop.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from mooncake.base.errors import TransferError
from mooncake.transfer.backends import rdma_wire as wire
from mooncake.transfer.backends.control_link import ControlLink
from mooncake.transfer.backends.io_loop import IoLoop
from mooncake.transfer.backends.listener import Listener, tcp_listener
from mooncake.transfer.backends.rdma_memory import RdmaMemory
from mooncake.transfer.backends.rdma_nic import Nic, QueuePair
from mooncake.transfer.handshake import AcceptingSide, Credentials, PeerIdentity

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnerLimits:
    """Bounds of the owner's side."""

    num_sessions: int = 4096
    num_pairs: int = 8192
    """Queue pairs peers may have with us, all together."""
    handshake_s: float = 5.0


class RdmaOwner:
    """Listens for the control streams of peers."""

    def __init__(
        self,
        bind_host: str,
        credentials: Credentials,
        memory: RdmaMemory,
        nics: Mapping[str, Nic],
        loop: IoLoop,
        limits: OwnerLimits,
    ) -> None:
        """Listen on a free port. Raises ConfigError when the host cannot be bound."""
        self.memory = memory
        self.nics = nics
        self.loop = loop
        self.limits = limits
        self.num_pairs = 0
        self._credentials = credentials
        self._sessions: set[RdmaSession] = set()
        sock = tcp_listener(bind_host)
        self.port: int = sock.getsockname()[1]
        limit = limits.num_sessions
        self._listener = Listener(sock, loop, "RDMA", limit, lambda: self.num_sessions, self._take)

    @property
    def num_sessions(self) -> int:
        """Peers connected now, proven or not."""
        return len(self._sessions)

    def _take(self, sock: socket.socket) -> RdmaSession:
        session = RdmaSession(self, sock, self._credentials.accept())
        self._sessions.add(session)
        return session

    def fence(self, identity: PeerIdentity) -> None:
        """End the named earlier sessions of this engine, and with them all they had opened."""
        for session in list(self._sessions):
            known = session.identity
            if (
                known is not None
                and known.engine_id == identity.engine_id
                and known.connection_id in identity.fenced
            ):
                session.close()

    def forget(self, session: RdmaSession) -> None:
        """A session has ended."""
        self._sessions.discard(session)

    def lose(self, nic: str) -> None:
        """A NIC has failed: end what peers have opened on it."""
        for session in self._sessions:
            session.lose(nic)

    def close(self) -> None:
        """Refuse peers and end what they have opened; runs in the loop."""
        self._listener.close()
        for session in list(self._sessions):
            session.close()


class RdmaSession:
    """One peer's control stream and the queue pairs it has opened."""

    def __init__(self, owner: RdmaOwner, sock: socket.socket, handshake: AcceptingSide) -> None:
        self.identity: PeerIdentity | None = None
        self._owner = owner
        self._handshake = handshake
        self._pairs: dict[int, QueuePair] = {}
        self._link = ControlLink(owner.loop, sock, self._on_frame, self._on_end)
        self._timer = owner.loop.call_later(owner.limits.handshake_s, self._on_silence)

    @property
    def is_stranger(self) -> bool:
        return self.identity is None and not self._link.closed

    def _on_silence(self) -> None:
        _LOG.warning("RDMA peer dropped: no handshake in time")
        self.close()

    def _on_frame(self, body: bytes) -> None:
        if self.identity is None:
            self._on_handshake(body)
            return
        ask = wire.decode_ask(body)
        if isinstance(ask, wire.AskRegion):
            answer: wire.Answer = self._owner.memory.keys(ask.region_id)
        elif isinstance(ask, wire.OpenPair):
            answer = self._open(ask)
        else:
            self._close_pair(ask.pair_id)
            answer = wire.PairClosed(ask.pair_id)
        self._link.send(wire.encode(answer))

    def _on_handshake(self, body: bytes) -> None:
        answer = self._handshake.step(body)
        identity = self._handshake.identity
        if identity is not None:
            self._owner.fence(identity)
            self.identity = identity
            self._timer.cancel()
        self._link.send(answer)
        if identity is not None:
            nics = [nic.address for nic in self._owner.nics.values()]
            self._link.send(wire.encode(wire.Inventory(nics)))
        elif self._handshake.refusal is not None:
            _LOG.warning("RDMA peer refused: %s", self._handshake.refusal)
            self.close()

    def _open(self, ask: wire.OpenPair) -> wire.Answer:
        nic = self._owner.nics.get(ask.nic)
        refusal = None
        if nic is None:
            refusal = f"there is no NIC {ask.nic} here"
        elif not nic.is_active():
            refusal = f"the link of {ask.nic} is down"
        elif self._owner.num_pairs >= self._owner.limits.num_pairs or ask.pair_id in self._pairs:
            refusal = "too many queue pairs"
        if nic is None or refusal is not None:
            return wire.PairRefused(ask.pair_id, refusal or "")
        try:
            pair = nic.new_pair()
        except TransferError as error:
            return wire.PairRefused(ask.pair_id, error.message)
        self._pairs[ask.pair_id] = pair
        self._owner.num_pairs += 1
        try:
            pair.serve(ask.visitor)
        except TransferError as error:
            self._close_pair(ask.pair_id)
            return wire.PairRefused(ask.pair_id, error.message)
        return wire.PairOpened(ask.pair_id, pair.address)

    def _close_pair(self, pair_id: int) -> None:
        pair = self._pairs.pop(pair_id, None)
        if pair is None:
            return
        self._owner.num_pairs -= 1
        try:
            pair.close()
        except TransferError as error:  # the device has failed, and reaches no memory
            _LOG.warning("%s", error.message)

    def lose(self, nic: str) -> None:
        """End what was opened on a NIC."""
        for pair_id, pair in list(self._pairs.items()):
            if pair.address.nic.name == nic:
                self._close_pair(pair_id)

    def _on_end(self, reason: str) -> None:
        if self.identity is None:
            _LOG.info("RDMA peer left before it proved itself: %s", reason)
        self.close()

    def close(self) -> None:
        """Hang up; what the peer had opened reaches our memory no more."""
        self._timer.cancel()
        self._link.close()
        for pair_id in list(self._pairs):
            self._close_pair(pair_id)
        self._owner.forget(self)
