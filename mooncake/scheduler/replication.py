"""Hot blocks get more copies before their readers queue for one; cold copies go by eviction.

Pure; owned by the Conductor. How hot a block is, is a rate that halves with time. A copy is made
where a prompt with it is computed anyway: the prefill worker also puts the reused blocks into the
pool of its own node (Mooncake, FAST'25, 6.1: the copy stays where it was fetched to). Nothing keeps
a copy that is used no more: the pool's own eviction takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mooncake.base import BlockKey

HOT_BLOCKS = 128
"""Of each prompt, so many leading blocks are watched: what many prompts share comes first."""
HALF_LIFE_S = 60.0
MAX_WATCHED = 1 << 16


class _Heat:
    """Uses of one block, old ones counting less."""

    __slots__ = ("at_s", "uses")

    def __init__(self, now: float) -> None:
        self.uses = 0.0
        self.at_s = now

    def left(self, now: float) -> float:
        """Return the uses that still count."""
        return self.uses * math.exp2((self.at_s - now) / HALF_LIFE_S)


class Replication:
    """How many copies blocks should have."""

    def __init__(self, uses_per_s_per_copy: float, num_copies: Callable[[BlockKey], int]) -> None:
        """`num_copies` tells how many pools hold a block; 0 uses a second = no replication."""
        self._per_copy = uses_per_s_per_copy
        self._num_copies = num_copies
        self._heat: dict[BlockKey, _Heat] = {}

    def use(self, keys: Sequence[BlockKey], now: float, max_copies: int) -> int:
        """A prompt uses these blocks. Returns how many leading ones should get a copy on the node
        that computes it: up to the last that is too hot for the copies it has.
        """
        if not self._per_copy:
            return 0
        length = 0
        for index, key in enumerate(keys[:HOT_BLOCKS]):
            rate = self._add(key, now)
            wanted = min(max_copies, math.ceil(rate / self._per_copy))
            if wanted > 1 and self._num_copies(key) < wanted:
                length = index + 1
        if len(self._heat) > MAX_WATCHED:
            self._forget_cold(now)
        return length

    def uses_per_s(self, key: BlockKey, now: float) -> float:
        """Return how often a block is used, of late."""
        heat = self._heat.get(key)
        return heat.left(now) * math.log(2) / HALF_LIFE_S if heat is not None else 0.0

    @property
    def num_watched(self) -> int:
        return len(self._heat)

    def _add(self, key: BlockKey, now: float) -> float:
        heat = self._heat.get(key)
        if heat is None:
            heat = self._heat[key] = _Heat(now)
        heat.uses = heat.left(now) + 1
        heat.at_s = now
        return heat.uses * math.log(2) / HALF_LIFE_S

    def _forget_cold(self, now: float) -> None:
        """Keep the hotter half."""
        ranked = sorted(self._heat.items(), key=lambda item: -item[1].left(now))
        self._heat = dict(ranked[: MAX_WATCHED // 2])
