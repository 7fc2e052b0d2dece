"""Moves pages of an engine's host memory to and from the pool, through staging memory.

A page lies in one or several parts of host memory (its keys and its values, or one part a layer).
In the pool it takes as many blocks as hold all its parts, one after the other; the rest of the last
block is zero. A pool that fails is a miss, never an error.

All threads may call it. Looking up, loading and saving have a session of the pool each, so that
none waits for the others.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import TypeVar

from mooncake.base import BlockKey, MooncakeError
from mooncake.base.blocks import KEY_BYTES
from mooncake.integrations.pool_link import PoolLink
from mooncake.integrations.settings import PoolSettings
from mooncake.launch.pool_client.session import PoolSession

T = TypeVar("T")
Parts = Sequence[tuple[int, int]]
"""The parts of a page in the memory of this process: (address, bytes)."""


class PagePool:
    def __init__(self, settings: PoolSettings, fingerprint: bytes, logger: logging.Logger) -> None:
        """`fingerprint`: everything that the bytes of a page depend on, besides its tokens and
        those before them. `logger`: see `PoolLink`.
        """
        self._fingerprint = fingerprint
        self._tenant = settings.tenant
        self._finding = _Guarded(PoolLink(settings, settings.lookup_timeout_s, logger))
        staging = settings.staging_bytes // 2
        self._loading = _Guarded(PoolLink(settings, settings.load_timeout_s, logger, staging))
        self._saving = _Guarded(PoolLink(settings, settings.load_timeout_s, logger, staging))

    def find(self, pages: Sequence[str], page_bytes: int) -> int:
        """Return how many leading pages of a run the pool holds; 0 when it fails."""

        def match(session: PoolSession) -> int:
            count = _num_blocks(page_bytes, session.block_bytes)
            keys = self._keys(pages, count, session.block_bytes)
            return session.match(keys) // count

        return self._finding.call(match) or 0

    def load(self, pages: Sequence[str], places: Sequence[Parts]) -> int:
        """Copy leading pages of a run into host memory, as far as the pool has them. Return how
        many came whole. The others may have been written to in part.
        """
        return self._loading.call(lambda session: self._load(session, pages, places)) or 0

    def save(self, pages: Sequence[str], places: Sequence[Parts]) -> list[bool]:
        """Copy a run of pages to the pool. Return which of them it holds now."""
        saved = self._saving.call(lambda session: self._save(session, pages, places))
        return saved or [False] * len(pages)

    def close(self) -> None:
        for each in (self._finding, self._loading, self._saving):
            each.close()

    # ------------------------------------------------------------------ one call each

    def _load(self, session: PoolSession, pages: Sequence[str], places: Sequence[Parts]) -> int:
        """Read block after block of the run: a read ends with the first block that is missing."""
        size, memory, come = session.block_bytes, session.memory, 0
        blocks = self._blocks(pages, places, size)
        for batch in _batches(blocks, len(memory) // size):
            keys, pieces = [key for key, _ in batch], [each for _, each in batch]
            count = session.get_into(keys, range(0, len(batch) * size, size))
            for number, parts in enumerate(pieces[:count]):
                at = number * size
                for part in parts:
                    part[:] = memory[at : at + len(part)]
                    at += len(part)
            come += count
            if count < len(batch):
                break
        whole, left = 0, come
        for place in places:
            left -= _num_blocks(_num_bytes(place), size)
            if left < 0:
                break
            whole += 1
        return whole

    def _save(
        self, session: PoolSession, pages: Sequence[str], places: Sequence[Parts]
    ) -> list[bool]:
        size, memory = session.block_bytes, session.memory
        held: set[BlockKey] = set()
        for batch in _batches(self._blocks(pages, places, size), len(memory) // size):
            for number, (_, parts) in enumerate(batch):
                at = number * size
                for part in parts:
                    memory[at : at + len(part)] = part
                    at += len(part)
                memory[at : (number + 1) * size] = bytes((number + 1) * size - at)
            keys = [key for key, _ in batch]
            held.update(session.put_from(keys, range(0, len(batch) * size, size), self._tenant))
            left = [key for key in keys if key not in held]
            if left:  # they were stored before, or there was no room
                held.update(
                    key for key, tier in zip(left, session.exists(left), strict=True) if tier
                )
        return [
            held.issuperset(self._keys([page], _num_blocks(_num_bytes(parts), size), size))
            for page, parts in zip(pages, places, strict=True)
        ]

    # ------------------------------------------------------------------ blocks and their keys

    def _blocks(
        self, pages: Sequence[str], places: Sequence[Parts], block_bytes: int
    ) -> Iterator[tuple[BlockKey, list[memoryview]]]:
        """Yield the key of each block of a run, and the memory that it holds."""
        for page, parts in zip(pages, places, strict=True):
            pieces = list(_cut(parts, block_bytes))
            yield from zip(self._keys([page], len(pieces), block_bytes), pieces, strict=True)

    def _keys(self, pages: Sequence[str], count: int, block_bytes: int) -> list[BlockKey]:
        """Return the keys of the blocks of pages that take `count` each."""
        head = self._fingerprint + block_bytes.to_bytes(8, "little")
        return [
            blake2b(
                head + number.to_bytes(4, "little") + page.encode(), digest_size=KEY_BYTES
            ).digest()
            for page in pages
            for number in range(count)
        ]  # fmt: skip


class _Guarded:
    """One session of the pool, for one thread at a time. A pool that fails is a miss."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self._lock = threading.Lock()

    def call(self, work: Callable[[PoolSession], T]) -> T | None:
        """Return what `work` returns; None when the pool fails."""
        try:
            with self._lock:
                return self._link.call(work)
        except MooncakeError:
            return None  # the link has logged it

    def close(self) -> None:
        with self._lock:
            self._link.close()


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Return memory of this process, writable. It must stay there as long as it is used."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def _num_bytes(parts: Parts) -> int:
    return sum(num_bytes for _, num_bytes in parts)


def _num_blocks(page_bytes: int, block_bytes: int) -> int:
    return max(1, -(-page_bytes // block_bytes))


def _cut(parts: Parts, block_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the memory that each block of a page holds."""
    block, room = list[memoryview](), block_bytes
    for address, num_bytes in parts:
        part = memory_at(address, num_bytes)
        while part:
            block.append(part[:room])
            part = part[len(block[-1]) :]
            room -= len(block[-1])
            if not room:
                yield block
                block, room = [], block_bytes
    if block:
        yield block


def _batches(blocks: Iterator[T], size: int) -> Iterator[list[T]]:
    batch: list[T] = []
    for block in blocks:
        batch.append(block)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
