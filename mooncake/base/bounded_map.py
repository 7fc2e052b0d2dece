"""Maps with a bound on the number or the total size of their entries. They drop the oldest entries,
so that strangers cannot fill memory.

Their users own them. They are not safe for several threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

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


class SharedMap(Generic[K, V]):
    """A map of at most `bound` entries that several owners share. One entry too many drops, of the
    owner that has most, the entry that was set longest ago. So an owner that sets many drops its
    own, and none of an owner that has fewer.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._owner: dict[K, str] = {}
        self._of: dict[str, OrderedDict[K, V]] = {}
        """The entries of each owner, the oldest first. A dict would look for its oldest entry among
        all that it has dropped.
        """

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, key: K) -> bool:
        return key in self._owner

    def get(self, key: K) -> V | None:
        """Return the value of `key`; None when there is none."""
        owner = self._owner.get(key)
        return None if owner is None else self._of[owner][key]

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield all entries: owner by owner, the oldest first."""
        for entries in self._of.values():
            yield from entries.items()

    def put(self, owner: str, key: K, value: V) -> None:
        """Set an entry, which is its newest, for an owner; it is no other owner's any more."""
        self._take(key)
        self._owner[key] = owner
        self._of.setdefault(owner, OrderedDict())[key] = value
        if len(self._owner) > self._bound:
            most = max(self._of.values(), key=len)
            self._take(next(iter(most)))

    def _take(self, key: K) -> None:
        owner = self._owner.pop(key, None)
        if owner is not None:
            entries = self._of[owner]
            del entries[key]
            if not entries:
                del self._of[owner]
