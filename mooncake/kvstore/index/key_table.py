"""Maps block keys to numbers, in arrays: the keys of a whole prompt are looked up at once.

Pure; owned by the index. A look-up in a dict of ten million keys waits for memory four times, one
after another. Here the waits of thousands of keys overlap, and a key costs half the memory. Whole
keys are compared, so a look-up never returns another key's number. A filter by keys' first bits
tells which of many keys may be among a few thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from sys import byteorder
from typing import Protocol

import numpy as np

from mooncake.base import BlockKey, KeyChain
from mooncake.base.blocks import KEY_BYTES
from mooncake.kvstore.index.key_buckets import GROUP_BITS, Buckets, Ints, Numbers, Words

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


FIRST_BITS = 8
MAX_LOAD = 0.5
"""Share of used slots at which the keys move to another table. Beyond it, finding room for a key
takes longer and longer.
"""
GOOD_LOAD = 0.35
"""Largest share of used slots in the other table after the move."""
MAX_HOMELESS = 512
"""Keys without a place in the table that may wait for one."""
MOST_AT_ONCE = 4096
"""Keys changed at a time: as many as caches hold, and never so many that a table overflows."""
MOVED_GROUPS = 4, 16
"""Groups that are moved before keys are changed: few, or as many as possible. The latter empties
the old table twice as fast as the new one fills.
"""

Change = Callable[[Ints, Numbers], Numbers]
"""(Indices of keys, their numbers; 0: not known) -> their new numbers; 0: forget the key."""


class Owner(Protocol):
    """Knows what the numbers mean."""

    @property
    def num_idle(self) -> int:
        """Keys that `renew` would forget."""

    def renew(self, numbers: Numbers) -> Numbers:
        """Return the new numbers of keys that are moved to another table, or 0 to forget the
        key.
        """


def words_of(keys: Sequence[BlockKey]) -> Words:
    """Return keys as an array of [keys, 2] words.

    Raises:
        ValueError: a key does not have `KEY_BYTES` bytes.
    """
    packed = keys.packed if isinstance(keys, KeyChain) else b"".join(keys)
    if len(packed) != KEY_BYTES * len(keys):
        raise ValueError(f"block keys have {KEY_BYTES} bytes each")
    return np.frombuffer(packed, np.uint64).reshape(-1, 2)


class KeyTable:
    """Maps keys to numbers above 0.

    It grows by moving its keys to a larger table, some groups with each `update`, so that no update
    takes long. A key is in the old table until its group has been moved, and in the new one from
    then on.
    """

    def __init__(self, owner: Owner, first_bits: int = FIRST_BITS) -> None:
        """Begin with 2^`first_bits` buckets."""
        self._owner = owner
        self._table = Buckets(first_bits)
        self._old: Buckets | None = None
        """The table whose keys are being moved to `_table`, first buckets first."""
        self._num_moved = 0
        """Number of its buckets that have been moved."""
        self._homeless: dict[BlockKey, int] = {}
        """Keys whose buckets are full, until there are enough to make room for all of them at once.
        Keys that are not hashes may stay here for ever, so that they do not break the table.
        """
        self._filter = KeyFilter()
        """A filter over the homeless keys."""
        self._max_homeless = MAX_HOMELESS
        self._checked = b""
        """The content that `check_integrity` found in order, which it need not look through again
        as long as it stays so.
        """
        self._checked_numbers = np.zeros(0, np.uint32)

    def __len__(self) -> int:
        old = self._old.count if self._old is not None else 0
        return self._table.count + old + len(self._homeless)

    def get(self, words: Words) -> Numbers:
        """Return the number of each key, 0 if there is none."""
        if self._old is None:
            return self._read(self._table, words, self._table.find(words))
        found = np.zeros(len(words), np.uint32)
        for table, part in self._parts(words):
            some = words[part]
            found[part] = self._read(table, some, table.find(some))
        return found

    def get_one(self, key: BlockKey) -> int:
        """Return the number of a key, 0 if there is none. This is faster than `get` for one key."""
        table = self._table
        if self._old is not None:
            first = int.from_bytes(key[: KEY_BYTES // 2], byteorder)
            if first >= self._old.first_word(self._num_moved):
                table = self._old
        return table.get_one(key) or self._homeless.get(key, 0)

    def update(self, words: Words, change: Change) -> None:
        """Give keys, which must differ, the numbers that `change` makes from their current ones."""
        start = 0
        while start < len(words):
            few, many = MOVED_GROUPS
            self._move_some(many if len(words) - start >= MOST_AT_ONCE else few)
            count = min(MOST_AT_ONCE, 1 + self._table.num_slots // 8)
            stop = min(start + count, len(words))
            some = words[start:stop]
            for table, part in self._parts(some):
                self._update(table, some[part], partial(change, part + start))
            start = stop
            if len(self._homeless) > self._max_homeless:
                self._make_room()
            if self._old is None and self._table.count > MAX_LOAD * self._table.num_slots:
                self._begin_move()

    def _parts(self, words: Words) -> list[tuple[Buckets, Ints]]:
        """Return each table with the keys that belong to it."""
        if self._old is None:
            return [(self._table, np.arange(len(words)))]
        early = words[:, 0] < self._old.first_word(self._num_moved)
        return [(self._table, early.nonzero()[0]), (self._old, (~early).nonzero()[0])]

    def _read(self, table: Buckets, words: Words, places: Ints) -> Numbers:
        numbers = table.read(places)
        if self._homeless:
            for at in self._filter.may_have(words):
                if places[at] < 0:
                    numbers[at] = self._homeless.get(words[at].tobytes(), 0)
        return numbers

    def _update(self, table: Buckets, words: Words, change: Callable[[Numbers], Numbers]) -> None:
        places = table.find(words)
        old = self._read(table, words, places)
        new = change(old)
        absent = places < 0
        known = (~absent).nonzero()[0]
        table.write(places[known], new[known])
        if self._homeless:
            for at in (absent & (old != 0)).nonzero()[0]:
                del self._homeless[words[at].tobytes()]
        fresh = (absent & (new != 0)).nonzero()[0]
        self._keep(*table.insert(words[fresh], new[fresh]))

    def _keep(self, words: Words, numbers: Numbers) -> None:
        """Keep keys for which there was no room."""
        if len(words):
            for key, number in zip(words, numbers.tolist(), strict=True):
                self._homeless[key.tobytes()] = number
            self._filter.add(words)

    def _make_room(self) -> None:
        words = words_of(list(self._homeless))
        numbers = np.fromiter(self._homeless.values(), np.uint32, len(words))
        numbers = self._owner.renew(numbers)
        words, numbers = words[numbers != 0], numbers[numbers != 0]
        self._homeless = {}
        self._filter.clear()
        for table, part in self._parts(words):
            self._keep(*table.make_room(words[part], numbers[part]))
        self._max_homeless = max(MAX_HOMELESS, 2 * len(self._homeless))

    # ------------------------------------------------------------ growth

    def _begin_move(self) -> None:
        """Begin to move to a table with room. It has the same size if no worker holds many of the
        keys.
        """
        bits = self._table.bits
        if len(self) - self._owner.num_idle > GOOD_LOAD * self._table.num_slots:
            bits += 1
        self._old, self._table, self._num_moved = self._table, Buckets(bits), 0

    def _move_some(self, num_groups: int) -> None:
        if self._old is None:
            return
        stop = min(self._num_moved + (num_groups << GROUP_BITS), self._old.num_buckets)
        self._keep(*self._table.take_over(self._old, self._num_moved, stop, self._owner.renew))
        self._num_moved = stop
        if stop == self._old.num_buckets:
            self._old = None
            if self._homeless:
                self._make_room()

    # ------------------------------------------------------------ checks

    def entries(self) -> tuple[Words, Numbers]:
        """Return all keys and their numbers (for checks)."""
        tables = [each.entries() for each in (self._table, self._old) if each is not None]
        homeless = words_of(list(self._homeless)), np.array([*self._homeless.values()], np.uint32)
        words, numbers = zip(*tables, homeless, strict=True)
        return np.concatenate(words), np.concatenate(numbers)

    def items(self) -> Iterator[tuple[BlockKey, int]]:
        """Yield all keys with their numbers, one by one (for checks)."""
        words, numbers = self.entries()
        packed = words.tobytes()
        for place, number in enumerate(numbers.tolist()):
            yield packed[place * KEY_BYTES : (place + 1) * KEY_BYTES], number

    def check_integrity(self) -> Numbers:
        """Raise AssertionError when a key is stored twice, or where it would not be found. Return
        the numbers of all keys.
        """
        small = self._old is None and not self._homeless
        content = self._table.content() if small else b""
        if content and content == self._checked:
            return self._checked_numbers
        words, numbers = self.entries()
        assert len(set(zip(*words.T.tolist(), strict=True))) == len(words), "a key is there twice"
        assert len(words) == len(self), "keys are miscounted"
        assert np.array_equal(self.get(words), numbers), "a key would not be found"
        self._checked, self._checked_numbers = content, numbers
        return numbers
