"""The DRAM tier of one node: an arena of registered memory cut into blocks, and the state of each.

Pure; owned by the node. It decides which block lies where, and whether it is being written, stored,
pinned or resting. It knows no workers, tickets or messages and never touches the bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from mooncake.base import BlockKey, InternalError, Tier
from mooncake.base.pool_messages import LastingPin
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.eviction import NONE, POLICIES, Keys
from mooncake.kvstore.storage.tenants import KeptBlocks, TenantEviction


class UniformAllocator:
    """Cuts an arena into pieces of one size, so that nothing can fragment and every call is O(1).

    Untouched memory is handed out in order, and only when no returned piece is free. So the arena
    becomes resident as it fills, and a chain written at once lies together.
    """

    def __init__(self, num_pieces: int, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._num_pieces = num_pieces
        self._num_touched = 0
        self._returned: list[int] = []
        self._out = bytearray(num_pieces)

    @property
    def num_free(self) -> int:
        """Number of pieces that can still be allocated."""
        return self._num_pieces - self._num_touched + len(self._returned)

    def allocate(self) -> int | None:
        """Return the byte offset of a free piece, or None."""
        if self._returned:
            piece = self._returned.pop()
        elif self._num_touched < self._num_pieces:
            piece = self._num_touched
            self._num_touched += 1
        else:
            return None
        self._out[piece] = 1
        return piece * self._piece_bytes

    def free(self, offset: int) -> None:
        """Take a piece back. Raises InternalError when it was not handed out."""
        piece, rest = divmod(offset, self._piece_bytes)
        if rest or not 0 <= piece < self._num_pieces or not self._out[piece]:
            raise InternalError(f"offset {offset} of the pool's arena was not allocated")
        self._out[piece] = 0
        self._returned.append(piece)


class DramBlock:
    """One block: being written (not `whole`), stored, or `condemned`. A condemned block is still
    used by readers that have pinned it, and no other reader finds it.
    """

    __slots__ = (
        "checksum", "condemned", "expected", "kept", "lasting_pin", "offset", "pins", "source",
        "tenant", "uses", "whole",
    )  # fmt: skip

    def __init__(self, offset: int, tenant: str) -> None:
        self.offset = offset
        self.tenant = tenant
        self.checksum: int | None = None
        self.pins = 0
        self.lasting_pin = LastingPin.NONE
        self.kept = False
        self.whole = False
        self.condemned = False
        self.uses = 0
        """Requests that wrote or asked for it while it was stored here."""
        self.expected = False
        """True if `Tiering` loaded it ahead of its readers, none of which has come yet."""
        self.source: Tier | None = None
        """The tier it was loaded from, if no reader has ended its read of it since."""

    @property
    def loose(self) -> bool:
        """True if this is a complete block that may be evicted."""
        return not (self.pins or self.kept) and self.lasting_pin is not LastingPin.HARD


class DramTier:
    """Keeps blocks by key in one arena. Every block is free, writing, stored, condemned or in
    quarantine.
    """

    def __init__(self, config: KvStoreConfig, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        quotas = {t: quota // block_bytes for t, quota in config.tenant_quota_bytes.items()}
        self._allocator = UniformAllocator(num_blocks, block_bytes)
        self._eviction = TenantEviction(
            POLICIES[config.eviction], quotas, config.client_quota(num_blocks)
        )
        self._blocks: dict[BlockKey, DramBlock] = {}
        self._num_writing = 0
        self._num_condemned = 0
        self._num_pinned = 0
        self._num_lasting: Counter[LastingPin] = Counter()
        self._max_hard = math.floor(num_blocks * config.hard_pin_share)
        self._kept = KeptBlocks(
            math.floor(num_blocks * config.kept_share),
            lambda tenant: min(
                math.floor(num_blocks * config.tenant_kept_share),
                quotas.get(tenant, 2 * num_blocks) // 2,
            ),
        )
        self._resting: set[int] = set()
        """Byte offsets of memory that a lost writer might still write to."""
        # Rounded up: a pool of a few blocks may be used to the last one.
        self._high_blocks = math.ceil(num_blocks * config.high_watermark)
        self._low_blocks = max(0, self._high_blocks - math.ceil(num_blocks * config.evict_fraction))

    # ------------------------------------------------------------------ figures

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_writing(self) -> int:
        return self._num_writing

    @property
    def num_stored(self) -> int:
        """Number of complete blocks, pinned or not."""
        return len(self._blocks) - self._num_writing - self._num_condemned

    @property
    def num_pinned(self) -> int:
        """Number of blocks, stored or condemned, with at least one pin."""
        return self._num_pinned

    @property
    def num_kept(self) -> int:
        """Number of blocks that are kept for a time, because requests asked for it."""
        return len(self._kept)

    @property
    def num_quarantined(self) -> int:
        return len(self._resting)

    def tenant_use(self) -> dict[str, tuple[int, int]]:
        """Return for each tenant with a quota: (blocks it has, most it may have)."""
        return self._eviction.use()

    def stored_keys(self) -> list[BlockKey]:
        """Return the keys of all complete blocks, oldest put first."""
        return [key for key, block in self._blocks.items() if block.whole]

    def hottest_first(self) -> list[BlockKey]:
        """Return the keys of all complete blocks: first those that have a pin, then the others in
        reverse order of eviction.
        """
        loose = list(self._eviction.order())
        going = set(loose)
        held = [key for key in self.stored_keys() if key not in going]
        return held + loose[::-1]

    def has(self, key: BlockKey) -> bool:
        """Return whether a complete block of that key is stored here."""
        block = self._blocks.get(key)
        return block is not None and block.whole

    def is_known(self, key: BlockKey) -> bool:
        """Return whether a block of that key is stored, condemned or being written here."""
        return key in self._blocks

    # ------------------------------------------------------------------ writing

    def reserve(
        self,
        keys: Sequence[BlockKey],
        tenant: str,
        may_evict: Callable[[BlockKey], bool] | None = None,
        head: Sequence[BlockKey] = (),
    ) -> tuple[dict[BlockKey, int], list[BlockKey]]:
        """Make room for those of `keys` that are neither stored nor being written. If `may_evict`
        is given, fill only up to the high watermark, and stop when the next block to evict is one
        that it does not allow.

        Returns (key -> byte offset of what was granted, in the order asked; keys evicted for it).
        Stops at the first block there is no room for. Blocks of the same run are never evicted for
        one another, nor those of its `head`: a tail without its head is worth nothing.
        """
        run = dict.fromkeys(keys)
        here = [key for key in dict.fromkeys((*head, *run)) if self.has(key)]
        for key in here:
            self._eviction.hold(key)
        granted: dict[BlockKey, int] = {}
        evicted: list[BlockKey] = []
        for key in run:
            if key in self._blocks:
                continue
            offset = self._take(key, tenant, evicted, may_evict)
            if offset is None:
                break
            self._eviction.charge(key, tenant)
            self._blocks[key] = DramBlock(offset, tenant)
            self._num_writing += 1
            granted[key] = offset
        self._eviction.release([key for key in here if self._blocks[key].loose])
        return granted, evicted

    def commit(self, keys: Sequence[BlockKey], *, source: Tier | None = None) -> None:
        """Make blocks readable that were being written. The head of the chain comes first.
        `source`: the tier that they were loaded from.
        """
        for key in keys:
            block = self._blocks[key]
            if block.whole:
                raise InternalError(f"block {key.hex()} was committed twice")
            block.whole, block.source = True, source
        self._num_writing -= len(keys)
        self._num_lasting[LastingPin.NONE] += len(keys)
        self._eviction.release(keys)

    def abandon(self, key: BlockKey, *, rests: bool = False) -> int:
        """Give up a block that is being written; return its offset. Its memory is free now. If it
        `rests`, it is free only when it is passed to `reuse`, because a lost worker may still write
        to it.
        """
        block = self._blocks.pop(key)
        if block.whole:
            raise InternalError(f"block {key.hex()} is whole and cannot be abandoned")
        self._num_writing -= 1
        self._eviction.forget(key)
        if rests:
            self._resting.add(block.offset)
        else:
            self._allocator.free(block.offset)
        return block.offset

    def discard(self, key: BlockKey) -> bool:
        """Give up a stored block that no reader has pinned. Return False when there is no such
        block. A hard pin does not protect it here: its bytes are known to be worthless.
        """
        block = self._blocks.get(key)
        if block is None or not block.whole or block.pins:
            return False
        self._eviction.forget(key)
        self._kept.forget(key)
        self._num_lasting[block.lasting_pin] -= 1
        self._allocator.free(self._blocks.pop(key).offset)
        return True

    def condemn(self, key: BlockKey) -> bool:
        """Give up a stored block: no reader finds it any more, and its memory is free once the last
        pin is gone. Return False when it is not stored.
        """
        block = self._blocks.get(key)
        if block is None or not block.whole:
            return False
        if block.pins:
            self._let_go([key])
            self.set_lasting_pin(key, LastingPin.NONE)
            self._num_lasting[LastingPin.NONE] -= 1
            block.whole, block.condemned = False, True
            self._num_condemned += 1
            return True
        return self.discard(key)

    def reuse(self, offsets: Sequence[int]) -> None:
        """Free memory that has rested."""
        for offset in offsets:
            self._resting.remove(offset)
            self._allocator.free(offset)

    # ------------------------------------------------------------------ reading

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of `keys`, from the first on, are stored."""
        for number, key in enumerate(keys):
            if not self.has(key):
                return number
        return len(keys)

    def pin(self, keys: Sequence[BlockKey]) -> None:
        """Protect stored blocks from eviction until `unpin`."""
        for key in keys:
            block = self._blocks[key]
            if not block.pins:
                self._eviction.hold(key)
                self._num_pinned += 1
            block.pins += 1

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Undo one `pin` of the same keys."""
        loose = []
        for key in keys:
            block = self._blocks[key]
            block.pins -= 1
            if not block.pins:
                self._num_pinned -= 1
                if block.condemned:
                    self._eviction.forget(key)
                    self._num_condemned -= 1
                    self._allocator.free(self._blocks.pop(key).offset)
                elif block.loose:
                    loose.append(key)
        self._eviction.release(loose)

    def num_from(self, tier: Tier, keys: Sequence[BlockKey]) -> int:
        """Return how many stored blocks were loaded from a tier and have not been read since."""
        return sum(self._blocks[key].source is tier for key in keys)

    def end_read(self, keys: Sequence[BlockKey]) -> None:
        """Note that a reader has read these blocks, which it has pinned."""
        for key in keys:
            self._blocks[key].source = None

    def set_lasting_pin(self, key: BlockKey, pin: LastingPin) -> bool:
        """Set or clear the lasting pin of a stored block. Return False when it is not stored, or
        when no more hard pins are allowed.
        """
        block = self._blocks.get(key)
        if block is None or not block.whole:
            return False
        is_new = pin is LastingPin.HARD is not block.lasting_pin
        if is_new and self._num_lasting[LastingPin.HARD] >= self._max_hard:
            return False
        self._num_lasting[block.lasting_pin] -= 1
        self._num_lasting[pin] += 1
        was_loose, block.lasting_pin = block.loose, pin
        self._eviction.set_last(key, pin is not LastingPin.NONE)
        if was_loose and not block.loose:
            self._eviction.hold(key)
        elif block.loose and not was_loose:
            self._eviction.release([key])
        return True

    def keep(self, run: Sequence[BlockKey], until_s: float) -> tuple[int, int]:
        """Keep stored blocks of a run from eviction until then, within the limits of their tenant
        and of all tenants; blocks that are not stored are skipped.

        Returns (how many were not kept before, how many others are kept no longer).
        """
        here = [key for key in run if self.has(key)]
        tenant = self._blocks[here[0]].tenant if here else ""
        own = [key for key in here if self._blocks[key].tenant == tenant]
        new, displaced = self._kept.keep(own, tenant, until_s)
        for key in new:
            block = self._blocks[key]
            if block.loose:
                self._eviction.hold(key)
            block.kept = True
        self._free_to_go(displaced)
        return len(new), len(displaced)

    def end_keeps(self, now: float) -> int:
        """Let the blocks be evicted again whose time is over; return how many these are."""
        over = self._kept.expire(now)
        self._free_to_go(over)
        return len(over)

    @property
    def keeps_end_s(self) -> float | None:
        """When to call `end_keeps` again, or None if nothing is kept."""
        return self._kept.next_s

    def is_kept(self, key: BlockKey) -> bool:
        """Return whether a block is kept for a time."""
        return key in self._kept

    def _let_go(self, keys: Sequence[BlockKey]) -> None:
        self._free_to_go([key for key in keys if self._kept.forget(key)])

    def _free_to_go(self, keys: Sequence[BlockKey]) -> None:
        """Let blocks be evicted again that `_kept` has forgotten, of each chain the tail first."""
        for key in keys:
            self._blocks[key].kept = False
        self._eviction.release([key for key in reversed(keys) if self._blocks[key].loose])

    def is_hard_pinned(self, key: BlockKey) -> bool:
        """Return whether a block has a hard pin."""
        block = self._blocks.get(key)
        return block is not None and block.lasting_pin is LastingPin.HARD

    def num_lasting(self, pin: LastingPin) -> int:
        """Return how many stored blocks have that lasting pin."""
        return self._num_lasting[pin]

    def offsets(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return where blocks lie that are stored or being written."""
        return [self._blocks[key].offset for key in keys]

    def block(self, key: BlockKey) -> DramBlock:
        """Return the record of a block that is known here. Others must not change it."""
        return self._blocks[key]

    def find(self, key: BlockKey) -> DramBlock | None:
        """Return the record of a block; None when it is not known here."""
        return self._blocks.get(key)

    def learn_checksum(self, key: BlockKey, checksum: int) -> None:
        """Remember the checksum of a block, if it is known here."""
        block = self._blocks.get(key)
        if block is not None:
            block.checksum = checksum

    def use(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        """Tell the eviction policy that a request used this run. Keys that are not stored are
        skipped. Blocks that were `counted` before only change their order.
        """
        self._eviction.access(keys, counted)

    def count_uses(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> dict[BlockKey, int]:
        """Count a request that used this run. Return how often each of its blocks has been used;
        blocks not stored here, and those `counted` before, are left out.
        """
        uses: dict[BlockKey, int] = {}
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block.expected = False
                if block.whole and key not in counted and key not in uses:
                    block.uses += 1
                    uses[key] = block.uses
        return uses

    def count_at_least(self, keys: Sequence[BlockKey], least: int) -> dict[BlockKey, int]:
        """Raise the use counts of blocks that are known here to at least this number; return the
        counts.
        """
        for key in keys:
            self._blocks[key].uses = max(self._blocks[key].uses, least)
        return {key: self._blocks[key].uses for key in keys}

    def expect(self, keys: Sequence[BlockKey]) -> None:
        """Note that readers of these blocks, which are known here, are still to come."""
        for key in keys:
            self._blocks[key].expected = True

    # ------------------------------------------------------------------ eviction

    def evict_to_watermark(self) -> list[BlockKey]:
        """Evict down to a little below the high watermark when more than that is in use."""
        evicted: list[BlockKey] = []
        if self.num_blocks - self.num_free > self._high_blocks:
            while self.num_blocks - self.num_free > self._low_blocks:
                if not self._evict(None, evicted):
                    break
        return evicted

    def _take(
        self,
        key: BlockKey,
        tenant: str,
        evicted: list[BlockKey],
        may_evict: Callable[[BlockKey], bool] | None,
    ) -> int | None:
        """Return the offset of a block for `tenant`, evicting if necessary; None = no room."""
        if self._eviction.is_full(key, tenant) and not self._evict(tenant, evicted, may_evict):
            return None
        limit = self.num_blocks if may_evict is None else self._high_blocks
        is_full = self.num_blocks - self.num_free >= limit
        if is_full and not self._evict(None, evicted, may_evict):
            return None
        return self._allocator.allocate()

    def _evict(
        self,
        tenant: str | None,
        evicted: list[BlockKey],
        may_evict: Callable[[BlockKey], bool] | None = None,
    ) -> bool:
        if may_evict is not None:
            first = next(self._eviction.order(tenant), None)
            if first is None or not may_evict(first):
                return False
        key = self._eviction.pop(tenant)
        if key is None:
            return False
        block = self._blocks.pop(key)
        self._num_lasting[block.lasting_pin] -= 1
        self._allocator.free(block.offset)
        evicted.append(key)
        return True

    # ------------------------------------------------------------------ checks

    def pin_counts(self) -> Mapping[BlockKey, int]:
        """Return the pins of each pinned block (for checks)."""
        return {key: block.pins for key, block in self._blocks.items() if block.pins}

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + writing + stored + condemned + quarantined = total,
        and none of them overlap.
        """
        held = [block.offset for block in self._blocks.values()]
        held += self._resting
        assert len(set(held)) == len(held), "two blocks share memory"
        assert self.num_free + len(held) == self.num_blocks, "memory was lost or freed twice"
        condemned = [block for block in self._blocks.values() if block.condemned]
        assert len(condemned) == self._num_condemned
        assert all(block.pins and not block.whole for block in condemned), (
            "a condemned block has no pin"
        )
        writing = [b for b in self._blocks.values() if not (b.whole or b.condemned)]
        assert len(writing) == self._num_writing
        assert not any(block.pins for block in writing), "a half-written block is pinned"
        assert all(block.pins >= 0 for block in self._blocks.values())
        assert len(self.pin_counts()) == self._num_pinned
        stored = [block for block in self._blocks.values() if block.whole]
        assert len(self._eviction) == sum(block.loose for block in stored)
        for pin in (LastingPin.SOFT, LastingPin.HARD):
            assert self._num_lasting[pin] == sum(block.lasting_pin is pin for block in stored)
        assert self._num_lasting[LastingPin.HARD] <= self._max_hard
        assert all(block.lasting_pin is LastingPin.NONE for block in writing)
        kept = {key for key, block in self._blocks.items() if block.kept}
        assert all(self._blocks[key].whole and key in self._kept for key in kept)
        assert len(kept) == len(self._kept)
        self._kept.check_integrity()
        self._eviction.check_integrity()
