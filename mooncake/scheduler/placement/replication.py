"""Replicates hot blocks: they get more copies before many readers queue for one.

Pure; owned by the Conductor. The heat of a block is a rate of uses that halves with time. A copy is
made where a prompt with it is computed anyway: the prefill worker also puts the reused blocks into
the pool of its own node (Mooncake, FAST'25, 6.1: the copy stays where it was fetched to). Copies
that are not used any more are evicted by their pool like any other block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mooncake.base import BlockKey
from mooncake.base.bounded_map import BoundedMap

HOT_BLOCKS = 128
"""This many leading blocks of each prompt are watched: what many prompts share comes first."""
HALF_LIFE_S = 60.0
MAX_WATCHED = 1 << 16


class _Heat:
    """Uses of one block; old ones count less."""

    __slots__ = ("at_s", "uses")

    def __init__(self, now: float) -> None:
        self.uses = 0.0
        self.at_s = now

    def fading(self, now: float) -> float:
        """Return the share of the uses that still counts."""
        return math.exp2((self.at_s - now) / HALF_LIFE_S)


class Replication:
    """Computes how many copies blocks should have."""

    def __init__(self, uses_per_s_per_copy: float) -> None:
        """`uses_per_s_per_copy`: 0 = no replication."""
        self._copies_per_use = (
            math.log(2) / HALF_LIFE_S / uses_per_s_per_copy if uses_per_s_per_copy else 0.0
        )
        self._heat: BoundedMap[BlockKey, _Heat] = BoundedMap(MAX_WATCHED)
        """The block used last is last; those not used for the longest time are dropped first."""

    def __len__(self) -> int:
        """Return how many blocks are watched."""
        return len(self._heat)

    def on_use(
        self, keys: Sequence[BlockKey], copies: Iterable[int], max_copies: int, now: float
    ) -> int:
        """Record that a prompt uses the blocks `keys`, of which `copies` pools each hold a copy.
        Returns how many leading blocks should get a copy on the node that computes the prompt: up
        to the last block that is too hot for its copies.
        """
        if not self._copies_per_use:
            return 0
        length = 0
        at_s, faded, per_use = now, 1.0, self._copies_per_use
        for index, (key, num_copies) in enumerate(zip(keys[:HOT_BLOCKS], copies, strict=False)):
            heat = self._heat.use(key)
            if heat is None:
                heat = self._heat[key] = _Heat(now)
            if heat.at_s != at_s:  # what is used together was mostly used together before
                at_s, faded = heat.at_s, heat.fading(now)
            heat.uses = heat.uses * faded + 1
            heat.at_s = now
            wanted = heat.uses * per_use
            if wanted > 1 and num_copies < min(max_copies, math.ceil(wanted)) > 1:
                length = index + 1
        return length
