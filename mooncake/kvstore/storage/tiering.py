"""The tiers of one node together: DRAM, its SSD, and a bucket that it may share with other nodes.

Pure; owned by the node. Each tier below DRAM is a `LowerTier`, the fastest first: a block is loaded
from the first that has it, and each is written to by its own rules. `promotion` knows which readers
wait for a block that is being loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mooncake.base import BlockKey, Tier
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.eviction import NONE, POLICIES, Keys
from mooncake.kvstore.storage.block_record import MAX_TENANT_BYTES
from mooncake.kvstore.storage.disk import DiskDone, Disks, DiskScanned
from mooncake.kvstore.storage.disk_tier import DiskTier
from mooncake.kvstore.storage.dram import DramTier
from mooncake.kvstore.storage.lower_tier import Loaded, LowerTier, Report, TierRules
from mooncake.kvstore.storage.tombstones import Tombstones

REUSED = 2
"""Number of uses, including the writer's, from which on a block counts as used again."""


class Tiering:
    """Moves blocks of one node between its tiers; see `LowerTier`."""

    def __init__(
        self,
        config: KvStoreConfig,
        dram: DramTier,
        disks: Disks,
        report: Report,
        loaded: Loaded,
        counters: Counter[str],
    ) -> None:
        """If `config` names a bucket, it is the last of the disks."""
        self._config = config
        self.dram = dram
        self.tombstones = Tombstones()
        quotas = {t: size // dram.block_bytes for t, size in config.tenant_ssd_quota_bytes.items()}
        unwanted = frozenset(tenant for tenant, quota in quotas.items() if not quota)
        policy, num_slots = POLICIES[config.ssd_eviction], list(disks.num_slots)
        bucket_slots = [num_slots.pop()] if config.object_store is not None else []

        def lower(rules: TierRules, places: DiskTier) -> LowerTier:
            return LowerTier(
                rules, places, config, dram, disks, self.tombstones, report, loaded, counters
            )

        self.ssd = DiskTier(num_slots, policy, quotas, config.client_quota)
        rules = TierRules(
            Tier.SSD, 0, config.ssd_min_uses, config.ssd_write_at, MAX_TENANT_BYTES, unwanted
        )
        self.lower = [lower(rules, self.ssd)] if num_slots else []
        """The tiers below DRAM that this node has, the fastest first."""
        if config.object_store is not None:
            rules = TierRules(
                Tier.OBJECT, len(num_slots), config.object_min_uses, 0.0,
                MAX_TENANT_BYTES // 2, unwanted, config.object_list_s,
            )  # fmt: skip
            places = DiskTier(bucket_slots, policy, client_quota=config.client_quota)
            self.lower.append(lower(rules, places))
        self.max_loading = max((tier.max_loading for tier in self.lower), default=0)
        """Number of blocks that may be loading from each tier at a time."""

    # ------------------------------------------------------------------ uses

    def used(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        """Count a request that wrote or asked for this run, for its blocks in DRAM, unless its use
        of them was `counted` before.
        """
        uses = self.dram.count_uses(keys, counted)
        for tier in self.lower:
            tier.used(uses, keys)
            tier.places.touch(keys, counted)

    def adopt(self, keys: Sequence[BlockKey]) -> None:
        """Count blocks in DRAM as used often enough to be written: they were, on another node, or
        a request has said that they will be.
        """
        uses = self.dram.count_at_least(keys, max(self._config.ssd_min_uses, REUSED))
        for tier in self.lower:
            tier.used(uses, keys)

    def is_reused(self, key: BlockKey) -> bool:
        """Return whether a block is known to have been asked for again after it was written."""
        block = self.dram.find(key)
        written_for_it = any(
            tier.rules.min_uses >= REUSED and tier.places.has(key) for tier in self.lower
        )
        return written_for_it or (block is not None and block.uses >= REUSED)

    def is_one_off(self, key: BlockKey) -> bool:
        """Return whether a block was never asked for again and no reader of it is expected. It may
        be evicted for a block that was asked for again.
        """
        block = self.dram.find(key)
        return not self.is_reused(key) and not (block is not None and block.expected)

    # ------------------------------------------------------------------ down

    def evicted(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks that DRAM has given up. A write that has begun goes on until `remove`."""
        keys = list(keys)
        for tier in self.lower:
            tier.evicted(keys)

    def drain(self) -> None:
        """Write all blocks that are due, however much room DRAM has, because the node will end
        soon.
        """
        for tier in self.lower:
            tier.drain()

    @property
    def drained(self) -> bool:
        """True if nothing is under way, and every block that was due has been written, or cannot
        be.
        """
        return all(tier.drained for tier in self.lower)

    def start_writes(self, now: float) -> None:
        """Begin to write what is due, as far as the disks keep up."""
        for tier in self.lower:
            tier.start_writes(now)

    # ------------------------------------------------------------------ up

    def is_loading(self, key: BlockKey) -> bool:
        """Return whether a block is being loaded."""
        return any(tier.is_loading(key) for tier in self.lower)

    def loadable(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return the leading ones of these blocks that `can_load` and may begin to do so now. No
        block behind them is looked at, but the next.
        """
        room = {tier.rules.tier: tier.num_loadable for tier in self.lower}
        leading: list[BlockKey] = []
        for key in keys:
            if not any(room.values()) or not self.can_load(key):
                break
            tier = self._source(key).rules.tier
            if not room[tier]:
                break
            room[tier] -= 1
            leading.append(key)
        return leading

    def can_load(self, key: BlockKey) -> bool:
        """Return whether a block can be loaded: a tier holds it, and DRAM does not know it."""
        return not self.dram.is_known(key) and any(tier.can_load(key) for tier in self.lower)

    def not_near(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the blocks without those that a disk of this node has and DRAM does not know. A
        block that is only in a bucket is taken into DRAM when a worker has it.
        """
        far = list(keys)
        for tier in self.lower:
            if not tier.is_shared and tier.places.num_stored:
                far = [key for key in far if self.dram.is_known(key) or not tier.can_load(key)]
        return far

    def _source(self, key: BlockKey) -> LowerTier:
        """Return the tier that a block is loaded from, which is the fastest that can."""
        return next(tier for tier in self.lower if tier.can_load(key))

    def load(
        self, keys: Sequence[BlockKey], now: float, *, gently: bool = False
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Begin to load blocks of one run that `can_load`. The `Loaded` callback is told the
        result.

        `gently` uses only room that is free or held by one-off blocks. Returns (blocks that are
        loading now, from the first on; keys evicted for them).
        """
        keys = self.loadable(keys)
        if not keys:
            return [], []
        tenant = self._source(keys[0]).places.block(keys[0]).tenant
        granted, evicted = self.dram.reserve(keys, tenant, self.is_one_off if gently else None)
        sources = {key: self._source(key) for key in granted}
        for tier in self.lower:
            tier.load([key for key, source in sources.items() if source is tier], now)
        if gently:
            self.dram.expect(list(granted))
        return list(granted), evicted

    # ------------------------------------------------------------------ disks

    def on_scanned(self, event: DiskScanned, now: float) -> list[BlockKey]:
        """Record what lies on a disk. Return the blocks of it that were removed from the pool."""
        tier = next(t for t in reversed(self.lower) if event.disk >= t.rules.first_disk)
        return tier.on_scanned(event, now)

    def on_done(self, event: DiskDone, now: float) -> list[BlockKey]:
        """Finish an operation. Return the blocks that it moved, erased or overwrote: none when it
        is another part's.
        """
        return [key for tier in self.lower for key in tier.on_done(event, now)]

    def stored_in(self, key: BlockKey) -> list[Tier]:
        """Return the tiers below DRAM from which readers can have a block, the fastest first."""
        return [tier.rules.tier for tier in self.lower if tier.stores(key)]

    def remove(self, key: BlockKey) -> bool:
        """Remove a block from all tiers below DRAM for good, as `LowerTier.remove` does."""
        were_here = [tier.remove(key) for tier in self.lower]
        return any(were_here)

    def is_fading(self, key: BlockKey) -> bool:
        """Return whether a tier still has a trace of a block that was given up, and will erase
        it.
        """
        return any(tier.is_fading(key) for tier in self.lower)

    def is_stuck(self, key: BlockKey) -> bool:
        """Return whether a tier failed to erase a block, so that it may be found again."""
        return any(tier.is_stuck(key) for tier in self.lower)

    @property
    def read_seconds(self) -> dict[str, float]:
        """The seconds in which blocks were being read from each tier, for the load report."""
        return {f"{tier.rules.tier.value}_read_seconds": tier.read_s for tier in self.lower}

    # ------------------------------------------------------------------ checks

    @property
    def quiet(self) -> bool:
        """True if no operation is under way."""
        return all(tier.quiet for tier in self.lower)

    def pins(self) -> Counter[BlockKey]:
        """Return the blocks that are pinned in DRAM while they are written (for checks)."""
        return sum((tier.pins() for tier in self.lower), Counter[BlockKey]())

    def loading(self) -> set[BlockKey]:
        """Return the blocks that are being filled in DRAM (for checks)."""
        return set[BlockKey]().union(*(tier.loading() for tier in self.lower))

    def check_integrity(self) -> None:
        """Raise AssertionError when a block's state contradicts tiers and operations."""
        for tier in self.lower:
            tier.check_integrity()
