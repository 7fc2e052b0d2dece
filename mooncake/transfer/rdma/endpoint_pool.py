"""Decides which of many connections stay open when their number is limited, by SIEVE eviction.

Pure: holds keys in the order they came, a mark on those used since the hand last passed, and the
hand. Its owner opens and closes what the keys stand for.

SIEVE: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class EndpointPool(Generic[Key]):
    """Holds at most `cap` keys. `touch` takes constant time; all other calls may look at every
    key.
    """

    def __init__(self, cap: int) -> None:
        if cap < 1:
            raise ValueError(f"a pool must hold at least one endpoint, not {cap}")
        self.cap = cap
        self._keys: list[Key] = []
        """Oldest first."""
        self._visited: dict[Key, bool] = {}
        self._hand = 0
        """Index of the key that the hand points at; it may be past the end."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._visited

    @property
    def has_room(self) -> bool:
        """True if one more key may be added."""
        return len(self._keys) < self.cap

    def add(self, key: Key) -> None:
        """Take a new key. Raises ValueError when it is in already or there is no room."""
        if key in self._visited or not self.has_room:
            raise ValueError(f"no room for {key!r}, or it is there already")
        if self._hand == len(self._keys):
            self._hand = 0  # past the end, the hand stands for the oldest key, not for a future one
        self._keys.append(key)
        self._visited[key] = False

    def touch(self, key: Key) -> None:
        """Mark `key` as used: the hand passes it over once."""
        self._visited[key] = True

    def remove(self, key: Key) -> None:
        """Forget `key`. Raises KeyError."""
        del self._visited[key]
        index = self._keys.index(key)
        del self._keys[index]
        self._hand -= index < self._hand

    def victim(self, may_leave: Callable[[Key], bool] = lambda _key: True) -> Key | None:
        """Return the key that should leave next, without removing it; None when none may leave.

        The hand goes from old to new, clears marks as it passes and stops at the first key without
        one that may leave.
        """
        for _ in range(2 * len(self._keys)):
            key = self._keys[self._hand % len(self._keys)]
            self._hand = self._hand % len(self._keys) + 1
            if not may_leave(key):
                continue
            if not self._visited[key]:
                return key
            self._visited[key] = False
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless keys, marks, hand and cap agree."""
        assert len(self._keys) == len(self._visited) <= self.cap
        assert set(self._keys) == self._visited.keys()
        assert 0 <= self._hand <= len(self._keys)
