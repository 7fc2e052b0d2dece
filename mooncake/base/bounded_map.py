"""Maps with a bound on their entries, or on the size of these. They drop the oldest, so that
strangers cannot fill memory.

Their users own them. They are not safe for several threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(OrderedDict[K, V]):
    """A map of at most `bound` entries. A new one drops the entry set or used longest ago."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while self._is_over():
            del self[next(iter(self))]

    def _is_over(self) -> bool:
        return len(self) > self.bound

    def use(self, key: K) -> V | None:
        """Return the value of `key`, which becomes the newest entry; None: there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value


class SizedMap(BoundedMap[K, V]):
    """A map whose entries together have a size of at most `bound`, by their keys. Entries are set
    and deleted by `[]` alone; one that is too large by itself is not kept, and drops no other.
    """

    def __init__(self, bound: int, size_of: Callable[[K], int]) -> None:
        super().__init__(bound)
        self._size_of = size_of
        self.size = 0
        """Of all entries."""

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            size = self._size_of(key)
            if size > self.bound:
                return
            self.size += size
        super().__setitem__(key, value)

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        self.size -= self._size_of(key)

    def _is_over(self) -> bool:
        return self.size > self.bound
