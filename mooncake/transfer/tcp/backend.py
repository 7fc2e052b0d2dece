"""The TCP backend: serves our memory to peers and moves batches to and from theirs.

It joins the owner's side (`TcpServer`) and one `TcpPeer` for each engine we talk to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backend import Router
from mooncake.transfer.batches import Job
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.net.directory import PeerDirectory, PeerUnreachable
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.tcp.peer import PeerLimits, TcpPeer
from mooncake.transfer.tcp.server import ServerLimits, TcpServer


@dataclass(frozen=True, kw_only=True)
class TcpSettings:
    """The settings by which one engine uses TCP."""

    listen: ListenAddress = field(default_factory=ListenAddress)
    """The address to listen at. The control sessions of other protocols use the same hosts and
    ports.
    """
    peer: PeerLimits = field(default_factory=PeerLimits)
    server: ServerLimits = field(default_factory=ServerLimits)


class TcpBackend:
    """The `Backend` for peers on any host."""

    protocol = "tcp"

    def __init__(
        self,
        credentials: Credentials,
        table: RegionTable,
        loops: Sequence[IoLoop],
        router: Router,
        settings: TcpSettings,
    ) -> None:
        """Listen for peers. Raises ConfigError when no port can be bound."""
        self._router = router
        self._listen = settings.listen
        self.stats = LinkStats(self.protocol)
        self._peers: PeerDirectory[TcpPeer] = PeerDirectory(
            self.protocol,
            credentials,
            lambda key: TcpPeer(key, self._peers, table, loops, settings.peer, self.stats),
            TcpPeer.end,
            lambda peer: peer.is_unused,
        )
        self._server = TcpServer(settings.listen, credentials, table, loops, settings.server)
        self.link_stats = (self.stats, self._server.stats)

    @property
    def endpoint(self) -> str:
        return self._listen.endpoint(self._server.port)

    @property
    def num_connections(self) -> int:
        """Number of connections that peers have to us."""
        return self._server.num_connections

    def reaches(self, peer: SegmentRef) -> bool:
        return self.protocol in peer.endpoints

    def start(self, job: Job) -> None:
        try:
            with self._peers.lock:
                self._peers.open(job.peer).put(job)
        except PeerUnreachable as error:
            self._router.decline(job, error.message)

    def stop_sent(self, job: Job) -> None:
        peer = self._peers.find(job.peer)
        if peer is not None:
            peer.stop_sent(job)

    def fence(self, grant: int) -> Fence:
        """Return CLOSED: bytes land behind the gates, where the grant is checked."""
        del grant
        return Fence.CLOSED

    def pump(self) -> None:
        """Do nothing: the I/O loops do all work."""

    def close(self) -> None:
        """Refuse peers and break all connections. That is done when the loops have ended."""
        self._server.close()
        for peer in self._peers.close():
            peer.close()
