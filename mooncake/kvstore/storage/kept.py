"""Which blocks of a tier requests want kept, for which tenant, and until when.

Pure; owned by the tier. A block is kept until its time is over, or until newer ones displace it
within two limits: that of its tenant and that of all tenants together. So a tenant that keeps much
takes no room from others beyond its limit. It knows no memory and evicts nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from mooncake.base import BlockKey

SLOT_S = 5.0
"""Times are rounded up to a multiple of this, so that blocks of about the same time end together.
"""


class KeptBlocks:
    """The kept blocks of all tenants, in the order in which they were last asked for."""

    def __init__(self, max_blocks: int, max_of_tenant: Callable[[str], int]) -> None:
        """`max_blocks`: of all tenants together. `max_of_tenant`: tenant -> most blocks of it."""
        self._max_blocks = max_blocks
        self._max_of_tenant = max_of_tenant
        self._own: dict[str, OrderedDict[BlockKey, int]] = {}
        """Tenant -> key -> number of the slot of time in which it ends. The block that is displaced
        first comes first.
        """
        self._tenants: dict[BlockKey, str] = {}
        self._slots: dict[int, dict[BlockKey, None]] = {}
        """The blocks that end in each slot; none, if all of them have ended before."""
        self._order: list[int] = []
        """The numbers of these slots, as a heap."""

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._tenants

    def keep(
        self, run: Sequence[BlockKey], tenant: str, until_s: float
    ) -> tuple[list[BlockKey], list[BlockKey]]:
        """Keep the blocks of a run, which belong to `tenant`, at least until then. Of more than the
        tenant may have, keep the first: a tail without its head is worth nothing.

        Returns (the blocks that were not kept before, those that are displaced).
        """
        limit = min(self._max_of_tenant(tenant), self._max_blocks)
        if limit <= 0 or not run:
            return [], []
        slot = math.ceil(until_s / SLOT_S)
        own = self._own.setdefault(tenant, OrderedDict())
        new: list[BlockKey] = []
        for key in reversed(run[:limit]):
            before = own.get(key)
            if before is None:
                new.append(key)
                self._tenants[key] = tenant
            if before is None or before < slot:
                if before is not None:
                    del self._slots[before][key]
                self._enter_slot(key, slot)
                own[key] = slot
            own.move_to_end(key)
        displaced = [self._displace(tenant) for _ in range(len(own) - limit)]
        return new, displaced + self._displace_of_largest(len(self) - self._max_blocks)

    def _enter_slot(self, key: BlockKey, slot: int) -> None:
        if slot not in self._slots:
            self._slots[slot] = {}
            heapq.heappush(self._order, slot)
        self._slots[slot][key] = None

    def _displace_of_largest(self, count: int) -> list[BlockKey]:
        """Displace so many blocks, each of the tenant that keeps most; of several, of the one that
        has kept for longest.
        """
        if count <= 0:
            return []
        displaced = []
        sizes = [(-len(own), at, tenant) for at, (tenant, own) in enumerate(self._own.items())]
        heapq.heapify(sizes)
        for _ in range(count):
            size, at, tenant = sizes[0]
            displaced.append(self._displace(tenant))
            heapq.heapreplace(sizes, (size + 1, at, tenant))
        return displaced

    def _displace(self, tenant: str) -> BlockKey:
        key = next(iter(self._own[tenant]))
        self.forget(key)
        return key

    def forget(self, key: BlockKey) -> bool:
        """Keep a block no longer. Return False when it was not kept."""
        tenant = self._tenants.pop(key, None)
        if tenant is None:
            return False
        own = self._own[tenant]
        del self._slots[own.pop(key)][key]
        if not own:
            del self._own[tenant]
        return True

    def expire(self, now: float) -> list[BlockKey]:
        """Forget and return the blocks whose time is over."""
        over: list[BlockKey] = []
        while self._order and self._order[0] * SLOT_S <= now:
            ended = list(self._slots[self._order[0]])
            for key in ended:
                self.forget(key)
            del self._slots[heapq.heappop(self._order)]
            over += ended
        return over

    @property
    def next_s(self) -> float | None:
        """When to call `expire` again; None: nothing is kept."""
        return self._order[0] * SLOT_S if self._order else None

    def check_integrity(self) -> None:
        """Raise AssertionError when a limit is not kept, or the tables differ."""
        assert len(self._tenants) <= self._max_blocks, "too many blocks are kept"
        for tenant, own in self._own.items():
            assert 0 < len(own) <= self._max_of_tenant(tenant), f"{tenant!r} keeps too many blocks"
        pairs = {(key, tenant) for tenant, own in self._own.items() for key in own}
        assert pairs == set(self._tenants.items())
        ends = {(key, slot) for own in self._own.values() for key, slot in own.items()}
        assert ends == {(key, slot) for slot, some in self._slots.items() for key in some}
        assert sorted(self._order) == sorted(self._slots)
