"""A table of fixed size from block keys to numbers: two buckets for each key, three slots a bucket.

Pure; owned by its `KeyTable`. A bucket is one line of the CPU's cache. Keys are hashes, so their
first bits say which bucket is their home. The other bucket is near it, in the same group. It is
read only if a key of that home had to go there. This is cuckoo hashing: if both buckets are full, a
key moves another one to its other bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import unpack

import numpy as np
from numpy.typing import NDArray

from mooncake.base import BlockKey

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
