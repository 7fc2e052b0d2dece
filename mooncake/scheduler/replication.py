"""Hot blocks get more copies before their readers queue for one; cold copies go by eviction.

Pure; owned by the Conductor. How hot a block is, is a rate that halves with time. A copy is made
where a prompt with it is computed anyway: the prefill worker also puts the reused blocks into the
pool of its own node (Mooncake, FAST'25, 6.1: the copy stays where it was fetched to). Nothing keeps
a copy that is used no more: the pool's own eviction takes it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

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

    def fading(self, now: float) -> float:
        """Return the share of the uses that still counts."""
        return math.exp2((self.at_s - now) / HALF_LIFE_S)

    def left(self, now: float) -> float:
        """Return the uses that still count."""
        return self.uses * self.fading(now)


class Replication:
    """How many copies blocks should have."""

    def __init__(self, uses_per_s_per_copy: float) -> None:
        """0 uses a second = no replication."""
        self._copies_per_use = (
            math.log(2) / HALF_LIFE_S / uses_per_s_per_copy if uses_per_s_per_copy else 0.0
        )
        self._heat: OrderedDict[BlockKey, _Heat] = OrderedDict()
        """The one used last is last; what was not used for long is forgotten first."""

    def use(
        self, keys: Sequence[BlockKey], copies: Iterable[int], max_copies: int, now: float
    ) -> int:
        """A prompt uses these blocks, of which so many pools have copies. Returns how many leading
        ones should get a copy on the node that computes it: up to the last that is too hot for the
        copies it has.
        """
        if not self._copies_per_use:
            return 0
        length = 0
        at_s, faded, per_use = now, 1.0, self._copies_per_use
        for index, (key, num_copies) in enumerate(zip(keys[:HOT_BLOCKS], copies, strict=False)):
            heat = self._heat.get(key)
            if heat is None:
                heat = self._heat[key] = _Heat(now)
            else:
                self._heat.move_to_end(key)
            if heat.at_s != at_s:  # what is used together was mostly used together before
                at_s, faded = heat.at_s, heat.fading(now)
            heat.uses = heat.uses * faded + 1
            heat.at_s = now
            wanted = heat.uses * per_use
            if wanted > 1 and num_copies < min(max_copies, math.ceil(wanted)) > 1:
                length = index + 1
        while len(self._heat) > MAX_WATCHED:
            self._heat.popitem(last=False)
        return length

    def uses_per_s(self, key: BlockKey, now: float) -> float:
        """Return how often a block is used, of late."""
        heat = self._heat.get(key)
        return heat.left(now) * math.log(2) / HALF_LIFE_S if heat is not None else 0.0

    @property
    def num_watched(self) -> int:
        return len(self._heat)
