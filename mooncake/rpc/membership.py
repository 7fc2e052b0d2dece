"""A worker's standing in the cluster: hello until welcomed, then numbered block events and load
reports; to each gateway, where there are several.

Pure: messages and `now` in, messages out through the channel. All three worker roles own one of
these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import (
    BlockEvents,
    CostSample,
    DoubtPeers,
    LoadReport,
    Tier,
    Welcome,
    WhoAreYou,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from mooncake.rpc.channel import Channel

HELLO_RETRY_S = 0.5
MAX_SAMPLES = 64
ANSWER_S = 3.0
"""A gateway that is said to be lost has so long to answer another hello."""
MAX_GATEWAYS = 64
"""Of more, the one that was heard of first is forgotten."""


@dataclass(slots=True)
class _Gateway:
    """What one gateway was told, and what it said."""

    address: str
    ref: WorkerRef | None = None
    """Its present life, once it has told."""
    welcomed: bool = False
    next_s: float = float("-inf")
    """When a report, or another hello, is due."""
    sequence_nos: dict[Tier, int] = field(default_factory=dict)
    samples: list[CostSample] = field(default_factory=list)
    kvstore: WorkerRef | None = None
    doubted: bool = False
    """Somebody says that it is lost, and it has not answered since."""
    lost_at_s: float | None = None
    """When it is given up, if it is doubted."""


class Membership:
    """Keeps the gateways informed about one worker.

    `inventory` returns all block keys the worker holds now; it is asked for when a gateway wants
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
    ) -> None:
        self._hello = hello
        self._channel = channel
        self._gateways = {"": _Gateway(gateway_address)}
        """By id; "" stands for the first until it has told its own."""
        self._tier = tier
        self._inventories = {tier: inventory}
        self._report_interval_s = report_interval_s
        self._withdrawn = False
        self._lost: list[WorkerRef] = []

    def add_tier(self, tier: Tier, inventory: Callable[[], list[BlockKey]]) -> None:
        """Report another tier too; its block events have numbers of their own."""
        self._inventories[tier] = inventory

    @property
    def worker(self) -> WorkerRef:
        return self._hello.worker

    @property
    def gateway_addresses(self) -> list[str]:
        """Where the gateways are that we speak to."""
        return [gateway.address for gateway in self._gateways.values()]

    @property
    def welcomed(self) -> bool:
        """Whether some gateway knows us."""
        return any(gateway.welcomed for gateway in self._gateways.values())

    @property
    def welcoming(self) -> list[str]:
        """Where the gateways are that know us."""
        return [gateway.address for gateway in self._welcoming()]

    @property
    def kvstore(self) -> WorkerRef | None:
        """The pool of this worker's node, once known."""
        named = (gateway.kvstore for gateway in self._gateways.values())
        return next((kvstore for kvstore in named if kvstore is not None), None)

    def on_welcome(self, welcome: Welcome) -> None:
        """A gateway knows us (again)."""
        gateway = self._gateway(welcome.gateway)
        gateway.welcomed = True
        gateway.doubted, gateway.lost_at_s = False, None
        gateway.kvstore = welcome.kvstore
        if welcome.send_snapshot:
            for tier, inventory in self._inventories.items():
                keys = [] if self._withdrawn else inventory()
                self._send_blocks(gateway, tier, keys, [], snapshot=True)
        for other in welcome.gateways:
            known = self._gateways.get(other.worker_id)
            if known is None or (known.doubted and known.ref != other):
                self._gateway(other)

    def withdraw(self) -> None:
        """Tell that nothing is to be had here any more, whatever is still held; for good."""
        for gateway in [] if self._withdrawn else self._welcoming():
            for tier in self._inventories:
                self._send_blocks(gateway, tier, [], [], snapshot=True)
        self._withdrawn = True

    def on_who(self, question: WhoAreYou) -> None:
        """A gateway that knows nothing yet heard us: say hello to it, as at the start."""
        gateway = self._gateway(question.gateway)
        gateway.welcomed = False
        gateway.next_s = float("-inf")

    def doubt(self, peers: list[WorkerRef]) -> None:
        """Ask whether these peers are still there; a gateway answers with `PeerLost`."""
        for gateway in self._welcoming() if peers else []:
            self._send(gateway, DoubtPeers(worker=self.worker, peers=peers))

    def on_peer_lost(self, worker: WorkerRef) -> None:
        """Forget the pool if it was ours; a new one comes with a new `Welcome`. A gateway of which
        another says so is asked itself: the two may merely not reach each other.
        """
        for gateway in self._gateways.values():
            if gateway.kvstore == worker:
                gateway.kvstore = None
            if gateway.ref == worker and not gateway.doubted:
                gateway.welcomed, gateway.doubted = False, True
                gateway.next_s = float("-inf")

    def lost_gateways(self) -> list[WorkerRef]:
        """Return the gateways given up since the last call: nobody waits for what they asked."""
        lost, self._lost = self._lost, []
        return lost

    def add_sample(self, sample: CostSample) -> None:
        """Remember a measured step for the next report; the newest 64 are kept."""
        for gateway in self._gateways.values():
            gateway.samples.append(sample)
            del gateway.samples[:-MAX_SAMPLES]

    def send_blocks(
        self, stored: list[BlockKey], removed: list[BlockKey], tier: Tier | None = None
    ) -> None:
        """Tell what came and went since the last call; nothing is sent when nothing did."""
        if (stored or removed) and not self._withdrawn:
            for gateway in self._welcoming():
                self._send_blocks(gateway, tier or self._tier, stored, removed, snapshot=False)

    def tick(self, now: float, load: Callable[[], WorkerLoad]) -> float:
        """Send what is due and return when to be called again."""
        report: WorkerLoad | None = None
        self._give_up(now)
        for gateway in self._gateways.values():
            if now < gateway.next_s:
                continue
            if gateway.welcomed:
                report = load() if report is None else report
                gateway.next_s = now + self._report_interval_s
                said = LoadReport(
                    worker=self.worker, load=report, samples=gateway.samples,
                    block_nos=dict(gateway.sequence_nos),
                )  # fmt: skip
                self._send(gateway, said)
                gateway.samples = []
            else:
                gateway.next_s = now + HELLO_RETRY_S
                self._send(gateway, self._hello)
        return min(gateway.next_s for gateway in self._gateways.values())

    def _give_up(self, now: float) -> None:
        for gateway_id, gateway in list(self._gateways.items()):
            if gateway.doubted and gateway.lost_at_s is None:
                gateway.lost_at_s = now + ANSWER_S
            if gateway.lost_at_s is None or now < gateway.lost_at_s or gateway.ref is None:
                continue
            self._lost = [*self._lost, gateway.ref][-MAX_GATEWAYS:]
            gateway.doubted, gateway.lost_at_s, gateway.ref = False, None, None
            if len(self._gateways) > 1:  # the only one is greeted on: it may come back
                del self._gateways[gateway_id]

    def _gateway(self, ref: WorkerRef) -> _Gateway:
        """Return what is known of a gateway, under its present address."""
        gateway = self._gateways.get(ref.worker_id)
        if gateway is None:
            gateway = self._gateways.pop("", None) or _Gateway(ref.address)
            self._gateways[ref.worker_id] = gateway
            if len(self._gateways) > MAX_GATEWAYS:
                del self._gateways[next(iter(self._gateways))]
        if gateway.ref != ref:
            gateway.address, gateway.ref = ref.address, ref
            gateway.doubted, gateway.lost_at_s = False, None
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
