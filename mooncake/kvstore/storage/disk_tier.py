"""A tier of one node on disks, or in a bucket: which block lies in which slot of which disk, and
which is evicted first. A bucket is one disk, whose slots only count the blocks that the node uses.

Pure bookkeeping; owned by the node's `Tiering`. It does no I/O and knows no arena.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from mooncake.base import BlockKey, InternalError
from mooncake.kvstore.eviction import NONE, EvictionPolicy, Keys
from mooncake.kvstore.storage.disk import FoundBlock
from mooncake.kvstore.storage.tenants import TenantEviction


class DiskPlace:
    """A block that is on a disk, or on its way there."""

    __slots__ = ("checksum", "disk", "is_fresh", "is_stored", "readers", "slot", "tenant")

    def __init__(self, disk: int, slot: int, tenant: str, checksum: int | None) -> None:
        self.disk = disk
        self.slot = slot
        self.tenant = tenant
        self.checksum = checksum
        self.readers = 0
        self.is_stored = False
        self.is_fresh = False
        """True if its slot was free before, so that its file may have had to grow."""


class _Disk:
    """Slots of one disk. The lowest free slot is used first, so that a run lies together and files
    grow only when they must.
    """

    def __init__(self, num_slots: int, policy: TenantEviction) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.free: list[int] = []
        self.beyond: list[int] = []
        """Free slots for which the file system has no room, as far as is known."""
        self.beyond_until_s = float("-inf")
        self.is_open = False
        self.num_retired = 0
        self.paused_until_s = float("-inf")
        self.num_erasing = 0

    def may_take(self, now: float) -> bool:
        """Return whether the disk takes blocks. Slots that had no room long ago are tried again."""
        if self.beyond and now >= self.beyond_until_s:
            self.free, self.beyond = self.free + self.beyond, []
            heapq.heapify(self.free)
        return self.is_open and now >= self.paused_until_s and self.num_available > 0

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.policy)

    @property
    def share_free(self) -> float:
        return len(self.free) / self.num_slots


class DiskTier:
    """Keeps blocks by key in the slots of disks. Every slot is free, writing, stored, being erased
    or retired.
    """

    def __init__(
        self,
        num_slots: Sequence[int],
        make_policy: Callable[[], EvictionPolicy],
        quotas: Mapping[str, int] = MappingProxyType({}),
        client_quota: Callable[[int], int] | None = None,
    ) -> None:
        """`quotas`: tenant -> most blocks it may have on all disks together. Each disk gets a share
        by its size. `client_quota`: the most blocks, out of so many slots, that pool clients of any
        other tenant may have.
        """
        self._disks = [
            _Disk(number, TenantEviction(make_policy, share, client_quota and client_quota(number)))
            for number, share in zip(num_slots, _shares(num_slots, quotas), strict=True)
        ]
        self._blocks: dict[BlockKey, DiskPlace] = {}
        self._num_stored = 0

    @property
    def num_stored(self) -> int:
        return self._num_stored

    @property
    def num_slots(self) -> int:
        return sum(disk.num_slots for disk in self._disks)

    def tenant_use(self) -> dict[str, tuple[int, int]]:
        """Return for each tenant with a quota: (blocks it has on all disks, most it may have)."""
        total: dict[str, tuple[int, int]] = {}
        for disk in self._disks:
            for tenant, (used, quota) in disk.policy.use().items():
                before = total.get(tenant, (0, 0))
                total[tenant] = (before[0] + used, before[1] + quota)
        return total

    def stored_keys(self) -> list[BlockKey]:
        """Return the keys of all blocks that can be read."""
        return [key for key, block in self._blocks.items() if block.is_stored]

    def has(self, key: BlockKey) -> bool:
        """Return whether the block can be read."""
        block = self._blocks.get(key)
        return block is not None and block.is_stored

    def is_known(self, key: BlockKey) -> bool:
        """Return whether the block is on a disk or on its way there."""
        return key in self._blocks

    def block(self, key: BlockKey) -> DiskPlace:
        """Return where a known block lies."""
        return self._blocks[key]

    # ------------------------------------------------------------------ disks

    @property
    def num_closed(self) -> int:
        """Number of disks that have not been scanned."""
        return sum(not disk.is_open for disk in self._disks)

    def open_disk(
        self, number: int, found: Iterable[FoundBlock]
    ) -> tuple[list[BlockKey], list[tuple[BlockKey, int]]]:
        """Use a disk that has been scanned. Returns (keys it holds, (key, slot) of what must be
        erased). A block that another disk has too is forgotten here, and so are blocks over their
        tenant's quota.
        """
        disk = self._disks[number]
        if disk.is_open:
            raise InternalError(f"disk {number} was opened twice")
        disk.is_open = True
        kept: dict[BlockKey, None] = {}
        taken: set[int] = set()
        stale: list[tuple[BlockKey, int]] = []
        for one in found:
            if one.slot in taken or one.slot >= disk.num_slots:
                continue
            taken.add(one.slot)
            if one.key in self._blocks:
                stale.append((one.key, one.slot))
                continue
            if disk.policy.is_full(one.key, one.tenant):
                loser = disk.policy.pop(one.tenant)
                if loser is None:
                    stale.append((one.key, one.slot))
                    continue
                stale.append((loser, self._blocks.pop(loser).slot))
                del kept[loser]
            self._add(number, one, one.slot)
            kept[one.key] = None
        disk.free = [slot for slot in range(disk.num_slots) if slot not in taken]
        disk.num_erasing += len(stale)
        self._num_stored += len(kept)
        return list(kept), stale

    def adopt(self, number: int, found: Iterable[FoundBlock]) -> list[BlockKey]:
        """Use blocks that were found in a bucket, as far as it has free slots and tenants may have
        them. Returns those that were not known here.
        """
        disk = self._disks[number]
        if not disk.is_open:
            disk.is_open, disk.free = True, list(range(disk.num_slots))
        kept: list[BlockKey] = []
        for one in found:
            if not disk.free:
                break
            if one.key in self._blocks or disk.policy.is_full(one.key, one.tenant):
                continue
            self._add(number, one, heapq.heappop(disk.free))
            kept.append(one.key)
        self._num_stored += len(kept)
        return kept

    def _add(self, number: int, one: FoundBlock, slot: int) -> None:
        policy = self._disks[number].policy
        policy.charge(one.key, one.tenant)
        policy.release([one.key])
        block = DiskPlace(number, slot, one.tenant, one.checksum)
        block.is_stored = True
        self._blocks[one.key] = block

    def pause(self, disk: int, until_s: float) -> None:
        """Write nothing to a disk that failed, or is full, until this time."""
        self._disks[disk].paused_until_s = until_s

    # ------------------------------------------------------------------ writing

    def reserve(
        self, blocks: Sequence[tuple[BlockKey, str, int | None]], now: float
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Find slots, all on one disk, for blocks (key, tenant, checksum) that are not known here.

        Returns (keys that have a slot now; keys evicted for them). Disks are filled evenly. A
        tenant at its quota overwrites only its own blocks.
        """
        reserved: list[BlockKey] = []
        evicted: list[BlockKey] = []
        number = self._choose([tenant for _, tenant, _ in blocks], now)
        if number is None:
            return reserved, evicted
        disk = self._disks[number]
        for key, tenant, checksum in blocks:
            full = disk.policy.is_full(key, tenant)
            is_fresh = not full and bool(disk.free)
            if is_fresh:
                slot = heapq.heappop(disk.free)
            else:
                loser = disk.policy.pop(tenant if full else None)
                if loser is None:
                    continue
                slot = self._blocks.pop(loser).slot  # it was overwritten: no trace of it is left
                self._num_stored -= 1
                evicted.append(loser)
            disk.policy.charge(key, tenant)
            block = DiskPlace(number, slot, tenant, checksum)
            block.is_fresh = is_fresh
            self._blocks[key] = block
            reserved.append(key)
        return reserved, evicted

    def may_take(self, now: float) -> bool:
        """Return whether some disk takes blocks of some tenant."""
        return any(disk.may_take(now) for disk in self._disks)

    def _choose(self, tenants: Sequence[str], now: float) -> int | None:
        """Return the disk with most room that takes a block of the first of these tenants for which
        there is such a disk.
        """
        numbers = [n for n, disk in enumerate(self._disks) if disk.may_take(now)]
        numbers.sort(key=lambda n: (-self._disks[n].share_free, -self._disks[n].num_available))
        for tenant in dict.fromkeys(tenants):
            for number in numbers:
                if self._disks[number].policy.admits(tenant):
                    return number
        return None

    def commit(self, key: BlockKey, checksum: int) -> None:
        """Make a block readable that was being written."""
        block = self._blocks[key]
        block.is_stored, block.checksum = True, checksum
        self._num_stored += 1
        self._disks[block.disk].policy.release([key])

    def abandon(self, key: BlockKey) -> None:
        """Give up a block whose write failed."""
        block = self._blocks.pop(key)
        if block.is_stored:
            raise InternalError(f"block {key.hex()} is on a disk and cannot be abandoned")
        self._disks[block.disk].policy.forget(key)
        heapq.heappush(self._disks[block.disk].free, block.slot)

    def no_room(self, key: BlockKey, until_s: float) -> None:
        """Give up a block whose write failed because the file system is full. Until `until_s` its
        slot and later ones are not used, if they would make a file grow.
        """
        block = self._blocks[key]
        self.abandon(key)
        if not block.is_fresh:
            self.pause(block.disk, until_s)
            return
        disk = self._disks[block.disk]
        disk.beyond += [slot for slot in disk.free if slot >= block.slot]
        disk.free = [slot for slot in disk.free if slot < block.slot]
        heapq.heapify(disk.free)
        disk.beyond_until_s = until_s

    # ------------------------------------------------------------------ reading

    def hold(self, key: BlockKey) -> None:
        """Protect the slot of a stored block, which is being read, until `release`."""
        block = self._blocks[key]
        block.readers += 1
        self._disks[block.disk].policy.hold(key)

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Undo one `hold` of each block; this counts as a use of the run, head first."""
        for key in reversed(keys):
            block = self._blocks[key]
            block.readers -= 1
            if not block.readers:
                self._disks[block.disk].policy.release([key])

    def touch(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        """Tell the eviction policies that a request used this run. Keys that are not stored are
        skipped. Blocks that were `counted` before only change their order.
        """
        for disk in self._disks:
            disk.policy.access(keys, counted)

    # ------------------------------------------------------------------ giving up

    def condemn(self, key: BlockKey) -> tuple[int, int]:
        """Forget a stored block that is not being read. Its slot is not used before `erased`.
        Returns (disk, slot).
        """
        block = self._blocks.pop(key)
        if not block.is_stored or block.readers:
            raise InternalError(f"block {key.hex()} is in use and cannot be condemned")
        self._disks[block.disk].policy.forget(key)
        self._disks[block.disk].num_erasing += 1
        self._num_stored -= 1
        return block.disk, block.slot

    def erased(self, disk: int, slot: int, *, well: bool) -> None:
        """Free a condemned slot that is empty now. A slot that cannot be written is never used
        again.
        """
        owner = self._disks[disk]
        owner.num_erasing -= 1
        if well:
            heapq.heappush(owner.free, slot)
        else:
            owner.num_retired += 1

    # ------------------------------------------------------------------ checks

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot of an open disk is accounted for once."""
        stored = 0
        for number, disk in enumerate(self._disks):
            mine = [block for block in self._blocks.values() if block.disk == number]
            slots = [block.slot for block in mine] + disk.free + disk.beyond
            assert len(set(slots)) == len(slots), "two blocks share a slot"
            if disk.is_open:
                total = len(slots) + disk.num_erasing + disk.num_retired
                assert total == disk.num_slots, "a slot was lost or freed twice"
            loose = [b for b in mine if b.is_stored and not b.readers]
            assert len(disk.policy) == len(loose)
            disk.policy.check_integrity()
            assert all(b.readers >= 0 for b in mine)
            stored += sum(block.is_stored for block in mine)
        assert stored == self._num_stored


def _shares(num_slots: Sequence[int], quotas: Mapping[str, int]) -> list[dict[str, int]]:
    """Return each disk's part of every quota. Rounding loses nothing."""
    total, before, shares = max(1, sum(num_slots)), 0, []
    for number in num_slots:
        ends = (before + number, before)
        shares.append(
            {tenant: quota * ends[0] // total - quota * ends[1] // total
             for tenant, quota in quotas.items()}
        )  # fmt: skip
        before += number
    return shares
