"""A map with a bound on its entries. It drops the oldest, so that strangers cannot fill memory.

Its user owns it. It is not safe for several threads.
"""

from __future__ import annotations

from collections import OrderedDict
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
        if len(self) > self.bound:
            self.popitem(last=False)

    def use(self, key: K) -> V | None:
        """Return the value of `key`, which becomes the newest entry; None: there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value
