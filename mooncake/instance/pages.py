"""The port to the engine's block pool, and a quarantine for pages that a lost peer may write to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from mooncake.base.blocks import BlockKey


class PagePool(Protocol):
    """What fetches and pushes need of `engine.BlockPool`."""

    def allocate(self, num_pages: int) -> list[int] | None: ...

    def hold(self, pages: Sequence[int]) -> None: ...

    def release(self, pages: Sequence[int]) -> None: ...

    def match(self, keys: Sequence[BlockKey]) -> list[int]: ...

    def publish(self, key: BlockKey, page: int) -> bool: ...


class Quarantine:
    """Holds pages that a lost peer may still be writing to, until `rest_s` is over."""

    def __init__(self, pool: PagePool, rest_s: float) -> None:
        self._pool = pool
        self._rest_s = rest_s
        self._resting: deque[tuple[float, list[int]]] = deque()

    @property
    def num_pages(self) -> int:
        return sum(len(pages) for _, pages in self._resting)

    def add(self, pages: list[int], now: float) -> None:
        """Take over the caller's hold on `pages` and release it later."""
        if pages:
            self._resting.append((now + self._rest_s, pages))

    def tick(self, now: float) -> float | None:
        """Release the pages whose time is over; return when the next ones are due."""
        while self._resting and self._resting[0][0] <= now:
            self._pool.release(self._resting.popleft()[1])
        return self._resting[0][0] if self._resting else None
