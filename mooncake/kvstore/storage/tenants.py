"""Decides whose blocks are evicted when room is short: tenants' quotas on top of a tier's eviction
policy; and knows which blocks requests want kept, for which tenant, and until when.

Pure; owned by one tier. It counts blocks, knows no memory, and evicts nothing itself.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from mooncake.base import BlockKey
from mooncake.base.rights import is_clients
from mooncake.kvstore.eviction import NONE, EvictionPolicy, Keys, LastPolicy


class TenantEviction:
    """Keeps one order over all blocks, and one more for each tenant with a quota over its own
    blocks.

    A tenant at its quota makes room only among its own blocks, so it cannot push out others. Block
    keys are salted by tenant, so no two tenants share a block. If a tenant has no quota of its own,
    the blocks that its pool clients store have one.
    """

    def __init__(
        self,
        make_policy: Callable[[], EvictionPolicy],
        quotas: Mapping[str, int],
        client_quota: int | None = None,
    ) -> None:
        """`quotas`: tenant -> most blocks it may have reserved or stored at a time. `client_quota`:
        the most blocks that the pool clients of any other tenant may store.
        """
        self._named = dict(quotas)
        self._client_quota = client_quota
        self._quotas = dict(quotas)
        """Quotas of the tenants named, and of those whose clients have blocks."""
        self._make_policy = make_policy
        self._all = LastPolicy(make_policy)
        self._own = {tenant: LastPolicy(make_policy) for tenant in quotas}
        self._used = dict.fromkeys(quotas, 0)
        self._tenants: dict[BlockKey, str] = {}

    def __len__(self) -> int:
        """Return how many blocks may be evicted."""
        return len(self._all)

    def use(self) -> dict[str, tuple[int, int]]:
        """Return for each tenant with a quota: (blocks it has reserved or stored, most it may)."""
        return {tenant: (used, self._quotas[tenant]) for tenant, used in self._used.items()}

    def is_full(self, key: BlockKey, tenant: str) -> bool:
        """Return whether `tenant` has as many blocks of this block's kind as it may have."""
        quota = self._quota(key, tenant)
        return quota is not None and self._used.get(tenant, 0) >= quota

    def _quota(self, key: BlockKey, tenant: str) -> int | None:
        """Return the limit that applies to a block, or None if there is none."""
        return self._named.get(tenant, self._client_quota if is_clients(key, tenant) else None)

    def admits(self, tenant: str) -> bool:
        """Return whether `tenant` may have blocks at all."""
        return self._named.get(tenant, 1) > 0

    def charge(self, key: BlockKey, tenant: str) -> None:
        """Count a block that `tenant` is about to write."""
        quota = self._quota(key, tenant)
        if quota is not None:
            if tenant not in self._quotas:
                self._quotas[tenant], self._used[tenant] = quota, 0
                self._own[tenant] = LastPolicy(self._make_policy)
            self._tenants[key] = tenant
            self._used[tenant] += 1

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Allow these blocks to be evicted; the head of the chain comes first."""
        self._all.release(keys)
        for tenant, own_keys in self._by_tenant(keys).items():
            self._own[tenant].release(own_keys)

    def hold(self, key: BlockKey) -> None:
        """Protect this block from eviction until it is released."""
        self._all.hold(key)
        if (own := self._policy_of(key)) is not None:
            own.hold(key)

    def set_last(self, key: BlockKey, last: bool) -> None:
        """Evict this block after all those that are not marked so, or remove this mark."""
        self._all.set_last(key, last)
        if (own := self._policy_of(key)) is not None:
            own.set_last(key, last)

    def access(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        """Record that a request wrote or read a run of blocks; see `EvictionPolicy`."""
        self._all.access(keys, counted)
        for tenant, own_keys in self._by_tenant(keys).items():
            self._own[tenant].access(own_keys, counted)

    def forget(self, key: BlockKey) -> None:
        """Forget a block that is gone, or was never finished. Its tenant may have another one."""
        self._all.forget(key)
        if (own := self._policy_of(key)) is not None:
            own.forget(key)
            tenant = self._tenants.pop(key)
            self._used[tenant] -= 1
            if not self._used[tenant] and tenant not in self._named:
                del self._used[tenant], self._quotas[tenant], self._own[tenant]

    def pop(self, tenant: str | None = None) -> BlockKey | None:
        """Choose and forget the block to evict, from all blocks or from those of a tenant with a
        quota.
        """
        key = self._all.pop() if tenant is None else self._own[tenant].pop()
        if key is not None:
            self.forget(key)
        return key

    def order(self, tenant: str | None = None) -> Iterator[BlockKey]:
        """Yield the blocks that may be evicted, in the order of eviction, from all blocks or from
        those of a tenant with a quota; see `EvictionPolicy.order`.
        """
        return (self._all if tenant is None else self._own[tenant]).order()

    def _policy_of(self, key: BlockKey) -> LastPolicy | None:
        tenant = self._tenants.get(key)
        return None if tenant is None else self._own[tenant]

    def _by_tenant(self, keys: Sequence[BlockKey]) -> dict[str, list[BlockKey]]:
        """Return the keys charged to a tenant with a quota. All blocks of a run should have one
        tenant.
        """
        groups: dict[str, list[BlockKey]] = {}
        if self._tenants:
            for key in keys:
                tenant = self._tenants.get(key)
                if tenant is not None:
                    groups.setdefault(tenant, []).append(key)
        return groups

    def check_integrity(self) -> None:
        """Raise AssertionError when a tenant's count differs from its number of blocks."""
        counts = dict.fromkeys(self._quotas, 0)
        for tenant in self._tenants.values():
            counts[tenant] += 1
        assert counts == self._used
        for tenant, used in self._used.items():
            assert used <= self._quotas[tenant], f"{tenant!r} is over its quota"
            assert len(self._own[tenant]) <= used


SLOT_S = 5.0
"""Times are rounded up to a multiple of this, so that blocks of about the same time end together.
"""


class KeptBlocks:
    """The kept blocks of all tenants, in the order in which they were last asked for.

    A block is kept until its time is over, or until newer ones displace it within two limits: that
    of its tenant and that of all tenants together. So a tenant that keeps much takes no room from
    others beyond its limit.
    """

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
        """Keep the blocks of a run, which belong to `tenant`, at least until then. Keep the first
        blocks if these are more than the tenant may have: a tail without its head is worth nothing.

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
        """Displace this many blocks, each of the tenant that keeps most; of several, of the one
        that has kept for longest.
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
        """When to call `expire` again, or None if nothing is kept."""
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
