"""Keeps a worker a member of the cluster. It sends a hello to each gateway until that gateway
welcomes it, then numbered block events and load reports.

Pure: messages and `now` in, messages out through the channel. All worker roles own one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import (
    OWN_RELEASE,
    BlockEvents,
    CostSample,
    DoubtPeers,
    LoadReport,
    PeerLost,
    Refused,
    Tier,
    Welcome,
    WhoAreYou,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from mooncake.rpc.channel import Channel

_log = logging.getLogger(__name__)

HELLO_RETRY_S = 0.5
MAX_SAMPLES = 64
MAX_FETCHED = 1024
ANSWER_S = 3.0
"""A suspected gateway is given up when it answers no hello within this time."""
SEED_S = 5.0
"""Seconds between two tries of the addresses at which no known gateway is."""
MAX_GATEWAYS = 64
"""Who knows more gateways than this drops the one that it has known for longest."""


@dataclass(slots=True)
class _Gateway:
    """What this worker knows of one gateway."""

    address: str
    ref: WorkerRef | None = None
    """The gateway in its present epoch, once it has welcomed us."""
    welcomed: bool = False
    next_s: float = float("-inf")
    """When the next report or hello is due."""
    sequence_nos: dict[Tier, int] = field(default_factory=dict)
    samples: list[CostSample] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    kvstore: WorkerRef | None = None
    relieved: bool = False
    """True if it has other workers that can do this worker's work."""
    suspected: bool = False
    """Another gateway calls it lost, and it has not answered since."""
    lost_at_s: float | None = None
    """When a suspected gateway is given up."""


class Membership:
    """Keeps the gateways informed about one worker.

    `inventory` returns all block keys that the worker holds now; it is called when a gateway wants
    a snapshot.
    """

    def __init__(
        self,
        hello: WorkerHello,
        channel: Channel,
        gateway_address: str,
        tier: Tier,
        inventory: Callable[[], list[BlockKey]],
        report_interval_s: float,
        seeds: Sequence[str] = (),
    ) -> None:
        """`seeds`: addresses at which a gateway may appear at any time, or appear again after it
        has moved. Names in them are resolved anew with each connection.
        """
        self._hello = msgspec.structs.replace(hello, release=OWN_RELEASE)
        self._channel = channel
        self._gateways = {"": _Gateway(gateway_address)}
        """Gateways by id; the first one has the id "" until it has sent its own."""
        self._seeds = seeds
        self._next_seeds_s = float("-inf")
        self._tier = tier
        self._inventories = {tier: inventory}
        self._report_interval_s = report_interval_s
        self._withdrawn = False
        self._lost: list[WorkerRef] = []
        self._refused: set[str] = set()
        """Why gateways do not take this worker, as far as it has been logged."""

    def add_tier(self, tier: Tier, inventory: Callable[[], list[BlockKey]]) -> None:
        """Report another tier too; its block events are numbered separately."""
        self._inventories[tier] = inventory

    @property
    def worker(self) -> WorkerRef:
        return self._hello.worker

    @property
    def gateway_addresses(self) -> list[str]:
        """The addresses of all gateways known."""
        return [gateway.address for gateway in self._gateways.values()]

    @property
    def welcomed(self) -> bool:
        """True if a gateway has welcomed this worker."""
        return any(gateway.welcomed for gateway in self._gateways.values())

    @property
    def welcoming(self) -> list[str]:
        """The addresses of the gateways that have welcomed this worker."""
        return [gateway.address for gateway in self._welcoming()]

    @property
    def kvstore(self) -> WorkerRef | None:
        """The pool of this worker's node, once known."""
        named = (gateway.kvstore for gateway in self._gateways.values())
        return next((kvstore for kvstore in named if kvstore is not None), None)

    @property
    def relieved(self) -> bool:
        """True if no gateway needs this worker any more."""
        return all(gateway.relieved for gateway in self._welcoming())

    def handle(self, event: msgspec.Struct) -> None:
        """Take what gateways say about this worker, and that a peer is lost. Other events are
        ignored.
        """
        match event:
            case Welcome():
                self._on_welcome(event)
            case WhoAreYou():
                self._on_who_are_you(event)
            case Refused():
                self._on_refused(event)
            case PeerLost():
                self._on_peer_lost(event.worker)

    def _on_welcome(self, welcome: Welcome) -> None:
        """Record that a gateway knows this worker, and send it a snapshot if it wants one."""
        gateway = self._gateway(welcome.gateway)
        gateway.welcomed = True
        gateway.suspected, gateway.lost_at_s = False, None
        gateway.kvstore, gateway.relieved = welcome.kvstore, welcome.relieved
        if welcome.send_snapshot:
            for tier, inventory in self._inventories.items():
                keys = [] if self._withdrawn else inventory()
                self._send_blocks(gateway, tier, keys, [], snapshot=True)
        for other in welcome.gateways:
            known = self._gateways.get(other.worker_id)
            if known is None or (known.suspected and known.ref != other):
                self._gateway(other)

    def _on_refused(self, refused: Refused) -> None:
        """Log why a gateway does not take this worker; the same reason is logged once."""
        if refused.message == WorkerHello.__name__ and refused.reason not in self._refused:
            self._refused = {*self._refused, refused.reason} if len(self._refused) < 64 else set()
            _log.error("a gateway does not use this worker: %s", refused.reason)

    def withdraw(self) -> None:
        """Report all blocks as removed, although they may still be held, and report none again."""
        for gateway in [] if self._withdrawn else self._welcoming():
            for tier in self._inventories:
                self._send_blocks(gateway, tier, [], [], snapshot=True)
        self._withdrawn = True

    def _on_who_are_you(self, question: WhoAreYou) -> None:
        """Say hello again to a gateway that has restarted and does not know this worker."""
        gateway = self._gateway(question.gateway)
        gateway.welcomed = False
        gateway.next_s = float("-inf")

    def ask_about(self, peers: list[WorkerRef]) -> None:
        """Ask whether these peers are alive; a gateway sends `PeerLost` for those that are not."""
        for gateway in self._welcoming() if peers else []:
            self._send(gateway, DoubtPeers(worker=self.worker, peers=peers))

    def _on_peer_lost(self, worker: WorkerRef) -> None:
        """Drop the pool if it was lost; the next one comes with a new `Welcome`. A gateway that
        another one calls lost is sent a hello first: the two may only be cut off from each other.
        """
        for gateway in self._gateways.values():
            if gateway.kvstore == worker:
                gateway.kvstore = None
            if gateway.ref == worker and not gateway.suspected:
                gateway.welcomed, gateway.suspected = False, True
                gateway.next_s = float("-inf")

    def lost_gateways(self) -> list[WorkerRef]:
        """Return the gateways given up since the last call; nothing receives their outputs."""
        lost, self._lost = self._lost, []
        return lost

    def add_sample(self, sample: CostSample) -> None:
        """Add a measured step to the next report; the newest 64 are kept."""
        for gateway in self._gateways.values():
            gateway.samples.append(sample)
            del gateway.samples[:-MAX_SAMPLES]

    def add_fetched(self, request_id: str) -> None:
        """Say in the next report that a request has ended its fetches."""
        for gateway in self._welcoming():
            gateway.fetched.append(request_id)
            del gateway.fetched[:-MAX_FETCHED]

    def send_blocks(
        self, stored: list[BlockKey], removed: list[BlockKey], tier: Tier | None = None
    ) -> None:
        """Send the blocks stored and removed since the last call, if any."""
        if (stored or removed) and not self._withdrawn:
            for gateway in self._welcoming():
                self._send_blocks(gateway, tier or self._tier, stored, removed, snapshot=False)

    def tick(self, now: float, load: Callable[[], WorkerLoad]) -> float:
        """Send what is due; return when to call again."""
        report: WorkerLoad | None = None
        self._give_up(now)
        for gateway in self._gateways.values():
            if now < gateway.next_s:
                continue
            if gateway.welcomed:
                report = load() if report is None else report
                gateway.next_s = now + self._report_interval_s
                message = LoadReport(
                    worker=self.worker, load=report, samples=gateway.samples,
                    block_nos=dict(gateway.sequence_nos), clock_s=now, fetched=gateway.fetched,
                )  # fmt: skip
                self._send(gateway, message)
                gateway.samples, gateway.fetched = [], []
            else:
                gateway.next_s = now + HELLO_RETRY_S
                self._send(gateway, self._hello)
        due = [gateway.next_s for gateway in self._gateways.values()]
        if self._seeds:
            self._try_seeds(now, load if report is None else lambda: report)
            due.append(self._next_seeds_s)
        return min(due)

    def _try_seeds(self, now: float, load: Callable[[], WorkerLoad]) -> None:
        """Write to addresses where no known gateway is. A gateway that knows this worker takes the
        report and answers nothing; another one asks for the worker's hello.
        """
        if now < self._next_seeds_s:
            return
        self._next_seeds_s = now + (SEED_S if self.welcomed else HELLO_RETRY_S)
        known = {gateway.address for gateway in self._gateways.values()}
        for seed in self._seeds:
            if seed in known:
                continue
            if self.welcomed:
                self._channel.send(seed, LoadReport(worker=self.worker, load=load()))
            else:
                self._channel.send(seed, self._hello)

    def _give_up(self, now: float) -> None:
        for gateway_id, gateway in list(self._gateways.items()):
            if gateway.suspected and gateway.lost_at_s is None:
                gateway.lost_at_s = now + ANSWER_S
            if gateway.lost_at_s is None or now < gateway.lost_at_s or gateway.ref is None:
                continue
            self._lost = [*self._lost, gateway.ref][-MAX_GATEWAYS:]
            gateway.suspected, gateway.lost_at_s, gateway.ref = False, None, None
            if len(self._gateways) > 1:  # the only gateway still gets hellos: it may come back
                del self._gateways[gateway_id]

    def _gateway(self, ref: WorkerRef) -> _Gateway:
        """Return the entry of a gateway, updated to its present address."""
        gateway = self._gateways.get(ref.worker_id)
        if gateway is None:
            gateway = self._gateways.pop("", None) or _Gateway(ref.address)
            self._gateways[ref.worker_id] = gateway
            if len(self._gateways) > MAX_GATEWAYS:
                del self._gateways[next(iter(self._gateways))]
        if gateway.ref != ref:
            if gateway.ref is not None:  # it was started again and knows nothing of its requests
                self._lost = [*self._lost, gateway.ref][-MAX_GATEWAYS:]
            gateway.address, gateway.ref = ref.address, ref
            gateway.suspected, gateway.lost_at_s = False, None
        return gateway

    def _welcoming(self) -> list[_Gateway]:
        return [gateway for gateway in self._gateways.values() if gateway.welcomed]

    def _send_blocks(
        self,
        gateway: _Gateway,
        tier: Tier,
        stored: list[BlockKey],
        removed: list[BlockKey],
        *,
        snapshot: bool,
    ) -> None:
        number = gateway.sequence_nos[tier] = gateway.sequence_nos.get(tier, 0) + 1
        self._send(
            gateway,
            BlockEvents(
                worker=self.worker,
                tier=tier,
                sequence_no=number,
                stored=stored,
                removed=removed,
                snapshot=snapshot,
            ),
        )

    def _send(
        self, gateway: _Gateway, message: WorkerHello | LoadReport | BlockEvents | DoubtPeers
    ) -> None:
        self._channel.send(gateway.address, message)
