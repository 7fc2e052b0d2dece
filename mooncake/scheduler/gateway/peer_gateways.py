"""The other gateways of a cluster: each is sent the bookings made here, and its bookings are
entered here. They agree on losses: a worker that is silent at one gateway is lost only if no other
gateway hears it. One bad link must not end a worker that serves everyone else.

Owned by the gateway machine, which acts on the losses. Any message may be lost: bookings of others
are hints (prefixes in flight, busy workers). They are corrected every second and dropped when their
gateway is silent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake.base import AnyMessage, WorkerRef
from mooncake.base.cluster_mode import ClusterMode
from mooncake.base.messages import OWN_RELEASE, DoubtPeers, GatewayNews, PeersHeard, Release
from mooncake.rpc.channel import Channel
from mooncake.scheduler.fairness import Turns
from mooncake.scheduler.gateway.status import GatewayStatus, shown_address
from mooncake.scheduler.membership_table import MAX_FENCED, REPEAT_S
from mooncake.scheduler.placement.booking_table import BookingTable, BookingUpdate
from mooncake.scheduler.scaling.policy import DemandMeter

HEARTBEAT_S = 1.0
FORGET_S = 600.0
"""A gateway that has been silent for this long gets no further messages."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    ref: WorkerRef
    heard_s: float
    former_epoch: str = ""
    silent: bool = False
    ask_bookings: bool = True
    """True if the peer has bookings that are not known here."""
    send_bookings: bool = False
    """True if the peer has asked for all bookings of this gateway."""


class PeerGateways:
    """Keeps in touch with other gateways, found through `addresses` or through each other."""

    def __init__(
        self,
        gateway: WorkerRef,
        channel: Channel,
        bookings: BookingTable,
        addresses: Sequence[str],
        timeout_s: float,
        turns: Turns | None = None,
    ) -> None:
        """`addresses` is read again at each use, because it may change.

        An address that ends in a key ("tcp://HOST:PORT#KEY") belongs to one process. It is given up
        like an address that others have named. At any other address a gateway may come back at any
        time. `turns` are kept in step with those of the other gateways.
        """
        self._turns = turns or Turns()
        self.demand = DemandMeter()
        """What clients ask all gateways for; each tells the others."""
        self.mode = ClusterMode()
        """What the other gateways are told about the wanted mode."""
        self._gateway = gateway
        self._channel = channel
        self._bookings = bookings
        self._timeout_s = timeout_s
        self._peers: dict[str, _Peer] = {}
        self._has_others = False
        """True if any gateway that was met has not said goodbye; those forgotten count."""
        self._addresses = addresses
        self._untried: dict[str, float] = {}
        """Addresses of one process, and those that other gateways have named, from which none has
        answered yet -> until when they are tried.
        """
        self._taken_up: set[str] = set()
        """The `addresses` that were tried in this way."""
        self._next_heartbeat_s = float("-inf")
        self._lost: list[WorkerRef] = []
        self._foreign: dict[str, Release] = {}
        """Gateways that understand no version of the protocol that this one does."""

    @property
    def live(self) -> list[WorkerRef]:
        """The gateways that are not silent."""
        return [peer.ref for peer in self._peers.values() if not peer.silent]

    @property
    def all_silent(self) -> bool:
        """True if there are other gateways and none of them is heard."""
        return self._has_others and not self.live

    def status(self, now: float) -> list[GatewayStatus]:
        """Return the status of each other gateway."""
        return [
            GatewayStatus(
                id=name,
                address=shown_address(peer.ref.address),
                state="silent" if peer.silent else "up",
                silent_s=round(now - peer.heard_s, 3),
                num_inflight=self._bookings.num_bookings(name),
            )
            for name, peer in self._peers.items()
        ]

    @property
    def is_first(self) -> bool:
        """True if this gateway makes the decisions that only one gateway may make."""
        return all(self._gateway.worker_id < peer.worker_id for peer in self.live)

    def on_news(self, event: GatewayNews, now: float) -> bool:
        """Apply the news of another gateway. Returns True when that gateway is new, or is back."""
        ref = event.gateway
        if ref.worker_id == self._gateway.worker_id:
            if ref != self._gateway:
                address = shown_address(ref.address)
                logger.error("%s has the name of this gateway: give each its own", address)
            return False
        if not event.release.speaks_with(OWN_RELEASE):
            if self._foreign.get(ref.worker_id) != event.release:
                self._foreign[ref.worker_id] = event.release
                logger.error(
                    "gateway %s is of %s, this one of %s: update by one release at a time",
                    ref.worker_id, event.release, OWN_RELEASE,
                )  # fmt: skip
            return False
        peer = self._peers.get(ref.worker_id)
        if peer is not None and peer.former_epoch == ref.epoch:
            return False  # a late message of its former epoch
        is_new = peer is None or peer.silent or peer.ref.epoch != ref.epoch
        if peer is None:
            peer = self._peers[ref.worker_id] = _Peer(ref, now)
            self._has_others = True
            if self._bookings.updates is None:
                self._bookings.updates = []
        elif peer.ref.epoch != ref.epoch:
            if not peer.silent:
                self._lose(peer)
            peer.former_epoch = peer.ref.epoch
        peer.ref, peer.heard_s, peer.silent = ref, now, False
        peer.ask_bookings = peer.ask_bookings or is_new
        self._untried.pop(ref.address, None)
        self._turns.on_served(event.turn)
        self.demand.on_peer(ref.worker_id, event.offered)
        for other in event.gateways:
            if other.worker_id not in self._peers and other.worker_id != self._gateway.worker_id:
                self._untried[other.address] = now + FORGET_S
        for news in event.news:
            self._bookings.apply(ref.worker_id, news, now)
        if event.open is not None:
            self._bookings.retain(ref.worker_id, event.open)
        peer.send_bookings = peer.send_bookings or event.send_all
        return is_new

    def on_goodbye(self, worker: WorkerRef) -> bool:
        """Remove a gateway that leaves. Return False when it is not a live one."""
        peer = self._peers.get(worker.worker_id)
        if peer is None or peer.ref != worker or peer.silent:
            return False
        address = shown_address(worker.address)
        logger.info("gateway %s at %s has left", worker.worker_id, address)
        self._lose(peer)
        del self._peers[worker.worker_id]
        self._has_others = bool(self._peers)
        return True

    def take_lost(self) -> list[WorkerRef]:
        """Return the gateways that have left or become silent since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def broadcast(self, message: AnyMessage) -> None:
        """Send a message to all other gateways."""
        for peer in self._peers.values():
            self._channel.send(peer.ref.address, message)

    def tick(self, now: float) -> float | None:
        """Send what is due; return when to call again, None while there are no others."""
        self._check_silence(now)
        self._take_up_processes(now)
        if not self._peers:
            self._bookings.updates = None
            if not self._untried and not self._unmet():
                return None
        is_due = now >= self._next_heartbeat_s
        if is_due:
            self._next_heartbeat_s = now + HEARTBEAT_S
            self._untried = {one: end_s for one, end_s in self._untried.items() if now < end_s}
            for address in {**self._untried, **dict.fromkeys(self._unmet())}:
                self._channel.send(address, self._news([]))
        changes: list[BookingUpdate] = self._bookings.updates or []
        if changes:
            self._bookings.updates = []
        for peer in self._peers.values():
            if is_due or (not peer.silent and (peer.send_bookings or peer.ask_bookings or changes)):
                news = list(self._bookings.own_updates()) if peer.send_bookings else changes
                whole = peer.send_bookings or is_due
                self._send(peer, self._news(news, whole=whole, ask_bookings=peer.ask_bookings))
        return self._next_heartbeat_s

    def _take_up_processes(self, now: float) -> None:
        """Try each of `addresses` that belongs to one process, for a while and only once."""
        new = {each for each in self._addresses if "#" in each} - self._taken_up
        self._taken_up |= new
        known = self._known()
        self._untried.update({each: now + FORGET_S for each in sorted(new) if each not in known})

    def _known(self) -> set[str]:
        return {self._gateway.address, *(peer.ref.address for peer in self._peers.values())}

    def _unmet(self) -> list[str]:
        """Return the addresses at which no gateway is known but one may appear at any time."""
        known = self._known()
        return [each for each in self._addresses if each not in known and "#" not in each]

    def check_integrity(self) -> None:
        """Raise AssertionError when a lost gateway has bookings here."""
        known = {name for name, peer in self._peers.items() if not peer.silent}
        assert self._bookings.owners <= known, "bookings of a gateway that is gone"
        assert self._gateway.worker_id not in known, "this gateway is its own peer"

    def _send(self, peer: _Peer, message: GatewayNews) -> None:
        peer.ask_bookings = peer.send_bookings = False
        self._channel.send(peer.ref.address, message)

    def _news(
        self, news: list[BookingUpdate], *, whole: bool = False, ask_bookings: bool = False
    ) -> GatewayNews:
        return GatewayNews(
            gateway=self._gateway,
            gateways=self.live,
            news=news,
            open=self._bookings.own_ids() if whole else None,
            send_all=ask_bookings,
            release=OWN_RELEASE,
            turn=self._turns.clock,
            offered=list(self.demand.total),
            mode=self.mode,
        )

    def _check_silence(self, now: float) -> None:
        for name, peer in list(self._peers.items()):
            if not peer.silent and now - peer.heard_s > self._timeout_s:
                address = shown_address(peer.ref.address)
                logger.warning("gateway %s at %s gives no sign of life", name, address)
                self._lose(peer)
            elif now - peer.heard_s > FORGET_S:
                del self._peers[name]

    def _lose(self, peer: _Peer) -> None:
        peer.silent = True
        self.demand.forget(peer.ref.worker_id)
        self._bookings.retain(peer.ref.worker_id, [])
        self._lost.append(peer.ref)


class LossAgreement:
    """Collects workers not heard here, until all live gateways have answered about them."""

    def __init__(self, gateway: WorkerRef, channel: Channel) -> None:
        self._gateway = gateway
        self._channel = channel
        self._open: dict[WorkerRef, set[str]] = {}
        """Worker -> ids of the gateways that do not hear it either."""
        self._ask_s = float("-inf")

    @property
    def open_workers(self) -> Iterable[WorkerRef]:
        """Those of which it is not known whether they are lost."""
        return self._open

    def open(self, workers: Iterable[WorkerRef]) -> None:
        """Ask about these workers too when `take_lost` asks next."""
        for worker in workers:
            if len(self._open) < MAX_FENCED:
                self._open.setdefault(worker, set())

    def close(self, worker: WorkerRef) -> None:
        """Forget a worker that has been heard here."""
        self._open.pop(worker, None)

    def on_answer(self, answer: PeersHeard) -> None:
        """Apply the answer of another gateway. If that gateway hears a worker, the question about
        it is settled.
        """
        for worker in answer.heard:
            self._open.pop(worker, None)
        for worker in answer.unheard:
            if worker in self._open:
                self._open[worker].add(answer.gateway.worker_id)

    def take_lost(self, gateways: list[WorkerRef], now: float) -> list[WorkerRef]:
        """Return the workers that none of the live `gateways` hears, and ask about the rest."""
        ids = {gateway.worker_id for gateway in gateways}
        lost = [worker for worker, unheard_by in self._open.items() if ids <= unheard_by]
        for worker in lost:
            del self._open[worker]
        if self._open and now >= self._ask_s:
            self._ask_s = now + REPEAT_S
            question = DoubtPeers(worker=self._gateway, peers=list(self._open))
            for gateway in gateways:
                self._channel.send(gateway.address, question)
        return lost

    @property
    def next_s(self) -> float | None:
        """When to ask again; None while nothing is open."""
        return self._ask_s if self._open else None
