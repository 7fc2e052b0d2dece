"""A map that forgets: what is remembered of strangers stays within a bound, the newest of it.

Owned by whoever remembers; not safe for several threads.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(OrderedDict[K, V]):
    """At most `bound` entries, in the order in which they were last set or used: the oldest goes
    first.
    """

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.bound:
            self.popitem(last=False)

    def use(self, key: K) -> V | None:
        """Return what is kept under `key`, as the newest from now on; None: nothing is."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value
