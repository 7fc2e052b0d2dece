"""Keeps the latest reports of workers. Changes wait here until there are enough to enter them into
the table of all keys at once.

Pure; owned by the index. A change is a pair of masks: the holders that came and those that went.
Equal changes share one number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake.base import BlockKey
from mooncake.base.blocks import KEY_BYTES
from mooncake.kvstore.index.key_buckets import Ints, Numbers, Words
from mooncake.kvstore.index.key_filter import KeyFilter
from mooncake.kvstore.index.key_table import words_of

MOST_UNFILTERED = 8_192
"""Keys that may wait to be added to the filter; it is not needed before a look-up."""


class RecentChanges:
    """Block keys and the number of the change of each; 0 means no change."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, int]] = [(0, 0)]
        """(holders that came, holders that went) by number; the same holder is never in both."""
        self._numbers: dict[tuple[int, int], int] = {}
        self._of_keys: dict[BlockKey, int] = {}
        self._filter = KeyFilter()
        self._unfiltered: list[BlockKey] = []
        """Keys that are not in the filter yet."""

    @property
    def size(self) -> int:
        """Number of keys that changed, or of kinds of changes, whichever is larger."""
        return max(len(self._of_keys), len(self.changes) - 1)

    def add(self, keys: Sequence[BlockKey], came: int, went: int) -> None:
        """Note that all these keys got and lost holders."""
        if not keys:
            return
        of_keys = self._of_keys
        if of_keys.keys().isdisjoint(keys):
            of_keys.update(dict.fromkeys(keys, self._number(came, went)))
        else:
            now = [of_keys.get(key, 0) for key in keys]
            after = {number: self._after(number, came, went) for number in set(now)}
            of_keys.update(zip(keys, map(after.__getitem__, now), strict=True))
        self._unfiltered.extend(keys)
        if len(self._unfiltered) > MOST_UNFILTERED:
            self._fill_filter()

    def may_have(self, words: Words) -> Ints:
        """Return which of these keys may have changed."""
        self._fill_filter()
        return self._filter.may_have(words)

    def get(self, words: Words) -> list[int]:
        """Return the number of the change of each key."""
        packed = words.tobytes()
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        return [self._of_keys.get(key, 0) for key in keys]

    def get_one(self, key: BlockKey) -> int:
        """Return the number of the change of a key."""
        return self._of_keys.get(key, 0)

    def take(self) -> tuple[Words, Numbers]:
        """Return all keys with the numbers of their changes, and forget the keys; `changes` keeps
        its meaning until `forget`.
        """
        words = words_of(list(self._of_keys))
        numbers = np.fromiter(self._of_keys.values(), np.uint32, len(words))
        self._of_keys = {}
        self._filter.clear()
        self._unfiltered = []
        return words, numbers

    def forget(self) -> None:
        """Forget the meaning of the numbers."""
        self.changes = [(0, 0)]
        self._numbers = {}

    def _fill_filter(self) -> None:
        if self._unfiltered:
            self._filter.add(words_of(self._unfiltered))
            self._unfiltered = []

    def _after(self, number: int, came: int, went: int) -> int:
        """Return the number of the change that combines two changes, one after the other."""
        more, less = self.changes[number]
        return self._number(more & ~went | came, less & ~came | went)

    def _number(self, came: int, went: int) -> int:
        number = self._numbers.get((came, went))
        if number is None:
            number = self._numbers[came, went] = len(self.changes)
            self.changes.append((came, went))
        return number
