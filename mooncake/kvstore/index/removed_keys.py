"""Block keys that were removed lately, in memory of a fixed size: it tells a block that is gone
from one that never was.

Pure; owned by the index. Each key has one place; a later key with the same place displaces it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake.base import BlockKey
from mooncake.kvstore.index.key_buckets import Words
from mooncake.kvstore.index.key_table import words_of

PLACE_BITS = 20
"""8 MiB: about as many keys as places are remembered."""


class RemovedKeys:
    """Half of each key, at the place that the other half names. A key that was not removed is found
    by a chance of 1 in 2^63.
    """

    def __init__(self, place_bits: int = PLACE_BITS) -> None:
        self._halves = np.zeros(1 << place_bits, np.uint64)
        self._mask = np.uint64((1 << place_bits) - 1)
        self._used = False

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Remember keys."""
        if keys:
            self._used = True
            words = words_of(keys)
            self._halves[words[:, 1] & self._mask] = _mark(words)

    def end(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading keys lie before, or are, the last one that is remembered."""
        if not self._used or not keys:
            return 0
        words = words_of(keys)
        found = self._halves[words[:, 1] & self._mask] == _mark(words)
        return len(keys) - int(found[::-1].argmax()) if found.any() else 0


def _mark(words: Words) -> Words:
    """Return what is kept of keys: never 0, which is an empty place."""
    return words[:, 0] | np.uint64(1)
