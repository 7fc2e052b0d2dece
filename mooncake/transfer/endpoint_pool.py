"""Which of many connections stay open when there may only be so many: a cap and SIEVE eviction.

Pure: holds keys in the order they came, a mark on those used since the hand last passed, and the
hand. Its owner opens and closes what the keys stand for.

SIEVE: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class _Entry(Generic[Key]):
    __slots__ = ("key", "newer", "older", "visited")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.visited = False
        self.newer: _Entry[Key] | None = None
        self.older: _Entry[Key] | None = None


class EndpointPool(Generic[Key]):
    """At most `cap` keys. All operations but `victim` take constant time."""

    def __init__(self, cap: int) -> None:
        if cap < 1:
            raise ValueError(f"a pool must hold at least one endpoint, not {cap}")
        self.cap = cap
        self._entries: dict[Key, _Entry[Key]] = {}
        self._newest: _Entry[Key] | None = None
        self._oldest: _Entry[Key] | None = None
        self._hand: _Entry[Key] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def has_room(self) -> bool:
        return len(self._entries) < self.cap

    def add(self, key: Key) -> None:
        """Take a new key. Raises ValueError when it is in already or there is no room."""
        if key in self._entries or not self.has_room:
            raise ValueError(f"no room for {key!r}, or it is there already")
        entry = self._entries[key] = _Entry(key)
        entry.older = self._newest
        if self._newest is not None:
            self._newest.newer = entry
        self._newest = entry
        if self._oldest is None:
            self._oldest = entry

    def touch(self, key: Key) -> None:
        """Mark `key` as used: the hand passes it over once."""
        self._entries[key].visited = True

    def remove(self, key: Key) -> None:
        """Forget `key`. Raises KeyError."""
        entry = self._entries.pop(key)
        if self._hand is entry:
            self._hand = entry.newer
        if entry.newer is None:
            self._newest = entry.older
        else:
            entry.newer.older = entry.older
        if entry.older is None:
            self._oldest = entry.newer
        else:
            entry.older.newer = entry.newer

    def victim(self, may_leave: Callable[[Key], bool] = lambda _key: True) -> Key | None:
        """Return who should go next, still in the pool; None when nobody may leave.

        The hand goes from old to new, clears marks as it passes and stops at the first key without
        one that may leave.
        """
        for _ in range(2 * len(self._entries)):
            entry = self._hand or self._oldest
            assert entry is not None
            self._hand = entry.newer
            if not may_leave(entry.key):
                continue
            if not entry.visited:
                return entry.key
            entry.visited = False
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless list, table and cap agree."""
        keys = []
        entry, newer = self._newest, None
        while entry is not None:
            assert entry.newer is newer
            assert self._entries.get(entry.key) is entry
            keys.append(entry.key)
            entry, newer = entry.older, entry
        assert self._oldest is newer
        assert len(keys) == len(self._entries) <= self.cap
        assert self._hand is None or self._entries.get(self._hand.key) is self._hand
