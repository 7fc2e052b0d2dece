"""What anybody may ask of a pool node besides reading and writing: what is there, how it is doing,
bring this up, take this away. Nothing asked here holds anything.

Pure; owned by the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from mooncake.base import BlockKey, KvLayout, Tier, WorkerLoad, WorkerRef
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.base.pool_messages import (
    AskPool,
    BlockCopy,
    BlocksDescribed,
    BlocksFound,
    BlocksKept,
    BlocksRemoved,
    DescribeBlocks,
    DrainProgress,
    FindBlocks,
    Keep,
    KeepBlocks,
    PoolState,
    RemoveBlocks,
    TenantUse,
)
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.prefetch import Prefetcher
from mooncake.kvstore.promotion import Promotions
from mooncake.kvstore.removal import Removals
from mooncake.kvstore.replicate import Replicator
from mooncake.kvstore.tiering import Tiering
from mooncake.rpc.channel import Channel


class Inquiries:
    """Answers for one node."""

    def __init__(
        self,
        worker: WorkerRef,
        layout: KvLayout,
        channel: Channel,
        parts: tuple[DramTier, Tiering, Promotions, Replicator],
        figures: Callable[[], tuple[WorkerLoad, bool, bool, DrainProgress | None]],
        gone: Callable[[list[BlockKey]], None],
        counters: Counter[str],
    ) -> None:
        """`figures` returns (load, draining, drained, how far that is); `gone` is told of blocks
        taken out of DRAM.
        """
        self._worker = worker
        self._layout = layout
        self._channel = channel
        self._dram, self._tiering, self._promotions, replicator = parts
        self._figures = figures
        tiers = (self._dram, self._tiering)
        self._prefetcher = Prefetcher(tiers, self._promotions, counters)
        self._removals = Removals(tiers, replicator, gone, counters)
        self._num_lifts = 0

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Answer, if it is for us."""
        if isinstance(event, FindBlocks):
            tiers = [self._tier_of(key) for key in event.keys]
            self._channel.send(
                event.asker.address,
                BlocksFound(ticket=event.ticket, store=self._worker, tiers=tiers),
            )
        elif isinstance(event, RemoveBlocks):
            self._remove(event, now)
        elif isinstance(event, DescribeBlocks):
            copies = [self._copies(key) for key in event.keys]
            self._channel.send(
                event.asker.address,
                BlocksDescribed(ticket=event.ticket, store=self._worker, copies=copies),
            )
        elif isinstance(event, KeepBlocks):
            self._keep(event, len(event.keys) + 1, now)
        elif isinstance(event, AskPool):
            self._channel.send(event.asker.address, self.state(event.ticket))
        elif isinstance(event, Prefetch):
            self._prefetcher.begin(event, now)
        elif isinstance(event, StopPrefetch):
            self._prefetcher.stop(event)

    def state(self, ticket: int) -> PoolState:
        """Return the node as it is now."""
        ssd = self._tiering.ssd
        load, draining, drained, drain = self._figures()
        return PoolState(
            ticket=ticket,
            store=self._worker,
            load=load,
            layout_fingerprint=self._layout.fingerprint,
            block_bytes=self._layout.block_bytes,
            num_ssd_blocks=ssd.num_slots,
            num_ssd_stored=ssd.num_stored,
            num_pinned=self._dram.num_pinned,
            num_quarantined=self._dram.num_quarantined,
            num_hard_pinned=self._dram.num_kept(Keep.HARD),
            num_soft_pinned=self._dram.num_kept(Keep.SOFT),
            draining=draining,
            drained=drained,
            drain=drain,
            tenants=tuple(
                TenantUse(tenant, tier, used, quota)
                for tier, part in ((Tier.DRAM, self._dram), (Tier.SSD, ssd))
                for tenant, (used, quota) in sorted(part.tenant_use().items())
            ),
        )

    def _tier_of(self, key: BlockKey) -> Tier | None:
        if self._dram.has(key):
            return Tier.DRAM
        return Tier.SSD if self._tiering.stores(key) else None

    def _copies(self, key: BlockKey) -> list[BlockCopy]:
        size, dram = self._layout.block_bytes, self._dram
        copies = []
        if dram.has(key):
            copies.append(BlockCopy(Tier.DRAM, size, dram.kept(key), dram.num_pins(key)))
        if self._tiering.stores(key):
            copies.append(BlockCopy(Tier.SSD, size))
        return copies

    def _remove(self, event: RemoveBlocks, now: float) -> None:
        def done(removed: list[bool], left: list[bool]) -> None:
            self._channel.send(
                event.asker.address,
                BlocksRemoved(ticket=event.ticket, store=self._worker, removed=removed, left=left),
            )

        self._removals.begin(event.keys, now, done)

    def _keep(self, event: KeepBlocks, num_missing: int, now: float) -> None:
        """Keep what is in DRAM, and bring up more of it as long as `num_missing` shrinks."""
        meant = event.epoch in ("", self._worker.epoch)
        kept = [meant and self._dram.keep(key, event.keep) for key in event.keys]
        missing = [key for key, is_kept in zip(event.keys, kept, strict=True) if not is_kept]

        def settled(at: float, _more: bool) -> None:
            self._keep(event, len(missing), at)

        if meant and event.lift and 0 < len(missing) < num_missing:
            self._num_lifts += 1
            name = ("keep", self._num_lifts)
            if self._promotions.begin(name, missing, now, settled) is None:
                return
        self._channel.send(
            event.asker.address, BlocksKept(ticket=event.ticket, store=self._worker, kept=kept)
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when a run waits to be brought up for ever."""
        self._prefetcher.check_integrity()
        self._removals.check_integrity()
