"""The other gateways of a cluster: each is told what is placed here, and what it tells is booked.

Owned by the gateway machine. Nothing depends on a word of theirs arriving: bookings of others are
hints (whose prefix is in flight, who is busy), set right every second and dropped with silence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.base import AnyMessage, WorkerRef
from mooncake.base.messages import GatewayNews
from mooncake.rpc.channel import Channel
from mooncake.scheduler.books import BookNews, Books
from mooncake.scheduler.status import GatewayStatus

BEAT_S = 1.0
FORGET_S = 600.0
"""A gateway that has been silent for so long is spoken to no more."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    ref: WorkerRef
    heard_s: float
    former_epoch: str = ""
    silent: bool = False
    ask_all: bool = True
    """It has bookings that are not known here."""
    tell_all: bool = False
    """It has asked for all of ours."""


class PeerGateways:
    """Gateways by id, met through `addresses` or through each other."""

    def __init__(
        self,
        gateway: WorkerRef,
        channel: Channel,
        books: Books,
        addresses: Sequence[str],
        timeout_s: float,
    ) -> None:
        self._gateway = gateway
        self._channel = channel
        self._books = books
        self._timeout_s = timeout_s
        self._peers: dict[str, _Peer] = {}
        self._sought = {one: float("inf") for one in addresses if one != gateway.address}
        """Addresses at which nobody has answered yet, and until when they are tried."""
        self._next_beat_s = float("-inf")
        self._lost: list[WorkerRef] = []

    @property
    def living(self) -> list[WorkerRef]:
        """The gateways heard of late."""
        return [peer.ref for peer in self._peers.values() if not peer.silent]

    def status(self, now: float) -> list[GatewayStatus]:
        """Return what is known of each."""
        return [
            GatewayStatus(
                id=name,
                address=peer.ref.address,
                state="silent" if peer.silent else "up",
                silent_s=round(now - peer.heard_s, 3),
                num_inflight=self._books.num_of(name),
            )
            for name, peer in self._peers.items()
        ]

    @property
    def is_first(self) -> bool:
        """Whether this gateway is the one that decides what only one may decide."""
        return all(self._gateway.worker_id < peer.worker_id for peer in self.living)

    def hear(self, event: GatewayNews, now: float) -> bool:
        """Take in what another gateway did; True when it is new, or back."""
        ref = event.gateway
        if ref.worker_id == self._gateway.worker_id:
            if ref != self._gateway:
                logger.error("%s has the name of this gateway: give each its own", ref.address)
            return False
        peer = self._peers.get(ref.worker_id)
        if peer is not None and peer.former_epoch == ref.epoch:
            return False  # a late word of its former life
        came = peer is None or peer.silent or peer.ref.epoch != ref.epoch
        if peer is None:
            peer = self._peers[ref.worker_id] = _Peer(ref, now)
            self._books.news = [] if self._books.news is None else self._books.news
        elif peer.ref.epoch != ref.epoch:
            if not peer.silent:
                self._give_up(peer)
            peer.former_epoch = peer.ref.epoch
        peer.ref, peer.heard_s, peer.silent = ref, now, False
        peer.ask_all = peer.ask_all or came
        self._sought.pop(ref.address, None)
        for other in event.gateways:
            if other.worker_id not in self._peers and other.worker_id != self._gateway.worker_id:
                self._sought[other.address] = now + FORGET_S
        for news in event.news:
            self._books.hear(ref.worker_id, news, now)
        if event.open is not None:
            self._books.keep(ref.worker_id, event.open)
        peer.tell_all = peer.tell_all or event.send_all
        return came

    def leave(self, worker: WorkerRef) -> bool:
        """Another gateway says goodbye; False when it is none that lives."""
        peer = self._peers.get(worker.worker_id)
        if peer is None or peer.ref != worker or peer.silent:
            return False
        logger.info("gateway %s at %s has left", worker.worker_id, worker.address)
        self._give_up(peer)
        del self._peers[worker.worker_id]
        return True

    def lost(self) -> list[WorkerRef]:
        """Return the gateways that have left or fallen silent since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def tell(self, message: AnyMessage) -> None:
        """Pass something on to all."""
        for peer in self._peers.values():
            self._channel.send(peer.ref.address, message)

    def tick(self, now: float) -> float | None:
        """Send what is due; returns when to come again, None while there are no others."""
        self._note_silence(now)
        if not self._peers:
            self._books.news = None
            if not self._sought:
                return None
        beat = now >= self._next_beat_s
        if beat:
            self._next_beat_s = now + BEAT_S
            self._sought = {one: end_s for one, end_s in self._sought.items() if now < end_s}
            for address in self._sought:
                self._channel.send(address, self._news([]))
        changes: list[BookNews] = self._books.news or []
        if changes:
            self._books.news = []
        for peer in self._peers.values():
            if beat or (not peer.silent and (peer.tell_all or peer.ask_all or changes)):
                news = list(self._books.own()) if peer.tell_all else changes
                whole = peer.tell_all or beat
                self._send(peer, self._news(news, whole=whole, ask_all=peer.ask_all))
        return self._next_beat_s

    def check_integrity(self) -> None:
        """Raise AssertionError when a gateway that is gone has bookings here."""
        known = {name for name, peer in self._peers.items() if not peer.silent}
        assert self._books.owners <= known, "bookings of a gateway that is gone"
        assert self._gateway.worker_id not in known, "this gateway is its own peer"

    def _send(self, peer: _Peer, message: GatewayNews) -> None:
        peer.ask_all = peer.tell_all = False
        self._channel.send(peer.ref.address, message)

    def _news(
        self, news: list[BookNews], *, whole: bool = False, ask_all: bool = False
    ) -> GatewayNews:
        return GatewayNews(
            gateway=self._gateway,
            gateways=self.living,
            news=news,
            open=self._books.own_ids() if whole else None,
            send_all=ask_all,
        )

    def _note_silence(self, now: float) -> None:
        for name, peer in list(self._peers.items()):
            if not peer.silent and now - peer.heard_s > self._timeout_s:
                logger.warning("gateway %s at %s is silent", name, peer.ref.address)
                self._give_up(peer)
            elif now - peer.heard_s > FORGET_S:
                del self._peers[name]

    def _give_up(self, peer: _Peer) -> None:
        peer.silent = True
        self._books.keep(peer.ref.worker_id, [])
        self._lost.append(peer.ref)
