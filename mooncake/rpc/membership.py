"""A worker's standing in the cluster: hello until welcomed, then numbered block events and load
reports.

Pure: messages and `now` in, messages out through the channel. All three worker roles own one of
these.
"""

from __future__ import annotations

from collections.abc import Callable

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


class Membership:
    """Keeps the gateway informed about one worker.

    `inventory` returns all block keys the worker holds now; it is asked for when the gateway wants
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
        self._gateway_address = gateway_address
        self._tier = tier
        self._inventories = {tier: inventory}
        self._report_interval_s = report_interval_s
        self._welcomed = False
        self._next_s = float("-inf")
        self._sequence_nos = {tier: 0}
        self._samples: list[CostSample] = []
        self._withdrawn = False
        self.kvstore: WorkerRef | None = None
        """The pool of this worker's node, once known."""

    def add_tier(self, tier: Tier, inventory: Callable[[], list[BlockKey]]) -> None:
        """Report another tier too; its block events have numbers of their own."""
        self._inventories[tier] = inventory
        self._sequence_nos[tier] = 0

    @property
    def worker(self) -> WorkerRef:
        return self._hello.worker

    @property
    def welcomed(self) -> bool:
        return self._welcomed

    def on_welcome(self, welcome: Welcome) -> None:
        """The gateway knows us (again)."""
        self._welcomed = True
        self._gateway_address = welcome.gateway.address
        self.kvstore = welcome.kvstore
        if welcome.send_snapshot:
            for tier, inventory in self._inventories.items():
                keys = [] if self._withdrawn else inventory()
                self._send_blocks(tier, keys, [], snapshot=True)

    def withdraw(self) -> None:
        """Tell that nothing is to be had here any more, whatever is still held; for good."""
        if not self._withdrawn and self._welcomed:
            for tier in self._inventories:
                self._send_blocks(tier, [], [], snapshot=True)
        self._withdrawn = True

    def on_who(self, question: WhoAreYou) -> None:
        """A gateway that knows nothing yet heard us: say hello to it, as at the start."""
        self._welcomed = False
        self._gateway_address = question.gateway.address
        self._next_s = float("-inf")

    def doubt(self, peers: list[WorkerRef]) -> None:
        """Ask the gateway whether these peers are still there; it answers with `PeerLost`."""
        if peers and self._welcomed:
            self._send(DoubtPeers(worker=self.worker, peers=peers))

    def on_peer_lost(self, worker: WorkerRef) -> None:
        """Forget the pool if it was ours; a new one comes with a new `Welcome`."""
        if self.kvstore == worker:
            self.kvstore = None

    def add_sample(self, sample: CostSample) -> None:
        """Remember a measured step for the next report; the newest 64 are kept."""
        self._samples.append(sample)
        del self._samples[:-MAX_SAMPLES]

    def send_blocks(
        self, stored: list[BlockKey], removed: list[BlockKey], tier: Tier | None = None
    ) -> None:
        """Tell what came and went since the last call; nothing is sent when nothing did."""
        if (stored or removed) and self._welcomed and not self._withdrawn:
            self._send_blocks(tier or self._tier, stored, removed, snapshot=False)

    def tick(self, now: float, load: Callable[[], WorkerLoad]) -> float:
        """Send what is due and return when to be called again."""
        if now >= self._next_s:
            if self._welcomed:
                self._next_s = now + self._report_interval_s
                self._send(LoadReport(worker=self.worker, load=load(), samples=self._samples))
                self._samples = []
            else:
                self._next_s = now + HELLO_RETRY_S
                self._send(self._hello)
        return self._next_s

    def _send_blocks(
        self, tier: Tier, stored: list[BlockKey], removed: list[BlockKey], *, snapshot: bool
    ) -> None:
        self._sequence_nos[tier] += 1
        self._send(
            BlockEvents(
                worker=self.worker,
                tier=tier,
                sequence_no=self._sequence_nos[tier],
                stored=stored,
                removed=removed,
                snapshot=snapshot,
            )
        )

    def _send(self, message: WorkerHello | LoadReport | BlockEvents | DoubtPeers) -> None:
        self._channel.send(self._gateway_address, message)
