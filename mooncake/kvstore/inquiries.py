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
    BlocksFound,
    BlocksKept,
    BlocksRemoved,
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
from mooncake.kvstore.tiering import Tiering
from mooncake.rpc.channel import Channel


class Inquiries:
    """Answers for one node."""

    def __init__(
        self,
        worker: WorkerRef,
        layout: KvLayout,
        channel: Channel,
        tiers: tuple[DramTier, Tiering, Promotions],
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
        self._dram, self._tiering, promotions = tiers
        self._figures = figures
        self._gone = gone
        self._counters = counters
        self._prefetcher = Prefetcher((self._dram, self._tiering), promotions, counters)

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Answer, if it is for us."""
        if isinstance(event, FindBlocks):
            tiers = [self._tier_of(key) for key in event.keys]
            self._channel.send(
                event.asker.address,
                BlocksFound(ticket=event.ticket, store=self._worker, tiers=tiers),
            )
        elif isinstance(event, RemoveBlocks):
            removed = [self._remove(key) for key in event.keys]
            self._channel.send(
                event.asker.address,
                BlocksRemoved(ticket=event.ticket, store=self._worker, removed=removed),
            )
        elif isinstance(event, KeepBlocks):
            meant = event.epoch in ("", self._worker.epoch)
            kept = [meant and self._dram.keep(key, event.keep) for key in event.keys]
            self._channel.send(
                event.asker.address, BlocksKept(ticket=event.ticket, store=self._worker, kept=kept)
            )
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
        return Tier.SSD if self._tiering.ssd.has(key) else None

    def _remove(self, key: BlockKey) -> bool:
        """Take a block out of all tiers; False when it is not here, somebody uses it, or a
        hard pin is on it.
        """
        if not self._dram.has(key):
            found = not self._dram.is_known(key) and self._tiering.drop(key)
        else:
            on_ssd = self._tiering.ssd.is_known(key)
            free = not self._dram.is_kept(key) and (not on_ssd or self._tiering.can_drop(key))
            found = free and self._dram.discard(key)
            if found:
                self._gone([key])
                if on_ssd:
                    self._tiering.drop(key)
        self._counters["blocks_removed"] += found
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError when a run waits to be brought up for ever."""
        self._prefetcher.check_integrity()
