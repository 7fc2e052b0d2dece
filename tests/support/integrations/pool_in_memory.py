"""A pool in memory of this process, as the mover of vLLM's connector sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake.base import BlockKey
from tests.support.waiting import LONG_S


@dataclass(frozen=True)
class Memory:
    view: memoryview
    block_bytes: int

    def at(self, offsets: Sequence[int]) -> list[memoryview]:
        return [self.view[offset : offset + self.block_bytes] for offset in offsets]


class Pool:
    """A link and a session in one."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.blocks: dict[BlockKey, bytes] = {}
        self.error: Exception | None = None
        self.goes_on = threading.Event()
        """Calls wait for it."""
        self.goes_on.set()
        self.is_closed = False
        self.biggest = 0
        """Blocks of the largest get."""
        self.puts: list[list[BlockKey]] = []
        """The keys of each put."""

    def call(self, work: Callable[[Any], Any]) -> Any:
        assert self.goes_on.wait(LONG_S)
        if self.error is not None:
            raise self.error
        return work(self)

    def register(self, view: memoryview) -> Memory:
        return Memory(view, self.block_bytes)

    def get_into(self, keys: Sequence[BlockKey], places: list[memoryview]) -> int:
        self.biggest = max(self.biggest, len(keys))
        for count, (key, place) in enumerate(zip(keys, places, strict=True)):
            if key not in self.blocks:
                return count
            place[:] = self.blocks[key]
        return len(keys)

    def put_from(
        self, keys: Sequence[BlockKey], places: list[memoryview], _tenant: str
    ) -> list[BlockKey]:
        self.puts.append(list(keys))
        self.blocks |= {key: bytes(place) for key, place in zip(keys, places, strict=True)}
        return list(keys)

    def close(self) -> None:
        self.is_closed = True


def chain(numbers: Sequence[int]) -> list[BlockKey]:
    return [number.to_bytes(16, "big") for number in numbers]
