"""A bounded map forgets what was set or used longest ago, and nothing else."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from mooncake.base.bounded_map import BoundedMap, SharedMap, SizedMap


def test_the_oldest_goes_first() -> None:
    kept: BoundedMap[str, int] = BoundedMap(2)
    kept["a"], kept["b"], kept["c"] = 1, 2, 3
    assert dict(kept) == {"b": 2, "c": 3}
    kept["b"] = 4
    kept["d"] = 5
    assert dict(kept) == {"b": 4, "d": 5}


def test_use_keeps_an_entry_from_going() -> None:
    kept: BoundedMap[str, int] = BoundedMap(2)
    kept["a"], kept["b"] = 1, 2
    assert kept.use("a") == 1
    kept["c"] = 3
    assert dict(kept) == {"a": 1, "c": 3}
    assert kept.use("b") is None


@given(st.lists(st.tuples(st.sampled_from("sup"), st.integers(0, 9)), max_size=60))
def test_it_is_a_list_of_the_latest(steps: list[tuple[str, int]]) -> None:
    kept: BoundedMap[int, int] = BoundedMap(4)
    latest: list[int] = []
    for what, key in steps:
        if what == "s":
            kept[key] = -key
            latest = [*(one for one in latest if one != key), key][-4:]
        elif what == "u":
            assert kept.use(key) == (-key or None if key in latest else None) or key == 0
            if key in latest:
                latest = [*(one for one in latest if one != key), key]
        else:
            assert kept.pop(key, None) == (-key if key in latest else None)
            latest = [one for one in latest if one != key]
        assert list(kept) == latest
        assert isinstance(kept, OrderedDict)


@given(st.lists(st.tuples(st.sampled_from("sud"), st.integers(0, 12)), max_size=60))
def test_a_sized_map_holds_the_latest_that_fit(steps: list[tuple[str, int]]) -> None:
    kept: SizedMap[int, int] = SizedMap(10, lambda key: key)
    latest: list[int] = []
    for what, key in steps:
        if what == "s":
            kept[key] = -key
            if key <= 10:
                latest = [*(one for one in latest if one != key), key]
            while sum(latest) > 10:
                latest.pop(0)
        elif what == "u":
            kept.use(key)
            if key in latest:
                latest = [*(one for one in latest if one != key), key]
        elif key in kept:
            del kept[key]
            latest.remove(key)
        assert (list(kept), kept.size) == (latest, sum(latest))


def test_an_entry_larger_than_the_whole_map_drops_no_other() -> None:
    kept: SizedMap[int, str] = SizedMap(10, lambda key: key)
    kept[4], kept[6] = "four", "six"
    kept[11] = "eleven"
    assert (dict(kept), kept.size) == ({4: "four", 6: "six"}, 10)
    kept[10] = "ten"
    assert (dict(kept), kept.size) == ({10: "ten"}, 10)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), max_size=80))
def test_of_a_shared_map_the_owner_of_most_loses_its_oldest(puts: list[tuple[str, int]]) -> None:
    kept: SharedMap[int, str] = SharedMap(6)
    wanted: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for owner, key in puts:
        kept.put(owner, key, f"{owner}{key}")
        for own in wanted.values():
            if key in own:
                own.remove(key)
        wanted[owner].append(key)
        if sum(map(len, wanted.values())) > 6:
            most = max(map(len, wanted.values()))
            [dropped] = [own for own in wanted.values() if not all(each in kept for each in own)]
            assert len(dropped) == most
            del dropped[0]
        assert dict(kept.items()) == {
            key: f"{owner}{key}" for owner, own in wanted.items() for key in own
        }
        assert len(kept) == sum(map(len, wanted.values())) <= 6
        assert all(kept.get(key) == value and key in kept for key, value in kept.items())
    assert kept.get(99) is None
    assert 99 not in kept


def test_a_flood_of_one_owner_drops_none_of_others() -> None:
    kept: SharedMap[int, None] = SharedMap(10)
    for number in range(3):
        kept.put("few", number, None)
    for number in range(100, 200):
        kept.put("flood", number, None)
    assert [key for key, _ in kept.items()] == [0, 1, 2, *range(193, 200)]
