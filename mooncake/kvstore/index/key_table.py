"""Maps block keys to numbers, in arrays: the keys of a whole prompt are looked up at once.

Pure; owned by the index. A look-up in a dict of ten million keys waits for memory four times, one
after another. Here the waits of thousands of keys overlap, and a key costs half the memory. Whole
keys are compared, so a look-up never returns another key's number. A filter by keys' first bits
tells which of many keys may be among a few thousand.

A table grows by moving into a larger one of fixed size (`Buckets`), with two buckets for each key
and three slots a bucket. A bucket is one line of the CPU's cache. Keys are hashes, so their first
bits say which bucket is their home. The other bucket is near it, in the same group. It is read only
if a key of that home had to go there. This is cuckoo hashing: if both buckets are full, a key moves
another one to its other bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from struct import unpack
from sys import byteorder
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake.base import BlockKey, KeyChain
from mooncake.base.blocks import KEY_BYTES

Words = NDArray[np.uint64]
"""Keys as an array [keys, 2]: the first and the last eight bytes of each."""
Numbers = NDArray[np.uint32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SLOTS = 3
"""Layout of a bucket: 3 first halves, 3 second halves, 3 numbers (0: the slot is free), and whether
a key with this home is in its other bucket, or was once.
"""
ROW_WORDS = 8
ROW_NUMBERS = 2 * ROW_WORDS
FIRST_NUMBER = 4 * SLOTS
LEFT = ROW_NUMBERS - 1
GROUP_BITS = 9
"""Buckets that differ only in these bits form a group: no key leaves it."""
MAX_TURNS = 50
"""Rounds in which keys displace others, before the remaining ones are given back."""


class Buckets:
    """Stores the keys of one table in buckets. Places are indices into the array of all numbers."""

    def __init__(self, bits: int) -> None:
        """Make 2^`bits` buckets; their memory is not touched before they are used."""
        self.bits = bits
        self.count = 0
        """Keys that are here."""
        size = ROW_WORDS << bits
        raw = np.zeros(size + 2 * ROW_WORDS, np.uint64)
        skip = -(raw.ctypes.data // raw.itemsize) % ROW_WORDS
        self._words = raw[skip : skip + size + ROW_WORDS]
        self._numbers = self._words.view(np.uint32)
        self._rows = self._words.reshape(-1, ROW_WORDS)
        """One row more than there are buckets, so that the place -1 has the number 0."""
        self._shift = np.uint64(64 - bits)
        self._in_group = np.uint64((1 << min(GROUP_BITS, bits)) - 1)

    @property
    def num_buckets(self) -> int:
        return 1 << self.bits

    @property
    def num_slots(self) -> int:
        return SLOTS << self.bits

    def first_word(self, bucket: int) -> int:
        """Return the least first word that keys at home in this bucket can have."""
        return bucket << (64 - self.bits)

    def find(self, words: Words) -> Ints:
        """Return the place of each key's number, -1 if there is none. Places are valid until keys
        are added or removed.
        """
        buckets = self._home(words[:, 0])
        places, left = self._find_in(buckets, words)
        (away,) = (left & (places < 0)).nonzero()
        if len(away):
            rest = words[away]
            places[away], _ = self._find_in(self._other(buckets[away], rest[:, 1]), rest)
        return places

    def get_one(self, key: BlockKey) -> int:
        """Return the number of a key, 0 if it is not here."""
        low, high = unpack("=QQ", key)
        bucket = low >> 64 - self.bits
        number, left = self._get_in(bucket, low, high)
        if number or not left:
            return number
        return self._get_in(bucket ^ (high & int(self._in_group) | 1), low, high)[0]

    def _get_in(self, bucket: int, low: int, high: int) -> tuple[int, int]:
        """Return the number of a key in one bucket, and whether keys have left the bucket."""
        words = self._rows[bucket].tolist()
        numbers = self._numbers[bucket * ROW_NUMBERS + FIRST_NUMBER :][: SLOTS + 1].tolist()
        for slot in range(SLOTS):
            if words[slot] == low and words[SLOTS + slot] == high and numbers[slot]:
                return numbers[slot], 0
        return 0, numbers[SLOTS]

    def read(self, places: Ints) -> Numbers:
        """Return the numbers at these places, 0 for -1."""
        return self._numbers.take(places)

    def write(self, places: Ints, numbers: Numbers) -> None:
        """Give the keys at these places other numbers; 0 removes a key."""
        self._numbers[places] = numbers
        self.count -= len(numbers) - int(np.count_nonzero(numbers))

    def insert(self, words: Words, numbers: Numbers) -> tuple[Words, Numbers]:
        """Add keys that differ and are not here, if there is room. Return those left over."""
        kept = words[:0], numbers[:0]
        while len(words):
            low, high = words[:, 0], words[:, 1]
            buckets = self._home(low)
            slots = self._free_slot(buckets)
            (full,) = (slots < 0).nonzero()
            if len(full):
                buckets[full] = self._other(buckets[full], high[full])
                slots[full] = self._free_slot(buckets[full])
                if slots[full].min() < 0:
                    room = slots >= 0
                    left = words[~room], numbers[~room]
                    kept = np.concatenate((kept[0], left[0])), np.concatenate((kept[1], left[1]))
                    words, numbers = words[room], numbers[room]
                    buckets, slots, low, high = buckets[room], slots[room], low[room], high[room]
            got_it, _ = self._claim(buckets, slots, numbers)
            if got_it.all():
                self._settle(words, buckets, slots)
                break
            self._settle(words[got_it], buckets[got_it], slots[got_it])
            words, numbers = words[~got_it], numbers[~got_it]
        return kept

    def take_over(
        self, old: Buckets, start: int, stop: int, renew: Callable[[Numbers], Numbers]
    ) -> tuple[Words, Numbers]:
        """Take the keys of the buckets [start, stop) from a table of the same size or half of it.
        `renew` makes their new numbers. Their groups here must be empty. Return the keys left over.

        Keys at home keep their slots: the keys of an old bucket go to one or two buckets here, by
        their next bit. The others are added like new ones.
        """
        rows = old._rows[start:stop]
        numbers = rows.view(np.uint32)[:, FIRST_NUMBER:LEFT]
        numbers = renew(numbers.ravel()).reshape(numbers.shape)
        homes = self._home(rows[:, :SLOTS])
        factor = self.num_buckets // old.num_buckets
        target = np.arange(start * factor, stop * factor, factor)[:, np.newaxis]
        away = numbers != 0
        for part in range(factor):
            here = self._rows[start * factor + part : stop * factor : factor]
            at_home = away & (homes == target + part)
            here[:, : 2 * SLOTS] = rows[:, : 2 * SLOTS]
            here.view(np.uint32)[:, FIRST_NUMBER:LEFT] = numbers * at_home
            self.count += int(np.count_nonzero(at_home))
            away &= ~at_home
        words = np.stack((rows[:, :SLOTS][away], rows[:, SLOTS : 2 * SLOTS][away]), axis=1)
        rest = numbers[away]
        old.count -= int(np.count_nonzero(rows.view(np.uint32)[:, FIRST_NUMBER:LEFT]))
        rows[:] = 0
        return self.insert(words, rest)

    def make_room(self, words: Words, numbers: Numbers) -> tuple[Words, Numbers]:
        """Add keys that differ and are not here. If both buckets are full, other keys must leave.
        Return the keys for which no room was found; these are not always new ones.
        """
        buckets = self._home(words[:, 0])
        for turn in range(MAX_TURNS):
            if not len(words):
                break
            slots = self._free_slot(buckets)
            (full,) = (slots < 0).nonzero()
            any_slot = words[full, 0] + np.uint64(turn)  # so that it is not always the same key
            slots[full] = any_slot % np.uint64(SLOTS)
            got_it, before = self._claim(buckets, slots, numbers)
            out = got_it & (before != 0)
            at = buckets[out] * ROW_WORDS + slots[out]
            others = np.stack((self._words[at], self._words[at + SLOTS]), axis=1)
            self._settle(words[got_it], buckets[got_it], slots[got_it])
            self.count -= len(others)
            words = np.concatenate((words[~got_it], others))
            numbers = np.concatenate((numbers[~got_it], before[out]))
            others_buckets = self._other(buckets[out], others[:, 1])
            buckets = np.concatenate((buckets[~got_it], others_buckets))
        return words, numbers

    def _claim(self, buckets: Ints, slots: Ints, numbers: Numbers) -> tuple[Bools, Numbers]:
        """Write numbers to slots. If several want one slot, one of them gets it. Return which did,
        and all the previous numbers.
        """
        places = buckets * ROW_NUMBERS + (FIRST_NUMBER + slots)
        before = self._numbers.take(places)
        marks = np.arange(1, len(places) + 1, dtype=np.uint32)
        self._numbers[places] = marks
        got_it: Bools = self._numbers.take(places) == marks
        if got_it.all():
            self._numbers[places] = numbers
        else:
            self._numbers[places[got_it]] = numbers[got_it]
        return got_it, before

    def _settle(self, words: Words, buckets: Ints, slots: Ints) -> None:
        """Write keys to the slots that they have claimed."""
        self.count += len(words)
        at = buckets * ROW_WORDS + slots
        self._words[at] = words[:, 0]
        self._words[at + SLOTS] = words[:, 1]
        homes = self._home(words[:, 0])
        left = homes[homes != buckets]
        if len(left):
            self._numbers[left * ROW_NUMBERS + LEFT] = 1

    def content(self) -> bytes:
        """Return the bytes of all buckets and the number of keys (for checks)."""
        return self._words.tobytes() + self.count.to_bytes(8)

    def entries(self) -> tuple[Words, Numbers]:
        """Return the keys and their numbers (for checks)."""
        assert not self._rows[-1].any(), "something is in the row that is no bucket"
        numbers = self._rows.view(np.uint32)[:, FIRST_NUMBER:LEFT]
        at, slots = numbers.nonzero()
        words = np.stack((self._rows[at, slots], self._rows[at, slots + SLOTS]), axis=1)
        return words, numbers[at, slots]

    def _home(self, low: NDArray[np.uint64]) -> Ints:
        return (low >> self._shift).astype(np.int64)

    def _other(self, buckets: Ints, high: NDArray[np.uint64]) -> Ints:
        """Return the other bucket of keys that are in these."""
        return buckets ^ (high & self._in_group | np.uint64(1)).astype(np.int64)

    def _find_in(self, buckets: Ints, words: Words) -> tuple[Ints, Bools]:
        """Return the places of the numbers of keys in these buckets, -1 for keys that are not
        there, and whether keys have left the bucket.
        """
        rows = self._rows.take(buckets, axis=0)
        numbers = rows.view(np.uint32)
        low, high = words[:, 0], words[:, 1]
        at = np.zeros(len(words), np.int64)
        for slot in range(SLOTS):
            hit = (rows[:, slot] == low) & (rows[:, SLOTS + slot] == high)
            hit &= numbers[:, FIRST_NUMBER + slot] != 0
            at += hit * np.int64(FIRST_NUMBER + slot)
        places = np.where(at > 0, buckets * ROW_NUMBERS + at, -1)
        return places, numbers[:, LEFT] != 0

    def _free_slot(self, buckets: Ints) -> Ints:
        """Return a free slot of each bucket, -1 if it is full."""
        numbers = self._rows.take(buckets, axis=0).view(np.uint32)
        slots = np.full(len(buckets), -1)
        for slot in reversed(range(SLOTS)):
            slots[numbers[:, FIRST_NUMBER + slot] == 0] = slot
        return slots


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
