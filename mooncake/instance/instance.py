"""An instance: one engine, its place in the cluster, and the ways blocks come and go. Roles own
one of these.

What a role *does* with finished blocks and sampled tokens is not here: prefill and decode differ
in just that.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import msgspec

from mooncake.base.any_message import AnyMessage
from mooncake.base.blocks import BlockKey
from mooncake.base.kv_layout import BlockPlaces, KvLayout, page_places
from mooncake.base.messages import (
    NO_HEAD,
    ChainHead,
    Drain,
    FinishInfo,
    PeerLost,
    PinGranted,
    PutGranted,
    RequestOutput,
    Role,
    StepOutputs,
    Tier,
    Welcome,
    WhoAreYou,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from mooncake.base.request import Failure, FinishReason
from mooncake.engine.engine import Engine
from mooncake.engine.plan import StepResult
from mooncake.engine.sequence import SequenceOutput
from mooncake.instance.config import InstanceConfig
from mooncake.instance.fetch import Fetcher
from mooncake.instance.mover import SliceMover
from mooncake.instance.pages import Quarantine
from mooncake.instance.push import Push
from mooncake.instance.put import WriteThrough
from mooncake.instance.verify import PageChecksums
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import Membership
from mooncake.transfer.engine import Region, Transfer, TransferDone


class InstancePorts(msgspec.Struct, frozen=True):
    """The world of an instance."""

    channel: Channel
    transfer: Transfer
    pages: Region
    """Holds the engine's pages, `[layers, pages, block_tokens, width]`."""
    gateway_address: str


class Instance:
    """Engine, membership, fetches, pushes and puts of one worker."""

    def __init__(
        self,
        config: InstanceConfig,
        layout: KvLayout,
        engine: Engine,
        hello: WorkerHello,
        ports: InstancePorts,
    ) -> None:
        self.config = config
        self.layout = layout
        self.engine = engine
        self.pool = engine.pool
        self.worker = hello.worker
        self._channel = ports.channel
        self._transfer = ports.transfer
        self._segment = ports.transfer.segment
        self._pages = ports.pages
        self._num_pages = hello.num_blocks
        self.mover = SliceMover(layout, ports.transfer, ports.pages.region_id, hello.num_blocks)
        self.fetcher = Fetcher(
            self.worker,
            ports.channel,
            self.mover,
            config.fetch_timeout_s,
            self._count_fetch,
            self._page_checksums() if config.verify_fetches else None,
        )
        self.write_through = WriteThrough(self.worker, ports.channel, config.push_timeout_s)
        self.quarantine = Quarantine(self.pool, config.quarantine_s)
        self.draining = False
        self.next_role: Role | None = None
        """What it is to come back as when nothing is in progress here."""
        self._membership = Membership(
            hello,
            ports.channel,
            ports.gateway_address,
            Tier.HBM,
            self.pool.inventory,
            config.report_interval_s,
        )
        self._outputs: dict[str, list[RequestOutput]] = {}
        self._num_open_pushes = 0
        self._last_sequence_id = 0
        self.counters: dict[str, float] = {}

    def _page_checksums(self) -> PageChecksums | None:
        """Return what hashes our pages; None in a world that moves no bytes."""
        try:
            list(self._pages.read([(0, 1)]))
        except ValueError:
            return None
        return PageChecksums(self.layout, self._pages, self._num_pages)

    # ---------------------------------------- events that both roles treat alike

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take an event that needs nothing of the role; others are left alone."""
        match event:
            case TransferDone():
                self.mover.on_done(event, now)
            case PutGranted():
                self.write_through.on_granted(event, now)
            case PinGranted():
                self.fetcher.on_pin_granted(event, now)
            case Drain():
                self.draining = True
                self.next_role = event.then or self.next_role
            case Welcome():
                self._membership.on_welcome(event)
            case WhoAreYou():
                self._membership.on_who(event)
            case PeerLost():
                self._membership.on_peer_lost(event.worker)
                self.fetcher.on_peer_lost(event.worker, now)
                self.write_through.on_peer_lost(event.worker, now)

    def on_step(self, result: StepResult, now: float) -> list[SequenceOutput]:
        """Commit a step to the engine and remember what it cost."""
        outputs = self.engine.on_step(result, now)
        sample = self.engine.cost_sample()
        if sample is not None:
            self._membership.add_sample(sample)
        return outputs

    def start_steps(self, now: float) -> list[SequenceOutput]:
        """Start what the engine can start; return the ends of sequences that can never run here."""
        return self.engine.tick(now)

    def tick(self, now: float) -> float:
        """Give up what is overdue, send what is due; return the next wake-up."""
        wakes = [self.fetcher.tick(now), self.write_through.tick(now), self.quarantine.tick(now)]
        self._membership.send_blocks(*self.pool.drain_events())
        self._flush()
        wakes.append(self._membership.tick(now, self.load))
        return min(wake for wake in wakes if wake is not None)

    # ------------------------------------------------------------ what roles do

    @property
    def kvstore(self) -> WorkerRef | None:
        """The pool of this node, while it runs."""
        return self._membership.kvstore

    def next_sequence_id(self) -> int:
        self._last_sequence_id += 1
        return self._last_sequence_id

    def places(self, pages: list[int]) -> BlockPlaces:
        """Return where a peer may write these pages."""
        return page_places(
            self.layout, self._segment, self._pages.region_id, self._num_pages, pages
        )

    def send(self, worker: WorkerRef, message: AnyMessage) -> None:
        self._channel.send(worker.address, message)

    def doubt(self, peers: list[WorkerRef]) -> None:
        """Ask the gateway whether these are still there; `PeerLost` comes of those that are not."""
        self._membership.doubt(peers)

    def lost_gateways(self) -> list[WorkerRef]:
        """Return the gateways given up since the last call."""
        return self._membership.lost_gateways()

    def say(self, gateway: WorkerRef, output: RequestOutput) -> None:
        """Queue an output; all of a tick leave in one message."""
        self._outputs.setdefault(gateway.address, []).append(output)

    def fail(
        self, gateway: WorkerRef, request_id: str, attempt: int, failure: Failure, start: int
    ) -> None:
        """Tell the gateway that this attempt cannot go on here."""
        finish = FinishInfo(reason=FinishReason.ERROR, failure=failure)
        output = RequestOutput(request_id=request_id, attempt=attempt, start=start, finish=finish)
        self.say(gateway, output)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the load report."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def open_push(self) -> Push:
        """Return a push for one sequence; it must be given to `close_push`."""
        self._num_open_pushes += 1
        return Push(self.mover, self.pool, self.config.push_timeout_s)

    def put(
        self,
        push: Push,
        blocks: dict[BlockKey, int],
        tenant: str,
        settled: Callable[[float], None],
        head: ChainHead = NO_HEAD,
    ) -> None:
        """Write blocks (key -> index) through to this node's pool, if there is one, and tell it
        that what lies before them is used too.
        """
        if blocks and self.kvstore is not None:
            self.write_through.put(self.kvstore, push, blocks, tenant, settled, head)

    def tell_used(self, head: ChainHead) -> None:
        """Tell this node's pool that a chain is used of which nothing is to be written."""
        if head.num_counted < len(head.keys) and self.kvstore is not None:
            self.write_through.tell(self.kvstore, head)

    def close_push(
        self, push: Push, now: float, then: Callable[[float], None] | None = None
    ) -> None:
        """End a push; `then` is called when nothing of it touches memory any more."""

        def released(at: float) -> None:
            self._num_open_pushes -= 1
            self.write_through.abandon(push, at)
            if then is not None:
                then(at)

        push.close(now, released)

    def _count_fetch(self, store: WorkerRef, done: TransferDone) -> None:
        """Count bytes and seconds apart for the own node's pool: the Conductor learns from them."""
        place = "local" if store == self.kvstore else "remote"
        self.count(f"fetch_{place}_bytes", done.num_bytes)
        self.count(f"fetch_{place}_seconds", done.seconds)

    def load(self) -> WorkerLoad:
        """Return the state for a report."""
        load = self.engine.load()
        counters = {
            **load.counters,
            **self.counters,
            **self._transfer.counters(),
            "blocks_fetched": self.fetcher.num_blocks_fetched,
            "fetches_failed": self.fetcher.num_fetches_failed,
            "blocks_fetched_corrupt": self.fetcher.num_blocks_corrupt,
            "blocks_put": self.write_through.num_blocks_put,
            "puts_failed": self.write_through.num_puts_failed,
        }
        return msgspec.structs.replace(load, counters=counters, draining=self.draining)

    def block_digests(self, keys: list[BlockKey]) -> list[str]:
        """Return a digest of the bytes of each leading block of `keys` that is cached here: two
        workers that hold the same blocks have the same digests.
        """
        pages = self.pool.match(keys)
        places, size = self.places(pages), self.layout.slice_bytes
        digests = []
        for offset in places.offsets:
            digest = blake2b(digest_size=16)
            slices = [
                (offset + layer * places.layer_stride, size)
                for layer in range(self.layout.num_layers)
            ]
            for part in self._pages.read(slices):
                digest.update(part)
            digests.append(digest.hexdigest())
        return digests

    @property
    def quiet(self) -> bool:
        """Nothing runs, moves or waits here: every page is free or cached."""
        return (
            self.engine.idle
            and self._num_open_pushes == 0
            and self.fetcher.num_open == 0
            and self.write_through.num_open == 0
            and self.quarantine.num_pages == 0
            and self.mover.num_in_flight == 0
        )

    def check_integrity(self, *, role_quiet: bool) -> None:
        """Raise AssertionError when pages were lost, freed twice, or (the role having nothing in
        progress either) are held by nobody.
        """
        self.engine.check_integrity()
        if role_quiet and self.quiet:
            assert self.pool.num_held == 0, f"{self.pool.num_held} pages are held by nobody"

    def _flush(self) -> None:
        for address, outputs in self._outputs.items():
            self._channel.send(address, StepOutputs(worker=self.worker, outputs=outputs))
        self._outputs = {}
