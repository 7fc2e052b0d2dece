"""The cap on connections and SIEVE's hand, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.transfer.rdma.endpoint import EndpointPool


class PlainSieve:
    """SIEVE as the paper tells it, with lists: oldest first, the hand as a key."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def add(self, key: int) -> None:
        self.keys.append(key)

    def remove(self, key: int) -> None:
        if self.hand == key:
            self.hand = self.after(key)
        self.keys.remove(key)
        self.visited.discard(key)

    def after(self, key: int) -> int | None:
        index = self.keys.index(key) + 1
        return self.keys[index] if index < len(self.keys) else None

    def victim(self, may_leave: set[int]) -> int | None:
        for _ in range(2 * len(self.keys)):
            key = self.keys[0] if self.hand is None else self.hand
            self.hand = self.after(key)
            if key not in may_leave:
                continue
            if key not in self.visited:
                return key
            self.visited.discard(key)
        return None


KEYS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), KEYS),
        st.tuples(st.just("drop"), KEYS),
        st.tuples(st.just("evict"), st.sets(KEYS)),
    ),
    max_size=60,
)


@given(cap=st.integers(1, 8), steps=STEPS)
def test_as_the_paper_tells_it(cap: int, steps: list[tuple[str, object]]) -> None:
    pool: EndpointPool[int] = EndpointPool(cap)
    plain = PlainSieve()
    for verb, what in steps:
        if verb == "evict":
            assert isinstance(what, set)
            allowed = set(what)
            victim = pool.victim(allowed.__contains__)
            assert victim == plain.victim(allowed)
            assert victim is None or victim in pool
        elif verb == "drop" and what in pool:
            assert isinstance(what, int)
            pool.remove(what)
            plain.remove(what)
        elif verb == "use":
            assert isinstance(what, int)
            if what in pool:
                pool.touch(what)
                plain.visited.add(what)
            elif pool.has_room:
                pool.add(what)
                plain.add(what)
        assert len(pool) == len(plain.keys) <= cap
        pool.check_integrity()


def test_one_used_since_is_passed_over_once() -> None:
    pool: EndpointPool[str] = EndpointPool(2)
    pool.add("old")
    pool.add("new")
    pool.touch("old")
    assert pool.victim() == "new"
    assert pool.victim() == "old"


def test_no_room_and_twice_are_errors() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EndpointPool(0)
    pool: EndpointPool[str] = EndpointPool(1)
    pool.add("a")
    for key in ("a", "b"):
        with pytest.raises(ValueError, match="is full, or has"):
            pool.add(key)
    with pytest.raises(KeyError):
        pool.remove("b")
