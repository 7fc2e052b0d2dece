"""A filter over a few thousand keys, by their first bits. It tells which of many keys may be among
them.
"""

from __future__ import annotations

import numpy as np

from mooncake.kvstore.index.key_buckets import Ints, Words

FILTER_BITS = 18
"""A quarter of a mebibyte, which fits a CPU's own cache."""


class KeyFilter:
    """Passes every key that was added, and about one in a hundred others."""

    def __init__(self) -> None:
        self._seen = np.zeros(1 << FILTER_BITS, np.bool_)
        self._shift = np.uint64(64 - FILTER_BITS)

    def add(self, words: Words) -> None:
        """Add keys."""
        self._seen[(words[:, 0] >> self._shift).astype(np.int64)] = True

    def may_have(self, words: Words) -> Ints:
        """Return which of these keys may have been added."""
        seen = self._seen.take((words[:, 0] >> self._shift).astype(np.int64))
        return seen.nonzero()[0]

    def clear(self) -> None:
        """Remove all keys."""
        self._seen[:] = False
