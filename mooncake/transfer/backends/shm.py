"""The shared-memory backend: peers of one host copy straight into each other's registered memory.

Puts together the owner's side (`shm_owner`) and one `ShmPeer` for each engine we talk to.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backends.copying import CopyPool
from mooncake.transfer.backends.io_loop import IoLoop
from mooncake.transfer.backends.port import Router
from mooncake.transfer.backends.shm_owner import ShmOwner
from mooncake.transfer.backends.shm_peer import ShmPeer
from mooncake.transfer.batches import Job
from mooncake.transfer.handshake import Credentials
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.peer_health import PeerHealth
from mooncake.transfer.regions import RegionTable


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
        self._credentials = credentials
        self._table = table
        self._pool = pool
        self._loop = loop
        self._router = router
        self._host = host
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], ShmPeer] = {}
        self._health = PeerHealth()
        self.stats = LinkStats(self.protocol)
        self._owner = ShmOwner(credentials, table, loop)

    @property
    def link_stats(self) -> Sequence[LinkStats]:
        return (self.stats,)

    @property
    def endpoint(self) -> str:
        return self._owner.endpoint

    @property
    def num_sessions(self) -> int:
        """Peers connected to us."""
        return self._owner.num_sessions

    def reaches(self, peer: SegmentRef) -> bool:
        return peer.host == self._host and self.protocol in peer.endpoints

    def start(self, job: Job) -> None:
        endpoint = job.peer.endpoints[self.protocol]
        key = (endpoint, job.peer.engine_id)
        refusal = self._health.refusal(key)
        if refusal is not None:
            self._router.decline(job, refusal)
            return
        with self._lock:
            peer = self._peers.get(key)
            if peer is None:
                peer = self._peers[key] = ShmPeer(
                    job.peer.engine_id,
                    self._table,
                    self._pool,
                    self._loop,
                    self._router,
                    self.stats,
                )
                self._loop.post(functools.partial(self._connect, peer, key))
        peer.put(job)

    def _connect(self, peer: ShmPeer, key: tuple[str, str]) -> None:
        peer.connect(
            key[0],
            self._credentials,
            functools.partial(self._health.reached, key),
            functools.partial(self._forget, key),
        )

    def _forget(self, key: tuple[str, str], refusal: str | None) -> None:
        # Told afterwards: who is let through by it must not come upon the peer that has gone.
        with self._lock:
            self._peers.pop(key, None)
        if refusal is not None:
            self._health.failed(key, refusal)
        else:
            self._health.unknown(key)

    def stop_sent(self, job: Job) -> None:
        """Nothing to do: the copying threads look at the job between steps."""

    def pump(self) -> None:
        self._pool.pump()

    def close(self) -> None:
        """Refuse peers and let go of their memory; done when the loop has ended."""
        self._owner.close()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            self._loop.post(functools.partial(peer.end, "the transfer engine is closed"))
