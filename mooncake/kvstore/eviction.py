"""Decides which block is evicted first when room is short: one port, four policies.

Pure; owned by one tier. A policy knows only the blocks that may be evicted, so it cannot choose one
that is pinned or half written. It frees nothing itself.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Protocol

from mooncake.base import BlockKey

Keys = Set[BlockKey]
NONE: Keys = frozenset()


class EvictionPolicy(Protocol):
    """The order of the blocks that may be evicted. Runs of keys are passed with the head of the
    chain first.

    All calls are O(log n) for each key or better, and deterministic.
    """

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Allow these blocks to be evicted from now on: they were just stored, or are not pinned
        any more.
        """

    def hold(self, key: BlockKey) -> None:
        """Protect this block from eviction until it is released again; its history stays."""

    def forget(self, key: BlockKey) -> None:
        """Forget a block that is gone."""

    def access(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        """Note that a request wrote or read this run. Keys never released here are skipped. Blocks
        that were `counted` before only change their order.
        """

    def pop(self) -> BlockKey | None:
        """Choose, forget and return the block to evict; None when no block may be evicted."""

    def order(self) -> Iterator[BlockKey]:
        """Yield the blocks that may be evicted, in the order of eviction. Use it up, or leave it,
        before the next call. The first block costs as much as `pop`, all of them a sort.
        """

    def __len__(self) -> int:
        """Return how many blocks may be evicted."""


class LruPolicy:
    """Evicts the run used longest ago, and within a run the tail before the head: a chain without
    its head is worth nothing.

    A protected block keeps its place in the order. If it is protected when its turn comes, it is
    set aside, and evicted first once it is released.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: dict[BlockKey, None] = {}
        self._aside: dict[BlockKey, None] = {}

    def release(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            if key not in self._aside:
                self._held.pop(key, None)
                self._order[key] = None  # put it at the end, unless it has a place already
        for key in keys:
            if key in self._aside:
                del self._aside[key]
                self._order[key] = None
                self._order.move_to_end(key, last=False)

    def hold(self, key: BlockKey) -> None:
        if key in self._order:
            self._held[key] = None

    def forget(self, key: BlockKey) -> None:
        self._order.pop(key, None)
        self._held.pop(key, None)
        self._aside.pop(key, None)

    def access(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        del counted
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)
            elif key in self._aside:
                del self._aside[key]
                self._order[key] = self._held[key] = None

    def pop(self) -> BlockKey | None:
        while self._order:
            key = self._order.popitem(last=False)[0]
            if key not in self._held:
                return key
            del self._held[key]
            self._aside[key] = None
        return None

    def order(self) -> Iterator[BlockKey]:
        return (key for key in self._order if key not in self._held)

    def __len__(self) -> int:
        return len(self._order) - len(self._held)


class _Usage:
    """The uses of a block since it was stored, for a ranked policy."""

    __slots__ = ("accesses", "depth", "last_access_no", "rank", "released", "rest")

    def __init__(self) -> None:
        self.accesses = 0
        self.depth = 0
        """Deepest place seen in a run; a run that began in mid-chain makes it an underestimate."""
        self.rest = 1
        """Blocks from this one to the end of the run it was last used in."""
        self.last_access_no = 0
        self.rank: Rank = ()
        self.released = False


Rank = tuple[float, ...]
"""The lowest rank is evicted first."""


class RankedPolicy:
    """Evicts the lowest rank, which is computed at each access, from a heap that may have outdated
    entries.
    """

    def __init__(self, rank: Callable[[_Usage, float], Rank]) -> None:
        self._rank = rank
        self._usages: dict[BlockKey, _Usage] = {}
        self._heap: list[tuple[Rank, int, BlockKey]] = []
        self._num_entries = 0
        self._num_accesses = 0
        self._num_released = 0
        self._floor = 0.0

    def release(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            usage = self._usages.get(key)
            if usage is None:
                usage = self._usages[key] = _Usage()
            if not usage.released:
                usage.released = True
                self._num_released += 1
            self._push(key, usage)

    def hold(self, key: BlockKey) -> None:
        usage = self._usages.get(key)
        if usage is not None and usage.released:
            usage.released = False
            self._num_released -= 1

    def forget(self, key: BlockKey) -> None:
        self.hold(key)
        self._usages.pop(key, None)

    def access(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        self._num_accesses += 1
        for depth in range(len(keys) - 1, -1, -1):
            usage = self._usages.get(keys[depth])
            if usage is None:
                continue
            usage.accesses += keys[depth] not in counted
            usage.depth = max(usage.depth, depth)
            usage.rest = len(keys) - depth
            usage.last_access_no = self._num_accesses
            usage.rank = self._rank(usage, self._floor)
            if usage.released:
                self._push(keys[depth], usage)

    def pop(self) -> BlockKey | None:
        while self._heap:
            rank, _, key = entry = heapq.heappop(self._heap)
            if self._counts(entry):
                self._floor = max(self._floor, rank[0])
                self.forget(key)
                return key
        return None

    def order(self) -> Iterator[BlockKey]:
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            return
        first = self._heap[0][2]
        yield first
        seen = {first}
        for entry in sorted(self._heap):
            if entry[2] not in seen and self._counts(entry):
                seen.add(entry[2])
                yield entry[2]

    def _counts(self, entry: tuple[Rank, int, BlockKey]) -> bool:
        usage = self._usages.get(entry[2])
        return usage is not None and usage.released and usage.rank == entry[0]

    def __len__(self) -> int:
        return self._num_released

    @property
    def num_heap_entries(self) -> int:
        """Number of entries, including outdated ones: at most twice the blocks that may be evicted,
        plus 64.
        """
        return len(self._heap)

    def _push(self, key: BlockKey, usage: _Usage) -> None:
        if not usage.rank:
            usage.rank = self._rank(usage, self._floor)
        self._num_entries += 1
        heapq.heappush(self._heap, (usage.rank, self._num_entries, key))
        if len(self._heap) > 2 * self._num_released + 64:
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Rebuild the heap from the valid entries. The pushes since the last time pay for it."""
        seen: set[BlockKey] = set()
        kept: list[tuple[Rank, int, BlockKey]] = []
        for entry in self._heap:
            if self._counts(entry):
                if entry[2] not in seen:
                    kept.append(entry)
                seen.add(entry[2])
        heapq.heapify(kept)
        self._heap = kept


def _lfu_rank(usage: _Usage, _floor: float) -> Rank:
    return (usage.accesses, usage.last_access_no, -usage.depth)


def _length_rank(usage: _Usage, _floor: float) -> Rank:
    return (usage.accesses, -usage.depth, usage.last_access_no)


ATTENTION_SHARE = 1 / 400
"""How much a block's compute grows with each block before it, relative to the first block. For
Kimi-K2, attention over about 25k tokens (400 blocks) costs as much as its active weights.
"""


def _cost_rank(usage: _Usage, floor: float) -> Rank:
    first, stop = usage.depth, usage.depth + usage.rest
    growth = (stop * (stop - 1) - first * (first - 1)) / 2
    return (floor + usage.accesses * (usage.rest + ATTENTION_SHARE * growth), -usage.depth)


def lfu_policy() -> RankedPolicy:
    """Return a policy that evicts the least often used block; among equals, the one used longest
    ago.
    """
    return RankedPolicy(_lfu_rank)


def length_aware_policy() -> RankedPolicy:
    """Return a policy like LFU that, among equals, evicts the block deepest in its request
    (Mooncake, FAST'25, table of cache policies).
    """
    return RankedPolicy(_length_rank)


def cost_aware_policy() -> RankedPolicy:
    """Return a policy that evicts the block that is cheapest to lose: the time to recompute from
    this block to the end of the run it was last used in, times its uses, aged as in GreedyDual.
    """
    return RankedPolicy(_cost_rank)


class LastPolicy:
    """Puts two policies of one kind in a row: no block of the second is evicted while the first has
    one.

    A block that moves to the other policy is new there: that policy does not know its history.
    """

    def __init__(self, make_policy: Callable[[], EvictionPolicy]) -> None:
        self._first = make_policy()
        self._second = make_policy()
        self._last: dict[BlockKey, None] = {}
        """Blocks of the second policy."""

    def set_last(self, key: BlockKey, last: bool) -> None:
        """Move a stored block to the other policy."""
        if last == (key in self._last):
            return
        old, new = self._first, self._second
        if last:
            self._last[key] = None
        else:
            del self._last[key]
            old, new = new, old
        num_loose = len(old)
        old.forget(key)
        if len(old) < num_loose:
            new.release([key])

    def release(self, keys: Sequence[BlockKey]) -> None:
        for policy, part in self._split(keys):
            policy.release(part)

    def hold(self, key: BlockKey) -> None:
        (self._second if key in self._last else self._first).hold(key)

    def forget(self, key: BlockKey) -> None:
        if key in self._last:
            del self._last[key]
            self._second.forget(key)
        else:
            self._first.forget(key)

    def access(self, keys: Sequence[BlockKey], counted: Keys = NONE) -> None:
        for policy, part in self._split(keys):
            policy.access(part, counted)

    def pop(self) -> BlockKey | None:
        key = self._first.pop()
        if key is None:
            key = self._second.pop()
            if key is not None:
                del self._last[key]
        return key

    def order(self) -> Iterator[BlockKey]:
        yield from self._first.order()
        yield from self._second.order()

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def _split(
        self, keys: Sequence[BlockKey]
    ) -> Iterator[tuple[EvictionPolicy, Sequence[BlockKey]]]:
        if not self._last:
            yield self._first, keys
            return
        last = [key for key in keys if key in self._last]
        yield self._first, [key for key in keys if key not in self._last] if last else keys
        yield self._second, last


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {
        "lru": LruPolicy,
        "lfu": lfu_policy,
        "length": length_aware_policy,
        "cost": cost_aware_policy,
    }
)
"""Policy name in the configuration -> how to make one."""
