"""The bounded queue keeps order, says no when full and never loses an item."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import BoundedQueue


def test_first_in_first_out() -> None:
    queue: BoundedQueue[str] = BoundedQueue(3)
    for item in "abc":
        assert queue.offer(item)
    assert queue.peek() == "a"
    assert list(queue) == ["a", "b", "c"]
    assert [queue.pop() for _ in range(4)] == ["a", "b", "c", None]
    assert queue.peek() is None


def test_a_full_queue_says_no_and_keeps_what_it_has() -> None:
    queue: BoundedQueue[int] = BoundedQueue(2)
    assert [queue.offer(item) for item in (1, 2, 3)] == [True, True, False]
    assert list(queue) == [1, 2]
    assert queue.bound == 2
    queue.pop()
    assert queue.offer(4)


def test_remove_from_the_middle() -> None:
    queue: BoundedQueue[int] = BoundedQueue(3)
    for item in (1, 2, 3):
        queue.offer(item)
    assert queue.remove(2)
    assert not queue.remove(2)
    assert list(queue) == [1, 3]


@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_below_one_is_a_programming_error(bound: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        BoundedQueue(bound)


@given(st.integers(1, 5), st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=60))
def test_behaves_like_a_list_with_a_limit(bound: int, moves: list[int | None]) -> None:
    queue: BoundedQueue[int] = BoundedQueue(bound)
    model: list[int] = []
    for move in moves:
        if move is None:
            assert queue.pop() == (model.pop(0) if model else None)
        else:
            accepted = len(model) < bound
            assert queue.offer(move) is accepted
            model += [move] if accepted else []
        assert len(queue) == len(model) <= bound
        assert list(queue) == model
