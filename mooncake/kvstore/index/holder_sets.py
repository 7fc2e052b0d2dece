"""Sets of holders by number, so that a block's holders cost it four bytes in an array.

Pure; owned by the index. A set is a mask with one bit for each holder. Equal sets share one number
(most of the time: see `strip_some`). A number is reused once no key has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mooncake.kvstore.index.key_buckets import Numbers


class HolderSets:
    """Masks and their numbers; 0 is the empty set of unknown keys."""

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
