"""The TCP backend: serves our memory to peers and moves batches to and from theirs.

Puts together the owner's side (`tcp_server`) and one `TcpPeer` for each engine we talk to.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake.base.errors import ConfigError
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backends.io_loop import IoLoop
from mooncake.transfer.backends.port import Router
from mooncake.transfer.backends.tcp_peer import PeerLimits, TcpPeer
from mooncake.transfer.backends.tcp_server import ServerLimits, TcpServer
from mooncake.transfer.batches import Job
from mooncake.transfer.handshake import Credentials
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.peer_health import PeerHealth
from mooncake.transfer.regions import RegionTable

_MANY_PEERS = 256


@dataclass(frozen=True, kw_only=True)
class TcpSettings:
    """How one engine uses TCP."""

    bind_host: str = "127.0.0.1"
    advertise_host: str | None = None
    """What peers connect to when it is not `bind_host`; a numeric address."""
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
        """Listen on a free port. Raises ConfigError when the host cannot be bound."""
        self._credentials = credentials
        self._table = table
        self._loops = loops
        self._router = router
        self._settings = settings
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], TcpPeer] = {}
        self._health = PeerHealth()
        self.stats = LinkStats(self.protocol)
        self._server = TcpServer(
            settings.bind_host,
            credentials,
            table,
            loops,
            settings.server,
        )

    @property
    def link_stats(self) -> Sequence[LinkStats]:
        return self.stats, self._server.stats

    @property
    def endpoint(self) -> str:
        host = self._settings.advertise_host or self._settings.bind_host
        return f"[{host}]:{self._server.port}" if ":" in host else f"{host}:{self._server.port}"

    @property
    def num_connections(self) -> int:
        """Connections peers have to us."""
        return self._server.num_connections

    def reaches(self, peer: SegmentRef) -> bool:
        return self.protocol in peer.endpoints

    def start(self, job: Job) -> None:
        key = (job.peer.endpoints[self.protocol], job.peer.engine_id)
        refusal = self._health.refusal(key)
        if refusal is not None:
            self._router.decline(job, refusal)
            return
        try:
            with self._lock:
                self._peer(key).put(job)
        except ConfigError as error:
            self._router.decline(job, error.message)

    def _peer(self, key: tuple[str, str]) -> TcpPeer:
        peer = self._peers.get(key)
        if peer is None:
            if len(self._peers) >= _MANY_PEERS:
                self._forget_unused()
            peer = TcpPeer(
                key[1],
                parse_endpoint(key[0]),
                self._credentials,
                self._table,
                self._loops,
                self._settings.peer,
                self.stats,
            )
            peer.on_reached = functools.partial(self._health.reached, key)
            peer.on_refused = functools.partial(self._health.failed, key)
            self._peers[key] = peer
        return peer

    def _forget_unused(self) -> None:
        for key in [key for key, peer in self._peers.items() if peer.is_unused]:
            del self._peers[key]

    def stop_sent(self, job: Job) -> None:
        endpoint = job.peer.endpoints.get(self.protocol, "")
        with self._lock:
            peer = self._peers.get((endpoint, job.peer.engine_id))
        if peer is not None:
            peer.stop_sent(job)

    def pump(self) -> None:
        """Nothing: all work is done in the I/O loops."""

    def close(self) -> None:
        """Refuse peers and break all streams; done when the loops have ended."""
        self._server.close()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return (host, port) of "host:port" or "[v6]:port". Raises ConfigError."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"{endpoint!r} is not a TCP endpoint; it looks like 10.0.0.7:4301")
    return host.strip("[]"), int(port)
