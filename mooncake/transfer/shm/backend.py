"""The shared-memory backend: peers of one host copy straight into each other's registered memory.

Joins the owner's side (`ShmOwner`) and one `ShmPeer` for each engine we talk to.
"""

from __future__ import annotations

import functools

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backend import Router
from mooncake.transfer.batches import Job
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.local import CopyPool
from mooncake.transfer.net.directory import PeerDirectory, PeerUnreachable
from mooncake.transfer.net.endpoint import PeerKey
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.shm.owner import ShmOwner
from mooncake.transfer.shm.peer import ShmPeer


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
    ) -> None:
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
        self._owner = ShmOwner(credentials, table, loop)

    @property
    def endpoint(self) -> str:
        return self._owner.endpoint

    @property
    def num_sessions(self) -> int:
        """Peers connected to us."""
        return self._owner.listener.num_sessions

    def reaches(self, peer: SegmentRef) -> bool:
        return peer.host == self._host and self.protocol in peer.endpoints

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
