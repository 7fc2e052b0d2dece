"""The shared-memory backend: peers of one host copy straight into each other's registered memory.

Joins the owner's side (`ShmOwner`) and one `ShmPeer` for each engine we talk to.
"""

from __future__ import annotations

import functools
import socket
import threading

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backend import Router
from mooncake.transfer.batches import Job
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.local import CopyPool
from mooncake.transfer.net.directory import PeerDirectory, PeerUnreachable
from mooncake.transfer.net.endpoint import PeerKey
from mooncake.transfer.net.handshake import AcceptingSide, Credentials, PeerIdentity
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.net.listener import Listener
from mooncake.transfer.net.session import OwnerStream, Welcome
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.shm import wire
from mooncake.transfer.shm.peer import ShmPeer
from mooncake.transfer.shm.place import Place, directory_of


class ShmBackend:
    """The `Backend` for peers on the same host."""

    protocol = "shm"

    def __init__(
        self,
        credentials: Credentials,
        table: RegionTable,
        pool: CopyPool,
        loop: IoLoop,
        router: Router,
        host: str,
        directory: str = "",
    ) -> None:
        """`directory`: where peers find each other, if not in one network. All processes of `host`
        have the same.
        """
        self.table = table
        self.pool = pool
        self.loop = loop
        self.router = router
        self.stats = LinkStats(self.protocol)
        self.link_stats = (self.stats,)
        self.peers: PeerDirectory[ShmPeer] = PeerDirectory(
            self.protocol, credentials, self._new_peer, self._end_peer
        )
        self._host = host
        self._directory = directory
        self._owner = ShmOwner(credentials, table, loop, directory)

    @property
    def endpoint(self) -> str:
        return self._owner.endpoint

    @property
    def num_sessions(self) -> int:
        """Peers connected to us."""
        return self._owner.listener.num_sessions

    def reaches(self, peer: SegmentRef) -> bool:
        """Return whether a peer shares memory with us. No socket elsewhere is ever touched."""
        place = peer.endpoints.get(self.protocol)
        return (
            peer.host == self._host and place is not None and directory_of(place) == self._directory
        )

    def start(self, job: Job) -> None:
        try:
            peer = self.peers.open(job.peer)
        except PeerUnreachable as error:
            self.router.decline(job, error.message)
        else:
            peer.put(job)

    def _new_peer(self, key: PeerKey) -> ShmPeer:
        peer = ShmPeer(key, self)
        self.loop.post(peer.connect)
        return peer

    def _end_peer(self, peer: ShmPeer, reason: str) -> None:
        self.loop.post(functools.partial(peer.end, reason))

    def stop_sent(self, job: Job) -> None:
        """Do nothing: the copying threads look at the job between steps."""

    def fence(self, grant: int) -> Fence:
        """Return OPEN while a peer that has mapped our memory copies by a revoked grant, or has
        stopped in the middle of a copy. The peer begins no other copy, and its hand is seen empty
        when it dies.
        """
        return Fence.OPEN if self._owner.is_held(grant) else Fence.CLOSED

    def close(self) -> None:
        """Refuse peers and unmap their memory. That is done when the loop has ended."""
        self._owner.close()
        for peer in self.peers.close():
            self.loop.post(functools.partial(peer.end, "the transfer engine is closed"))


_MAX_SESSIONS = 1024


class ShmOwner:
    """The owner's side: hands our regions to proven clients on this host.

    Lives in one I/O loop. Other threads touch only its pages, when they withdraw a region or ask
    whether a client copies by a grant.
    """

    def __init__(
        self, credentials: Credentials, table: RegionTable, loop: IoLoop, directory: str
    ) -> None:
        """Raises ConfigError when no socket can be made in `directory`."""
        self._table = table
        self._loop = loop
        self._lock = threading.Lock()
        self._place = Place(credentials.ids.hex(8), directory)
        self._page = wire.StatePage()
        self._hands: dict[int, wire.Hands] = {}
        """Hands of the clients that may copy, by our end of their pipe."""
        self._closed = False
        self.endpoint = self._place.endpoint
        table.watch_withdrawals(self._withdraw)
        self.listener: Listener[ShmSession] = Listener(
            self._place.socket,
            loop,
            "shared-memory",
            _MAX_SESSIONS,
            credentials.standing,
            lambda accepted: ShmSession(self, accepted, loop, credentials.accept()),
        )

    def _withdraw(self, region_id: int) -> None:
        with self._lock:
            if not self._closed:
                self._page.withdraw(region_id)

    def let_in(self, welcome: Welcome) -> None:
        """Welcome a client and send it the pages by which both sides see each other's state. Runs
        in the loop.
        """
        with self._lock:
            if self._closed:
                return
            hands = wire.Hands()
            fds = [self._page.fd, self._table.words.fd, hands.fd, hands.pipe]
            # Watched before they are sent: when that fails, the pipe hangs up at once.
            self._hands[hands.heard] = hands
            self._loop.add(hands.heard, 0, lambda _events: self._let_go(hands))
            try:
                welcome(fds)
            finally:
                hands.given()

    def _let_go(self, hands: wire.Hands) -> None:
        """Forget a client that can no longer copy. Runs in the loop."""
        self._loop.remove(hands.heard)
        with self._lock:
            self._hands.pop(hands.heard, None)
        hands.close()

    def is_held(self, grant: int) -> bool:
        """Return whether a client copies by a grant, or has stopped in the middle of such a
        copy.
        """
        with self._lock:
            return any(hands.hold(grant) for hands in self._hands.values())

    def hand_out(self, stream: OwnerStream, ask: wire.OpenRegion) -> None:
        """Answer a client that asks for a region."""
        # Under the lock, which a withdrawal takes before it closes the region's descriptor.
        with self._lock:
            region = self._table.get(ask.region_id)
            if self._closed or region is None or not region.alive:
                reason, unshared = f"region {ask.region_id} is not registered", False
            elif region.fd is None:
                reason, unshared = f"region {ask.region_id} cannot be mapped by others", True
            else:
                slot = self._page.slot_of(ask.region_id)
                if slot is not None:
                    opened = wire.RegionOpened(
                        ask.region_id, region.num_bytes, slot, region.guarded
                    )
                    stream.send(wire.CODEC.encode(opened), [region.fd])
                    return
                reason, unshared = "too many regions are shared", True
        stream.send(wire.CODEC.encode(wire.RegionRefused(ask.region_id, reason, unshared)))

    def close(self) -> None:
        """Mark all regions as gone at once. Sessions and the listener end when the loop turns."""
        with self._lock:
            self._closed = True
            self._page.close()
        self._place.forget()
        self._loop.post(self._hang_up)

    def _hang_up(self) -> None:
        for session in self.listener.close():
            session.close()
        for hands in list(self._hands.values()):
            self._let_go(hands)


class ShmSession:
    """The session of one client on this host. Made in the loop, which it lives in."""

    def __init__(
        self, owner: ShmOwner, sock: socket.socket, loop: IoLoop, handshake: AcceptingSide
    ) -> None:
        self.loop = loop
        self._owner = owner
        self._stream = OwnerStream("shared-memory", loop, sock, handshake, self)

    @property
    def identity(self) -> PeerIdentity | None:
        return self._stream.identity

    def on_proven(self, _identity: PeerIdentity, welcome: Welcome) -> None:
        """Let the client in."""
        self._owner.let_in(welcome)

    def on_frame(self, body: bytes) -> None:
        """Answer one message. Raises ProtocolError."""
        self._owner.hand_out(self._stream, wire.CODEC.decode_ask(body))

    def close(self) -> None:
        """Close the session."""
        self._stream.close()
        self._owner.listener.forget(self)
