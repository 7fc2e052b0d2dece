"""The owner's side of RDMA: tells proven clients where our memory is and opens queue pairs for
them.

It moves no byte: the NICs do. What a client has opened ends with its control session, when the
client fences that session in a later hello, or when a grant is fenced by which it may write. Lives
in the RDMA loop.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from mooncake.base.errors import TransferError
from mooncake.transfer.grants import Fence
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import AcceptingSide, Credentials, PeerIdentity
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.net.listener import Listener, tcp_listener
from mooncake.transfer.net.session import OwnerStream, Welcome
from mooncake.transfer.rdma import wire
from mooncake.transfer.rdma.memory import RdmaMemory
from mooncake.transfer.rdma.nic import Nic, QueuePair
from mooncake.transfer.rdma.settings import OwnerLimits

_LOG = logging.getLogger(__name__)
MAX_GRANTS = 4096
"""Grants that are remembered for one session. Of older ones, most of which have ended long ago,
only the greatest number is remembered.
"""


class RdmaOwner:
    """Serves the control sessions of clients."""

    def __init__(
        self,
        listen: ListenAddress,
        credentials: Credentials,
        memory: RdmaMemory,
        nics: Mapping[str, Nic],
        loop: IoLoop,
        limits: OwnerLimits,
    ) -> None:
        """Raises ConfigError when no port of `listen` can be bound."""
        self.memory = memory
        self.nics = nics
        self.loop = loop
        self.limits = limits
        self.num_pairs = 0
        self._uncertain_to = 0
        """The last grant of a session whose queue pairs could not be destroyed."""
        sock = tcp_listener(listen)
        self.port: int = sock.getsockname()[1]
        self.listener: Listener[RdmaSession] = Listener(
            sock,
            loop,
            "RDMA",
            limits.num_sessions,
            credentials.standing,
            lambda accepted: RdmaSession(self, accepted, credentials.accept()),
        )

    def lose(self, nic: str) -> None:
        """End what clients have opened on a NIC that has failed."""
        for session in self.listener.sessions:
            session.lose(nic)

    def fence(self, grant: int) -> Fence:
        """End the sessions of clients that may write by a revoked grant. A queue pair that is
        destroyed here lets nothing in, whatever the client does. Any thread may call this.
        """
        writers = [each for each in self.listener.sessions if each.may_write(grant)]
        for session in writers:
            self.loop.post(session.close)
        if writers:
            return Fence.OPEN
        return Fence.UNKNOWN if grant <= self._uncertain_to else Fence.CLOSED

    def not_destroyed(self, last_grant: int) -> None:
        """Record an ended session with a queue pair that a NIC does not destroy, and the last grant
        that it serves.
        """
        self._uncertain_to = max(self._uncertain_to, last_grant)

    def close(self) -> None:
        """Refuse clients and end what they have opened; runs in the loop."""
        for session in self.listener.close():
            session.close()


class RdmaSession:
    """One client's control session and the queue pairs that it has opened."""

    def __init__(self, owner: RdmaOwner, sock: socket.socket, handshake: AcceptingSide) -> None:
        self.loop = owner.loop
        self._owner = owner
        self._pairs: dict[int, QueuePair] = {}
        self._grants: dict[int, None] = {}
        """Grants by which the client may write, the latest last. It may have been allowed all up to
        `_dropped`.
        """
        self._dropped = 0
        self._is_pair_left = False
        """True if a NIC has not destroyed one; grants that are asked for later may use it, too."""
        self._stream = OwnerStream(
            "RDMA", owner.loop, sock, handshake, self, owner.limits.handshake_s
        )

    @property
    def identity(self) -> PeerIdentity | None:
        return self._stream.identity

    def on_proven(self, identity: PeerIdentity, welcome: Welcome) -> None:
        """End the client's fenced sessions, then list our NICs."""
        for session in self._owner.listener.fenced(identity):
            session.close()
        welcome(())
        nics = [nic.address for nic in self._owner.nics.values()]
        self._stream.send(wire.CODEC.encode(wire.Inventory(nics)))

    def on_frame(self, body: bytes) -> None:
        """Answer one message. Raises ProtocolError."""
        ask = wire.CODEC.decode_ask(body)
        if isinstance(ask, wire.AskRegion):
            answer: wire.Answer = self._owner.memory.keys(ask.region_id)
        elif isinstance(ask, wire.AskGrant):
            answer = self._take_grant(ask.grant)
        elif isinstance(ask, wire.OpenPair):
            answer = self._open(ask)
        else:
            self._close_pair(ask.pair_id)
            answer = wire.PairClosed(ask.pair_id)
        self._stream.send(wire.CODEC.encode(answer))

    def _take_grant(self, grant: int) -> wire.Answer:
        # In the gate, which a fence passes after the grant was revoked: it sees the grant here.
        with self.loop.gate:
            refusal = self._owner.memory.table.grants.permit(grant).withdrawn
            if refusal is None:
                self._grants[grant] = None
                if len(self._grants) > MAX_GRANTS:
                    oldest = next(iter(self._grants))
                    # First: `may_write` finds it here or there, whatever the thread.
                    self._dropped = max(self._dropped, oldest)
                    del self._grants[oldest]
        return wire.GrantGood(grant) if refusal is None else wire.GrantRefused(grant, refusal)

    def may_write(self, grant: int) -> bool:
        """Return whether the client may write by a grant, or may once have; from any thread."""
        return grant in self._grants or grant <= self._dropped

    def _open(self, ask: wire.OpenPair) -> wire.Answer:
        nic = self._owner.nics.get(ask.nic)
        if nic is None:
            return wire.PairRefused(ask.pair_id, f"there is no NIC {ask.nic} here")
        if not nic.is_active():
            return wire.PairRefused(ask.pair_id, f"the link of {ask.nic} is down")
        if self._owner.num_pairs >= self._owner.limits.num_pairs or ask.pair_id in self._pairs:
            return wire.PairRefused(ask.pair_id, "too many queue pairs")
        try:
            pair = self._pairs[ask.pair_id] = nic.new_pair()
        except TransferError as error:
            return wire.PairRefused(ask.pair_id, error.message)
        self._owner.num_pairs += 1
        try:
            pair.serve(ask.client)
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
        except TransferError as error:
            _LOG.warning("%s", error.message)
            self._is_pair_left = True

    def lose(self, nic: str) -> None:
        """End what was opened on a NIC."""
        for pair_id, pair in list(self._pairs.items()):
            if pair.address.nic.name == nic:
                self._close_pair(pair_id)

    def close(self) -> None:
        """Close the session. The queue pairs that the client opened no longer reach our memory."""
        self._stream.close()
        for pair_id in list(self._pairs):
            self._close_pair(pair_id)
        if self._is_pair_left:
            self._owner.not_destroyed(max((self._dropped, *self._grants)))
        self._owner.listener.forget(self)
