"""Answers questions and orders to a pool node besides reading and writing: which blocks it holds,
what its figures are, promote these blocks, set the lasting pins of those.

Pure; owned by the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mooncake.base import BlockKey, Tier, WorkerLoad, WorkerRef
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.base.pool_messages import (
    AskPool,
    BlockCopy,
    BlocksDescribed,
    BlocksFound,
    DescribeBlocks,
    FindBlocks,
    LastingPin,
    PinsSet,
    PoolState,
    SetPins,
    TenantUse,
)
from mooncake.base.rights import client_key
from mooncake.kvstore.node.blocks import NodeBlocks, NodePorts
from mooncake.kvstore.node.long_work import LongWork
from mooncake.kvstore.node.peers import Peers
from mooncake.kvstore.storage.promotion import Prefetcher

MAX_CLIENT_LIFTS = 16
"""Orders to pin blocks that wait for these to come from SSD, of all pool clients that share a
credential. Further orders pin only what is in DRAM.
"""


class Inquiries:
    """Answers questions and orders to one node, besides reading and writing."""

    def __init__(
        self, ports: NodePorts, blocks: NodeBlocks, peers: Peers, long_work: LongWork
    ) -> None:
        self._ports = ports
        self._long_work = long_work
        self._blocks = blocks
        self._peers = peers
        self._dram, self._tiering = blocks.dram, blocks.tiering
        self._worker, self._channel = ports.worker, ports.channel
        prefetcher = Prefetcher(self._tiering, blocks.promotions, ports.counters)
        self._prefetcher = prefetcher
        self._num_promoted = 0
        self._lifting: Counter[str] = Counter()
        """Orders that wait for blocks from SSD, by the key of a pool client."""
        self.handlers: dict[type, Callable[[Any, float], object]] = {
            FindBlocks: self._on_find,
            DescribeBlocks: self._on_describe,
            SetPins: lambda message, now: self._set_pins(message, len(message.keys) + 1, now),
            AskPool: self._on_ask,
            Prefetch: prefetcher.begin,
            StopPrefetch: lambda message, _: prefetcher.stop(message),
        }

    def load(self) -> WorkerLoad:
        """Return the load that the gateways are told."""
        own, of_channel = self._ports.counters, self._channel.figures()
        counters: dict[str, float] = {
            **own, **self._tiering.read_seconds, **self._ports.transfer.counters(), **of_channel
        }  # fmt: skip
        # The channel refuses messages, and this node questions over the data connection.
        both = "messages_refused"
        counters[both] = own.get(both, 0) + of_channel.get(both, 0)
        return WorkerLoad(
            num_running=sum(len(state.pins) for state in self._peers.states.values()),
            num_waiting=self._peers.num_puts,
            num_free_blocks=self._dram.num_free,
            num_total_blocks=self._dram.num_blocks,
            num_cached_blocks=self._dram.num_stored,
            draining=self._blocks.migration.begun,
            counters=counters,
        )

    def state(self, asker: WorkerRef, ticket: int) -> PoolState:
        """Return the figures of the node now."""
        ssd = self._tiering.ssd
        return PoolState(
            asker=asker,
            ticket=ticket,
            store=self._worker,
            load=self.load(),
            layout_fingerprint=self._ports.layout.fingerprint,
            block_bytes=self._dram.block_bytes,
            num_ssd_blocks=ssd.num_slots,
            num_ssd_stored=ssd.num_stored,
            num_objects_known=sum(
                tier.places.num_stored for tier in self._tiering.lower if tier.is_shared
            ),
            num_pinned=self._dram.num_pinned,
            num_quarantined=self._dram.num_quarantined,
            num_hard_pinned=self._dram.num_lasting(LastingPin.HARD),
            num_soft_pinned=self._dram.num_lasting(LastingPin.SOFT),
            num_kept=self._dram.num_kept,
            draining=self._blocks.migration.begun,
            drained=self._blocks.drained,
            drain=self._blocks.migration.progress(),
            tenants=tuple(
                TenantUse(tenant, tier, used, quota)
                for tier, part in ((Tier.DRAM, self._dram), (Tier.SSD, ssd))
                for tenant, (used, quota) in sorted(part.tenant_use().items())
            ),
        )

    def _on_ask(self, message: AskPool, _now: float) -> None:
        self._channel.send(message.asker.address, self.state(message.asker, message.ticket))

    def _on_find(self, message: FindBlocks, now: float) -> None:
        if self._long_work.refuses(message):
            return
        tiers: list[Tier | None] = []

        def answer(_now: float) -> None:
            found = BlocksFound(
                asker=message.asker, ticket=message.ticket, store=self._worker, tiers=tiers
            )
            self._channel.send(message.asker.address, found)

        def look(keys: Sequence[BlockKey], _now: float) -> None:
            tiers.extend(map(self._tier_of, keys))

        self._long_work.begin(message, message.keys, look, answer, now)

    def _tier_of(self, key: BlockKey) -> Tier | None:
        if self._dram.has(key):
            return Tier.DRAM
        return next(iter(self._tiering.stored_in(key)), None)

    def _on_describe(self, message: DescribeBlocks, now: float) -> None:
        if self._long_work.refuses(message):
            return
        copies: list[list[BlockCopy]] = []

        def answer(_now: float) -> None:
            described = BlocksDescribed(
                asker=message.asker, ticket=message.ticket, store=self._worker, copies=copies
            )
            self._channel.send(message.asker.address, described)

        def look(keys: Sequence[BlockKey], _now: float) -> None:
            copies.extend(map(self._copies, keys))

        self._long_work.begin(message, message.keys, look, answer, now)

    def _copies(self, key: BlockKey) -> list[BlockCopy]:
        size, dram = self._dram.block_bytes, self._dram
        copies = []
        if dram.has(key):
            block = dram.block(key)
            copies.append(BlockCopy(Tier.DRAM, size, block.lasting_pin, block.pins))
        copies += [BlockCopy(tier, size) for tier in self._tiering.stored_in(key)]
        return copies

    def _set_pins(self, message: SetPins, num_missing: int, now: float) -> None:
        """Pin what is in DRAM, and promote more of it as long as `num_missing` shrinks."""
        if self._long_work.refuses(message):
            return
        meant = message.epoch in ("", self._worker.epoch)
        done: list[bool] = []

        def pin(keys: Sequence[BlockKey], _now: float) -> None:
            done.extend(meant and self._dram.set_lasting_pin(key, message.pin) for key in keys)

        def end(now: float) -> None:
            missing = [key for key, is_done in zip(message.keys, done, strict=True) if not is_done]
            if not (meant and self._lifts(message, missing, num_missing, now)):
                pins = PinsSet(
                    asker=message.asker, ticket=message.ticket, store=self._worker, done=done
                )
                self._channel.send(message.asker.address, pins)

        self._long_work.begin(message, message.keys, pin, end, now)

    def _lifts(
        self, message: SetPins, missing: list[BlockKey], num_missing: int, now: float
    ) -> bool:
        """Begin to promote what is missing, to pin it then, and return whether it may come."""
        client = client_key(message.asker)

        def settled(at: float, _more: bool) -> None:
            self._lifting[client] -= 1
            self._lifting += Counter()  # drops those that have none
            self._set_pins(message, len(missing), at)

        may_lift = message.lift and self._lifting[client] < MAX_CLIENT_LIFTS
        if not may_lift or not 0 < len(missing) < num_missing:
            return False
        self._num_promoted += 1
        name = ("pins", self._num_promoted)
        if self._blocks.promotions.begin(name, missing, now, settled) is not None:
            return False
        self._lifting[client] += 1
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when a prefetch waits for nothing."""
        self._prefetcher.check_integrity()
