"""The TCP backend: serves our memory to peers and moves batches to and from theirs.

It joins the owner's side (`TcpServer`) and one `TcpPeer` for each engine we talk to, with our
connections to it and the slices that go there. A slice whose connection broke is sent again on
another one, but a question is not. A WRITE first waits until the peer confirms, in the handshake of
a new connection, that nothing of the old one can reach its memory any more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backend import Router
from mooncake.transfer.batches import Job, Part, Slice, SliceLimits, plan_slices
from mooncake.transfer.engine import Op
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.net.directory import PeerDirectory, PeerUnreachable
from mooncake.transfer.net.endpoint import ListenAddress, PeerKey, parse_endpoint
from mooncake.transfer.net.handshake import MAX_FENCED, ConnectingSide, Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.net.retries import RetryQueue
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.tcp.connection import (
    Connection,
    ConnectionFailure,
    ConnectionLimits,
    ConnectionState,
)
from mooncake.transfer.tcp.questions import Questions
from mooncake.transfer.tcp.server import ServerLimits, TcpServer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PeerLimits:
    """Limits for what goes to one peer."""

    num_connections: int = 2
    num_failures: int = 3
    """A slice whose connection broke this often fails its batch."""
    fence_s: float = 0.25
    """How long a stopped WRITE waits for the peer's answer, and again for the fence."""
    slices: SliceLimits = field(default_factory=SliceLimits)
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)


class TcpPeer:
    """Moves the slices of jobs to and from one peer. `put`, `stop_sent` and `close` may be called
    from any thread.
    """

    def __init__(
        self,
        key: PeerKey,
        directory: PeerDirectory[TcpPeer],
        table: RegionTable,
        loops: Sequence[IoLoop],
        limits: PeerLimits,
        stats: LinkStats,
    ) -> None:
        """Prepare to connect when there is work. Raises ConfigError when the endpoint in `key` is
        malformed.
        """
        self.engine_id = key.engine_id
        self._key = key
        self._directory = directory
        self._stats = stats
        self._limits = limits
        self._queue = RetryQueue(key.engine_id, limits.num_failures)
        self._reachable = True
        address = parse_endpoint(key.endpoint)
        self._connections = [
            Connection(self, address, table, loops[index % len(loops)], limits.connection)
            for index in range(limits.num_connections)
        ]

    @property
    def is_unused(self) -> bool:
        """True if there is no connection, no work, and nothing that the peer must be told."""
        to_tell = self._queue.fences and self._reachable
        connected = any(each.state is not ConnectionState.IDLE for each in self._connections)
        return not (self._queue or self._queue.num_held or to_tell or connected)

    def put(self, job: Job) -> None:
        """Queue the slices of `job`, and begin to send in the caller's thread if that helps."""
        if job.question:
            slices = [Slice(tuple(job.ops), job.num_bytes)]
        else:
            slices = plan_slices(job.ops, len(self._connections), self._limits.slices)
        self._queue.put(job, slices)
        # What fits one slice goes in the caller's thread: waking a loop for it took a tenth longer.
        # Not while the peer must first be told of a broken connection, which takes a new one.
        is_small = job.num_bytes <= self._limits.slices.target_bytes and not self._queue.is_fenced
        is_write = job.op is Op.WRITE
        if not (is_small and any(each.try_send(is_write=is_write) for each in self._connections)):
            self._wake(len(slices))

    def _wake(self, num_parts: int) -> None:
        # Those that are connected first: a small batch needs no second connection. One that has to
        # tell of broken connections must connect anew.
        wanted = ConnectionState.IDLE if self._queue.is_fenced else ConnectionState.READY
        connections = sorted(
            self._connections, key=lambda connection: connection.state is not wanted
        )
        for connection in connections[:num_parts]:
            connection.loop.post(connection.wake)

    # ------------------------------------------------- what connections ask, each in its loop

    @property
    def has_work(self) -> bool:
        """True if slices wait for a connection."""
        return len(self._queue) > 0

    def take(self) -> Part | None:
        """Return the next slice, which the connection then has in hand; None while the peer may
        still apply bytes of broken connections.
        """
        return self._queue.take_unfenced()

    def arrived(
        self, connection: Connection, num_bytes: int, posted_s: float, now_s: float
    ) -> None:
        """Count a slice that has arrived whole."""
        self._stats.arrived(connection.nic, self.engine_id, num_bytes, posted_s, now_s)

    def new_handshake(self) -> ConnectingSide:
        """Return a handshake that tells the peer about our broken connections."""
        fenced = [str(fence) for fence in self._queue.fences[:MAX_FENCED]]
        return self._directory.credentials.connect(self.engine_id, fenced)

    def ready(self, fenced: Sequence[str]) -> None:
        """Send again what was carried by the connections that the peer has now ended."""
        self._reachable = True
        self._directory.reached(self._key)
        self._queue.confirm(fenced)
        if fenced:
            self._wake(len(self._queue))

    def broken(self, connection: Connection, failure: ConnectionFailure) -> None:
        """Send again what a broken connection carried, or fail it."""
        if self._queue.closed:
            self._queue.again(failure.parts)
            return
        is_loss = bool(failure.parts) or failure.connection_id is None
        if is_loss:
            self._stats.failed(connection.nic, self.engine_id)
            if failure.parts:
                self._stats.retried(connection.nic, self.engine_id, len(failure.parts))
        level = logging.WARNING if is_loss else logging.INFO
        _LOG.log(level, "transfer connection to %s broke: %s", self.engine_id, failure.reason)
        error = f"{self.engine_id}: {failure.reason}"
        self._queue.fail([part for part in failure.parts if part.job.question], error)
        parts = [part for part in failure.parts if not part.job.question]
        self._queue.count_failure(parts, error)
        if failure.connection_id is not None:
            writes = [part for part in parts if part.job.op is Op.WRITE]
            self._queue.hold(failure.connection_id, writes)
        self._queue.again([part for part in parts if part.job.op is Op.READ])
        others = {other.state for other in self._connections if other is not connection}
        if failure.connection_id is not None:
            if self._queue or self._queue.num_held:
                connection.connect()
        elif ConnectionState.CONNECTING not in others:
            self._reachable = False
            if self._queue.is_fenced or ConnectionState.READY not in others:
                self._directory.failed(self._key, failure.reason)
                self._queue.fail_ready(error)
                self._queue.fail_held(error)

    # ---------------------------------------------------------------- stopping

    def stop_sent(self, job: Job) -> None:
        """Bring the parts of a stopped job to an end: READs now, WRITEs when the peer is done with
        them.
        """
        for connection in self._connections:
            connection.loop.post(functools.partial(self._stop_on, connection, job))
        loop = self._connections[0].loop
        loop.post(lambda: self._insist_later(loop, job))

    def _stop_on(self, connection: Connection, job: Job) -> None:
        if connection.give_up(job):
            connection.loop.call_later(self._limits.fence_s, lambda: self._break(connection, job))

    def _break(self, connection: Connection, job: Job) -> None:
        if not job.ended and connection.give_up(job):
            connection.abort("no answer in time to a request that was stopped")

    def _insist_later(self, loop: IoLoop, job: Job) -> None:
        if not job.ended:
            loop.call_later(2 * self._limits.fence_s, lambda: self._queue.give_up(job))

    def end(self, reason: str) -> None:
        """Break all connections. Slices in hand are sent again once the peer has proven itself
        anew, or they fail. Any thread may call this.
        """
        for connection in self._connections:
            connection.loop.post(functools.partial(connection.abort, reason))

    def close(self) -> None:
        """Break all connections and release the slices in hand."""
        self._queue.close()
        for connection in self._connections:
            connection.loop.post(functools.partial(connection.abort, "closed"))
        self._connections[0].loop.post(lambda: self._queue.fail_held("closed"))


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
    def questions(self) -> Questions:
        """The questions of peers."""
        return self._server.questions

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

    def close(self) -> None:
        """Refuse peers and break all connections. They are broken once the loops have ended."""
        self._server.close()
        for peer in self._peers.close():
            peer.close()
