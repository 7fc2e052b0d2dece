"""Remembers block keys that were removed lately, in memory of a fixed size. It tells a block that
is gone from one that never existed.

Pure; owned by the index. Each key has one place; a later key with the same place displaces it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake.base import BlockKey
from mooncake.kvstore.index.key_table import words_of

PLACE_BITS = 18
"""1 MiB, which fits a CPU's own cache: about as many keys as places are remembered."""

LOOK_FIRST = 4
"""Keys looked up before the rest."""

_QUARTERS = struct.Struct("=4I")


class RemovedKeys:
    """Stores a quarter of each key, at the place that another quarter names. The chance that a key
    which was not removed is found is 1 in 2^31.
    """

    def __init__(self, place_bits: int = PLACE_BITS) -> None:
        self._marks = np.zeros(1 << place_bits, np.uint32)
        self._view: memoryview[int] = self._marks.data
        self._last = (1 << place_bits) - 1

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Remember keys."""
        if keys:
            places, marks = self._parts(keys)
            self._marks[places] = marks

    def end(self, keys: Sequence[BlockKey], first: int = 0) -> int:
        """Return where a stretch of remembered keys ends that begins at the key with the number
        `first` of a chain. Return `first` if none of the first few is remembered: chains lose their
        tails first, and most prompts are new.
        """
        if not any(map(self._has, keys[first : first + LOOK_FIRST])):
            return first
        places, marks = self._parts(keys[first:])
        return len(keys) - int((self._marks.take(places) == marks)[::-1].argmax())

    def _has(self, key: BlockKey) -> bool:
        """Return whether one key is remembered. This is faster than arrays of a few keys."""
        mark, _, place, _ = _QUARTERS.unpack(key)
        return bool(self._view[place & self._last] == mark | 1)

    def _parts(self, keys: Sequence[BlockKey]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return the place of each key, and the value kept there, which is never 0 (an empty
        place).
        """
        quarters = words_of(keys).view(np.uint32)
        return (quarters[:, 2] & np.uint32(self._last)).astype(np.int64), quarters[
            :, 0
        ] | np.uint32(1)
