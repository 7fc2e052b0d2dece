"""The port to the engine's block pool."""

from __future__ import annotations

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
