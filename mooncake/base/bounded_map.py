"""Maps with a bound on the number or the total size of their entries. They drop the oldest entries,
so that strangers cannot fill memory.

Their users own them. They are not safe for several threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(OrderedDict[K, V]):
    """A map of at most `bound` entries. A new entry drops the one that was set or used longest
    ago.
    """

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
        """Return the value of `key` and make it the newest entry. Returns None when there is
        none.
        """
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value


class SizedMap(BoundedMap[K, V]):
    """A map whose keys together have a size of at most `bound`. Set and delete entries by `[]`
    only. The map does not keep an entry that is larger than `bound`, and drops no other entry for
    it.
    """

    def __init__(self, bound: int, size_of: Callable[[K], int]) -> None:
        super().__init__(bound)
        self._size_of = size_of
        self.size = 0
        """The size of all entries together."""

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
