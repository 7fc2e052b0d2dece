"""The table of keys against a dict: growth, removal, full buckets, keys that are equal by half."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.base import KeyChain, block_keys
from mooncake.kvstore.index.key_buckets import Buckets
from mooncake.kvstore.index.key_table import MAX_HOMELESS, KeyFilter, KeyTable, words_of

HALVES = [0, 1, 2, 1 << 40, 1 << 63, (1 << 64) - 1]
# Few halves, so that keys share buckets, halves or all but a bit.
KEYS = [a.to_bytes(8, "little") + b.to_bytes(8, "little") for a in HALVES for b in HALVES]


class Owner:
    """Forgets the numbers it is told to when keys are moved over."""

    def __init__(self) -> None:
        self.idle: set[int] = set()
        self.num_idle = 0

    def renew(self, numbers: np.ndarray) -> np.ndarray:
        return np.where(np.isin(numbers, list(self.idle)), 0, numbers).astype(np.uint32)


def put(table: KeyTable, numbers: dict[bytes, int]) -> None:
    """Give keys numbers, 0 to forget them."""
    new = np.array(list(numbers.values()), np.uint32)
    table.update(words_of(list(numbers)), lambda which, _: new[which])


def check(table: KeyTable, model: dict[bytes, int], others: list[bytes]) -> None:
    table.check_integrity()
    assert dict(table.items()) == model
    assert len(table) == len(model)
    asked = [*model, *others]
    expected = [model.get(key, 0) for key in asked]
    assert table.get(words_of(asked)).tolist() == expected
    assert [table.get_one(key) for key in asked] == expected


@given(
    st.lists(
        st.dictionaries(st.sampled_from(KEYS), st.integers(0, 9), max_size=len(KEYS)), max_size=12
    )
)
@settings(deadline=None, max_examples=60)
def test_any_keys_are_kept_as_a_dict_keeps_them(batches: list[dict[bytes, int]]) -> None:
    table, model = KeyTable(Owner(), first_bits=1), dict[bytes, int]()
    for batch in batches:
        before = [model.get(key, 0) for key in batch]
        seen: dict[int, int] = {}

        def change(which, numbers, batch=batch, seen=seen):
            seen.update(zip(which.tolist(), numbers.tolist(), strict=True))
            return np.array(list(batch.values()), np.uint32)[which]

        table.update(words_of(list(batch)), change)
        assert [seen[at] for at in range(len(batch))] == before
        model.update(batch)
        model = {key: number for key, number in model.items() if number}
        check(table, model, KEYS)


def test_hashed_keys_come_and_go_while_the_table_grows() -> None:
    source = random.Random(1)
    table, model = KeyTable(Owner(), first_bits=3), dict[bytes, int]()
    strangers = [source.randbytes(16) for _ in range(500)]
    for turn in range(60):
        fresh = {source.randbytes(16): source.randrange(1, 1 << 32) for _ in range(400)}
        put(table, fresh)
        model |= fresh
        gone = source.sample(list(model), 150 if turn % 20 else len(model) // 2)
        put(table, dict.fromkeys(gone, 0) | dict.fromkeys(strangers[:9], 0))
        for key in gone:
            del model[key]
        if turn % 6 == 0:
            check(table, model, strangers + gone)
    check(table, model, strangers)
    assert len(table._homeless) <= MAX_HOMELESS


def test_changes_reach_keys_on_both_sides_of_a_move() -> None:
    """Every key is in the old table or in the new one while one is moved over to the other."""
    source = random.Random(2)
    table = KeyTable(Owner(), first_bits=14)
    model = {source.randbytes(16): number for number in range(1, 30_001)}
    put(table, model)
    sides = set[bool]()
    for _ in range(8):
        some = {key: source.randrange(2) * 7 for key in source.sample(list(model), 40)}
        put(table, some)
        sides.add(table._old is not None)
        model = {key: number for key, number in (model | some).items() if number}
        check(table, model, list(some))
    assert sides == {True, False}


def test_keys_made_up_to_collide_break_nothing() -> None:
    """All at home in one bucket, with one other: ten times what both hold, and as many hashed."""
    made_up = [bytes(8) + (n << 20).to_bytes(8, "little") for n in range(2 * MAX_HOMELESS)]
    model = {key: number for number, key in enumerate(made_up, start=1)}
    model |= dict.fromkeys(block_keys("hashed", range(2000), 1), 5)
    table = KeyTable(Owner())
    for start in range(0, len(model), 100):
        put(table, dict(list(model.items())[start : start + 100]))
    check(table, model, KEYS)
    put(table, dict.fromkeys(made_up[1:], 0))
    check(table, {key: n for key, n in model.items() if key not in made_up[1:]}, made_up)


def test_a_full_bucket_gives_keys_to_the_other() -> None:
    buckets = Buckets(4)
    keys = [bytes(8) + n.to_bytes(8, "little") for n in (0, 2, 4, 6, 8)]  # others: 1, 3, 5, 7, 9
    words, numbers = words_of(keys), np.arange(1, 6, dtype=np.uint32)
    assert len(buckets.insert(words, numbers)[0]) == 0
    found = (buckets.find(words) // 16).tolist()
    assert found.count(0) == 3
    assert all(at in (0, other) for at, other in zip(found, (1, 3, 5, 7, 9), strict=True))
    assert buckets.read(buckets.find(words)).tolist() == [1, 2, 3, 4, 5]
    assert buckets.find(words_of([bytes(8) + bytes([10]) + bytes(7)])).tolist() == [-1]


def test_idle_keys_are_left_behind_and_the_table_stays_as_it_is() -> None:
    owner = Owner()
    table = KeyTable(owner, first_bits=10)
    lost = dict.fromkeys(block_keys("lost", range(1400), 1), 1)
    kept = dict.fromkeys(block_keys("kept", range(200), 1), 2)
    put(table, lost)
    owner.idle, owner.num_idle = {1}, len(lost)
    for key in kept:
        put(table, {key: 2})
    check(table, kept, list(lost))
    assert table._table.bits == 10


def test_checks_find_keys_that_are_there_twice_or_miscounted_or_elsewhere() -> None:
    table, model = KeyTable(Owner()), dict.fromkeys(block_keys("some", range(90), 1), 3)
    put(table, model)
    assert table.check_integrity().tolist() == [3] * len(model)
    twice = next(iter(model))
    table._homeless[twice] = 3
    with pytest.raises(AssertionError, match="a key is there twice"):
        table.check_integrity()
    del table._homeless[twice]
    table._table.count += 1
    with pytest.raises(AssertionError, match="keys are miscounted"):
        table.check_integrity()
    table._table.count -= 1
    table._table._rows[:-1] = np.roll(table._table._rows[:-1], 7, axis=0)
    with pytest.raises(AssertionError, match="a key would not be found"):
        table.check_integrity()


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        words_of([bytes(16), b"short"])
    assert words_of(KeyChain()).shape == (0, 2)
    assert words_of(KeyChain(bytes(32))).shape == (2, 2)


def test_the_filter_knows_all_that_was_added_and_little_else() -> None:
    known = words_of(block_keys("known", range(1_000), 1))
    others = words_of(block_keys("others", range(10_000), 1))
    some = KeyFilter()
    some.add(known)
    assert some.may_have(known).tolist() == list(range(1_000))
    assert len(some.may_have(others)) < 200
    some.clear()
    assert len(some.may_have(known)) == 0
