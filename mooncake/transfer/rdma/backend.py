"""The RDMA backend: serves our memory to peers' NICs and moves batches by one-sided READ and WRITE.

It joins NICs, registered memory, the owner's side and one `RdmaPeer` for each engine we talk to.
One loop thread owns all of it; completions come as events of a descriptor, with a short spin.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Mapping, Sequence

from mooncake.base.errors import TransferError
from mooncake.base.kv_layout import SegmentRef
from mooncake.transfer.backend import Router
from mooncake.transfer.batches import Job, Part
from mooncake.transfer.grants import Fence
from mooncake.transfer.link_stats import LinkStats
from mooncake.transfer.net.directory import PeerDirectory, PeerUnreachable
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.io_loop import READABLE, IoLoop
from mooncake.transfer.rdma.endpoint import (
    NUM_SERIALS,
    Endpoint,
    EndpointPool,
    EndpointState,
    Path,
    serial_of,
)
from mooncake.transfer.rdma.memory import RdmaMemory
from mooncake.transfer.rdma.nic import Nic
from mooncake.transfer.rdma.owner import RdmaOwner
from mooncake.transfer.rdma.peer import RdmaPeer
from mooncake.transfer.rdma.settings import RdmaSettings
from mooncake.transfer.rdma.verbs import NicChoices, open_nics
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.topology import prefer, read_matrix

_LOG = logging.getLogger(__name__)
_MAX_TAKES = 16
"""Reads of one NIC's completions in a row, before everything else in the loop has its turn."""


class RdmaBackend:
    """The `Backend` for peers reached by RDMA."""

    protocol = "rdma"

    def __init__(
        self,
        credentials: Credentials,
        memory: RdmaMemory,
        nics: Sequence[Nic],
        loop: IoLoop,
        router: Router,
        settings: RdmaSettings,
        listen: ListenAddress,
    ) -> None:
        """Serve peers. Raises ConfigError when the control address cannot be bound."""
        self.loop = loop
        self.memory = memory
        self.nics: Mapping[str, Nic] = {nic.address.name: nic for nic in nics}
        self.limits = settings.limits
        self.stats = LinkStats(self.protocol)
        self.link_stats = (self.stats,)
        self.peers: PeerDirectory[RdmaPeer] = PeerDirectory(
            self.protocol,
            credentials,
            lambda key: RdmaPeer(key, self),
            self._end_peer,
            RdmaPeer.end_if_unused,
        )
        self._router = router
        self._settings = settings
        self._listen = listen
        room = min([settings.max_endpoints, *(nic.max_pairs for nic in nics)])
        self._pool: EndpointPool[int] = EndpointPool(room)
        self._endpoints: dict[int, tuple[Endpoint, RdmaPeer]] = {}
        self._serials = itertools.count(1)
        self._short_of_room: list[RdmaPeer] = []
        self._served: RdmaPeer | None = None
        """The peer among them whose turn it is."""
        self._down: set[str] = set()
        self._looked_after: set[str] = set()
        """NICs that are down and for which a timer is set."""
        self._closed = False
        self._owner = RdmaOwner(listen, credentials, memory, self.nics, loop, settings.owner)
        for nic in nics:
            loop.post(functools.partial(self._watch, nic))

    def _watch(self, nic: Nic) -> None:
        self.loop.add(nic.fileno(), READABLE, functools.partial(self._on_ready, nic))
        self.loop.add(nic.events_fileno(), READABLE, functools.partial(self._on_port, nic))

    def _unwatch(self, nic: Nic) -> None:
        self.loop.remove(nic.fileno())
        self.loop.remove(nic.events_fileno())

    # ----------------------------------------------------- for the router

    @property
    def endpoint(self) -> str:
        return self._listen.endpoint(self._owner.port)

    @property
    def num_endpoints(self) -> int:
        """Number of queue pairs to peers that are open or being opened."""
        return len(self._endpoints)

    @property
    def num_served_pairs(self) -> int:
        """Number of queue pairs that peers have open to us."""
        return self._owner.num_pairs

    def reaches(self, peer: SegmentRef) -> bool:
        return self.protocol in peer.endpoints and len(self._down) < len(self.nics)

    def start(self, job: Job) -> None:
        self.loop.post(functools.partial(self._start, job))

    def _start(self, job: Job) -> None:
        try:
            self.peers.open(job.peer).put(job)
        except PeerUnreachable as error:
            self.decline(job, error.message)

    def stop_sent(self, job: Job) -> None:
        self.loop.post(functools.partial(self._stop_sent, job))

    def _stop_sent(self, job: Job) -> None:
        peer = self.peers.find(job.peer)
        if peer is not None:
            peer.stop_sent(job)

    def fence(self, grant: int) -> Fence:
        """Destroy the queue pairs by which a peer may write by a revoked grant, because NICs do not
        know grants. Return UNKNOWN when a NIC does not destroy one.
        """
        return self._owner.fence(grant)

    def close(self) -> None:
        """Refuse peers, tear all paths down; done when the loop has ended."""
        self.loop.post(self._close)

    def _close(self) -> None:
        self._closed = True
        for peer in self.peers.close():
            peer.end("the transfer engine is closed")
        self._owner.close()
        for name, nic in self.nics.items():
            if not self.memory.is_lost(name):
                self._unwatch(nic)
        self.memory.close()
        for nic in self.nics.values():
            nic.close()

    def _end_peer(self, peer: RdmaPeer, reason: str) -> None:
        self.loop.post(functools.partial(peer.end, reason))

    # -------------------------------------------------------- for peers

    def now(self) -> float:
        """Return seconds of real time."""
        return time.monotonic()

    def is_up(self, nic: str) -> bool:
        """Return whether the link of one of our NICs is up, as last seen."""
        return nic not in self._down

    def decline(self, job: Job, reason: str) -> None:
        """Let another protocol move a job of which nothing has begun."""
        self._router.decline(job, reason)

    def open_endpoint(self, peer: RdmaPeer, path: Path) -> Endpoint | None:
        """Return a new endpoint; None when there are too many. If the peer has no other endpoint,
        room is made for it, and its `pump` is called then. Raises TransferError when the NIC opens
        none.
        """
        is_first = not peer.paths.endpoints
        is_turn = not self._short_of_room or (is_first and peer is self._served)
        if is_turn and not self._pool.has_room:
            self._make_room(peer, insist=is_first)
        if not (is_turn and self._pool.has_room):
            if is_first and peer not in self._short_of_room:
                self._short_of_room.append(peer)
            return None
        serial = self._new_serial()
        endpoint = Endpoint(serial, path, self.nics[path.local], self.limits.signal_every)
        self._pool.add(serial)
        self._endpoints[serial] = (endpoint, peer)
        return endpoint

    def _new_serial(self) -> int:
        """Return a number that no open endpoint has. Numbers are reused."""
        while (serial := next(self._serials) % NUM_SERIALS) in self._endpoints:
            pass
        return serial

    def _make_room(self, peer: RdmaPeer, *, insist: bool) -> None:
        """Close another peer's endpoint that is idle and was not used lately. If there is none and
        `insist` is set, a busy one is closed as soon as it is idle.
        """

        def may_retire(serial: int) -> bool:
            endpoint, owner = self._endpoints[serial]
            return endpoint.may_retire and owner is not peer

        idle = self._pool.victim(may_retire)
        if idle is not None:
            endpoint, owner = self._endpoints[idle]
            owner.retire(endpoint)
        elif insist and not any(endpoint.leaving for endpoint, _ in self._endpoints.values()):
            busy = self._pool.victim(
                lambda serial: self._endpoints[serial][0].state is EndpointState.READY
            )
            if busy is not None:
                self._endpoints[busy][0].leaving = True

    def touch(self, endpoint: Endpoint) -> None:
        """Note that an endpoint is used, so that it stays open longer than others."""
        self._pool.touch(endpoint.serial)

    def close_endpoint(self, endpoint: Endpoint) -> list[Part]:
        """Destroy an endpoint; return what it had under way."""
        if self._endpoints.pop(endpoint.serial, None) is not None:
            self._pool.remove(endpoint.serial)
        parts = endpoint.close()
        if self._short_of_room:
            self.loop.post(self._serve_short)
        return parts

    def _serve_short(self) -> None:
        """Give room to the peers that wait for it, in the order in which they came."""
        while self._short_of_room and not self._closed:
            self._served = peer = self._short_of_room.pop(0)
            peer.pump()
            self._served = None
            if peer in self._short_of_room:  # still none
                self._short_of_room.remove(peer)
                self._short_of_room.insert(0, peer)
                return

    # ---------------------------------------------------------- from NICs

    def _on_ready(self, nic: Nic, _events: int) -> None:
        try:
            self._take_all(nic)
        except TransferError as error:
            self._lose(nic, error.message)

    def _take_all(self, nic: Nic) -> None:
        num_empty = num_full = 0
        while num_empty <= self._settings.num_spins:
            if not self._take(nic):
                num_empty += 1
                continue
            num_empty, num_full = 0, num_full + 1
            if num_full == _MAX_TAKES:
                return  # others have their turn; the descriptor, not armed anew, signals still
        nic.arm()
        self._take(nic)  # completions that came before it was armed give no signal

    def _take(self, nic: Nic) -> bool:
        """Handle the requests that have ended. Return whether there were any."""
        ended = nic.take_completions()
        touched: dict[int, RdmaPeer] = {}
        for completion in ended:
            known = self._endpoints.get(serial_of(completion.work_id))
            if known is None:
                continue  # of an endpoint that was closed
            endpoint, peer = known
            peer.on_completion(endpoint, completion)
            touched[id(peer)] = peer
            if (
                endpoint.leaving
                and endpoint.is_idle
                and serial_of(completion.work_id) in (self._endpoints)
            ):
                peer.retire(endpoint)
        for peer in touched.values():
            peer.pump()
        if touched:
            self._serve_short()
        return bool(ended)

    def _on_port(self, nic: Nic, _events: int) -> None:
        try:
            nic.take_events()
        except TransferError as error:
            self._lose(nic, error.message)
        else:
            self._look_at(nic)

    def _look_at(self, nic: Nic) -> None:
        """Check whether the link of a NIC is up; when it is down, its paths fail at once."""
        name = nic.address.name
        if self._closed or self.memory.is_lost(name):
            return
        if nic.is_active():
            if name in self._down:
                _LOG.warning("the link of %s is up again", name)
                self._down.discard(name)
                for peer in self.peers.all():
                    peer.pump()
            return
        if name not in self._down:
            _LOG.warning("the link of %s is down", name)
            self._down.add(name)
            self._fail_paths(name, f"the link of {name} is down")
        if name not in self._looked_after:
            self._looked_after.add(name)
            again = functools.partial(self._look_again, nic)
            self.loop.call_later(self._settings.link_look_s, again)

    def _look_again(self, nic: Nic) -> None:
        self._looked_after.discard(nic.address.name)
        self._look_at(nic)

    def _lose(self, nic: Nic, reason: str) -> None:
        """Go on without a device that has failed, until it can be opened again."""
        name = nic.address.name
        _LOG.error("%s is lost: %s", name, reason)
        self._unwatch(nic)
        self._down.add(name)
        self._fail_paths(name, reason)
        self._owner.lose(name)
        self.memory.lose(name)
        self._find_again_later(nic)

    def _find_again_later(self, nic: Nic) -> None:
        again = functools.partial(self._find_again, nic)
        self.loop.call_later(self._settings.lost_look_s, again)

    def _find_again(self, nic: Nic) -> None:
        if self._closed:
            return
        name = nic.address.name
        try:
            nic.reopen()
            self.memory.find_again(nic)
        except TransferError as error:
            _LOG.info("%s is still lost: %s", name, error.message)
            self._find_again_later(nic)
            return
        _LOG.warning("%s is opened again", name)
        self._watch(nic)
        self._look_at(nic)

    def _fail_paths(self, name: str, reason: str) -> None:
        for peer in self.peers.all():
            for endpoint in list(peer.paths.endpoints.values()):
                if endpoint.path.local == name:
                    peer.fail(endpoint, reason, blame=False)
            peer.pump()


def open_rdma(
    credentials: Credentials,
    table: RegionTable,
    loop: IoLoop,
    router: Router,
    settings: RdmaSettings,
    listen: ListenAddress,
) -> RdmaBackend:
    """Return the backend over this machine's own devices.

    Raises ConfigError without pyverbs, without a device, or when a named device is not usable.
    """
    choices = NicChoices(
        gid_index=settings.gid_index,
        mtu_bytes=settings.mtu_bytes,
        traffic_class=settings.traffic_class,
        service_level=settings.service_level,
    )
    nics = open_nics(settings.devices, choices)
    matrix = read_matrix([nic.address.name for nic in nics])
    memory = RdmaMemory(table, nics, prefer(matrix, settings.near))
    return RdmaBackend(credentials, memory, nics, loop, router, settings, listen)
