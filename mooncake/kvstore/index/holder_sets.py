"""Sets of holders by number, so that a block's holders cost it four bytes in an array. Also the
latest reports of workers, which change them.

Pure; owned by the index. A set is a mask with one bit for each holder. Equal sets share one number
(most of the time: see `strip_some`). A number is reused once no key has it. A change is a pair of
masks: the holders that came and those that went. Changes wait here until there are enough to enter
them into the table of all keys at once. Keys that were removed lately are remembered in memory of a
fixed size: they tell a block that is gone from one that never existed.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake.base import BlockKey
from mooncake.base.blocks import KEY_BYTES
from mooncake.kvstore.index.key_buckets import Ints, Numbers, Words
from mooncake.kvstore.index.key_table import KeyFilter, words_of


class HolderSets:
    """Gives each set of holders (a mask) a number; 0 is the empty set of unknown keys."""

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        """Masks by number."""
        self._numbers: dict[int, int] = {}
        self._counts: list[int] = [0]
        """Number of keys that have each number."""
        self._free: list[int] = []
        self._num_idle = 0
        self._lost = 0
        """Holders that are being removed from all sets."""
        self._next = 1

    @property
    def num_idle(self) -> int:
        """Keys that no worker holds any more, but which still have a number."""
        return self._num_idle

    def change(
        self, numbers: Numbers, changes: Numbers, meaning: Sequence[tuple[int, int]]
    ) -> Numbers:
        """Add and remove holders of keys with these numbers. `changes` has the number of each key's
        change, and `meaning` maps it to (holders that came, holders that went). Return the new
        numbers of the keys.
        """
        if not len(numbers):
            return numbers
        codes = numbers.astype(np.int64) << 32 | changes
        if (codes == codes[0]).all():
            kinds, which, counts = codes[:1], None, [len(codes)]
        else:
            kinds, which, sizes = np.unique(codes, return_inverse=True, return_counts=True)
            counts = sizes.tolist()
        moved = []
        for code, count in zip(kinds.tolist(), counts, strict=True):
            came, went = meaning[code & 0xFFFFFFFF]
            moved.append(self._move(code >> 32, came, went, count))
        new = np.array(moved, np.uint32)
        return np.repeat(new, counts) if which is None else new[which]

    def renew(self, numbers: Numbers) -> Numbers:
        """Return the same numbers, with 0 for keys that no worker holds."""
        if not self._num_idle:
            return numbers
        return self.change(numbers, np.zeros_like(numbers), [(0, 0)])

    def begin_strip(self, holders: int) -> None:
        """Begin to remove lost holders from all sets with `strip_some`. No set gets them again."""
        self._lost, self._next = holders, 1

    def strip_some(self, count: int) -> bool:
        """Remove lost holders from `count` more sets; return True after the last set. Sets that
        become equal keep their numbers.
        """
        stop = min(self._next + count, len(self.masks))
        for number in range(self._next, stop):
            old = self.masks[number]
            if old & self._lost:
                new = old & ~self._lost
                self._unname(number)
                self.masks[number] = new
                if new:
                    self._numbers.setdefault(new, number)
                else:
                    self._num_idle += self._counts[number]
        self._next = stop
        if stop < len(self.masks):
            return False
        self._lost = 0
        return True

    def check_integrity(self, numbers: Counter[int]) -> None:
        """Raise AssertionError unless the keys have these numbers, and each number has this many
        keys.
        """
        assert {n: count for n, count in enumerate(self._counts) if count} == numbers
        free = set(self._free)
        idle = 0
        for number in range(1, len(self.masks)):
            assert (number in free) == (self._counts[number] == 0), "a number is lost"
            idle += 0 if self.masks[number] else self._counts[number]
        assert idle == self._num_idle
        for mask, number in self._numbers.items():
            assert self.masks[number] == mask != 0
            assert self._counts[number], "a set that no key has"

    def _move(self, number: int, more: int, less: int, count: int) -> int:
        """Move `count` keys on to another set; return its number."""
        mask = self.masks[number]
        wanted = (mask | more) & ~(less | self._lost)
        if wanted == mask and mask:
            return number
        self._drop(number, count)
        if not wanted:
            return 0
        found = self._numbers.get(wanted)
        if found is None:
            found = self._numbers[wanted] = self._new(wanted)
        self._counts[found] += count
        return found

    def _drop(self, number: int, count: int) -> None:
        if not number:
            return
        if not self.masks[number]:
            self._num_idle -= count
        self._counts[number] -= count
        if not self._counts[number]:
            self._unname(number)
            self.masks[number] = 0
            self._free.append(number)

    def _unname(self, number: int) -> None:
        mask = self.masks[number]
        if self._numbers.get(mask) == number:
            del self._numbers[mask]

    def _new(self, mask: int) -> int:
        if self._free:
            number = self._free.pop()
            self.masks[number] = mask
            return number
        self.masks.append(mask)
        self._counts.append(0)
        return len(self.masks) - 1


MOST_UNFILTERED = 8_192
"""Keys that may wait to be added to the filter; it is not needed before a look-up."""


class RecentChanges:
    """Keeps block keys with the number of the change of each; 0 means no change."""

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


PLACE_BITS = 18
"""1 MiB, which fits a CPU's own cache: about as many keys as places are remembered."""

LOOK_FIRST = 4
"""Keys looked up before the rest."""

_QUARTERS = struct.Struct("=4I")


class RemovedKeys:
    """The keys that were removed. It stores a quarter of each key at a place that another quarter
    determines. A key that was not removed is taken for a removed one with a chance of 1 in 2^31.
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
