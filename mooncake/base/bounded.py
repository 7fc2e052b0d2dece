"""A queue with a stated bound and a stated answer when full."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BoundedQueue(Generic[Item]):
    """First in, first out, at most `bound` items; `offer` says no instead of growing."""

    def __init__(self, bound: int) -> None:
        if bound < 1:
            raise ValueError(f"a queue needs room for at least one item, not {bound}")
        self._bound = bound
        self._items: deque[Item] = deque()

    @property
    def bound(self) -> int:
        return self._bound

    def offer(self, item: Item) -> bool:
        """Append `item` and return True, or return False when the queue is full."""
        if len(self._items) >= self._bound:
            return False
        self._items.append(item)
        return True

    def peek(self) -> Item | None:
        """Return the oldest item without taking it."""
        return self._items[0] if self._items else None

    def pop(self) -> Item | None:
        """Take the oldest item, or None when empty."""
        return self._items.popleft() if self._items else None

    def remove(self, item: Item) -> bool:
        """Take `item` out wherever it stands; say whether it was there."""
        try:
            self._items.remove(item)
        except ValueError:
            return False
        return True

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)
