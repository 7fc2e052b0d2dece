"""Adapter: one disk of the `Disks` port in a bucket of an object store, which other nodes and other
clusters may share. It decides nothing.

An object is the header page of a block (`block_record`), then the block. Its name holds the
fingerprint of the KV layout, the key it is encrypted with, the block's key, and the tenant. So a
listing tells what a node may read, and nodes that differ in one of these never read each other's
blocks. Header and block are encrypted as on a disk if there are keys. An object that was made
without the key is then not taken for a block.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from mooncake.base import KEY_BYTES, BlockKey, KvLayout
from mooncake.crypto.keys import KeyRing
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.config import MAX_OBJECTS, ObjectStoreConfig
from mooncake.kvstore.storage.block_record import (
    PAGE_BYTES,
    BlockHeader,
    pack_block_header,
    unpack_block_header,
)
from mooncake.kvstore.storage.disk import NO_SLOT, DiskBlock, DiskScanned, FoundBlock, Outcome
from mooncake.kvstore.storage.disk_threads import DiskThreads
from mooncake.kvstore.storage.record_cipher import EXTRA_BYTES, OtherKey, RecordCipher

PIECE = 8192
"""Blocks of a listing that the node takes in at once: some ten milliseconds."""
PLAIN = "plain"
"""The folder of blocks that are not encrypted."""

_log = logging.getLogger(__name__)

Ended = tuple[list[Outcome], list[int]]


class StoreError(Exception):
    """The object store did not answer in time, or refused."""


class ObjectStore(Protocol):
    """What a bucket needs of an object store. Threads share it. Each method raises StoreError."""

    def put(self, name: str, data: bytearray) -> None:
        """Write an object whole, or not at all."""

    def get(self, name: str, out: memoryview) -> int | None:
        """Read an object into `out`. Return its size, or None if there is no such object. Only the
        beginning is read of an object that is larger than `out`.
        """

    def delete(self, name: str) -> None:
        """Delete an object if it is there."""

    def listed(self, prefix: str) -> Iterable[tuple[str, float]]:
        """Yield the names that begin with `prefix`, and when each was written, in seconds."""


class Bucket:
    """One disk, in a bucket. Reads and writes need no slots: an object is found by its name."""

    def __init__(
        self,
        config: ObjectStoreConfig,
        layout: KvLayout,
        store: ObjectStore,
        keys: KeyRing | None = None,
        num_threads: int = 8,
    ) -> None:
        """`keys`: blocks are encrypted with the first, and decrypted with any."""
        self._layout = layout
        self._block_bytes = layout.block_bytes
        self._store = store
        self._cipher = None if keys is None else RecordCipher(keys, layout.fingerprint)
        names = [PLAIN] if keys is None else [key_id.hex() for key_id in keys.ids]
        prefix = config.prefix and f"{config.prefix.rstrip('/')}/"
        self._folders = [f"{prefix}{layout.fingerprint}/{name}/" for name in names]
        """Where blocks may be; the first is where they are written."""
        self._arena = memoryview(b"")
        self._is_well = True
        self._has_more = False
        self.num_slots = min(MAX_OBJECTS, max(1, config.num_bytes // self._block_bytes))
        # A slow store holds a thread for seconds: writes must not take the last one from readers.
        self.threads = DiskThreads(num_threads, "kv-bucket", num_urgent=num_threads // 2)

    def attach(self, arena: memoryview) -> None:
        """Move blocks between this arena and the bucket."""
        self._arena = arena

    def close(self) -> None:
        """Wait for the threads. A listing ends at the next name."""
        self.threads.close()
        self._arena = memoryview(b"")

    # ------------------------------------------------------------------ operations (in threads)

    def scan(self, number: int) -> Iterator[DiskScanned]:
        """List the blocks that this node may read, those written last coming last. Of more than it
        may use, it takes those.
        """
        newest: list[tuple[float, int, FoundBlock]] = []
        failed = False
        try:
            for count, (written_s, one) in enumerate(self._listed()):
                if count < self.num_slots:
                    heapq.heappush(newest, (written_s, count, one))
                else:
                    self._tell_more()
                    heapq.heappushpop(newest, (written_s, count, one))
        except Exception as error:
            self._tell("listed", error)
            failed = True
        newest.sort()
        for first in range(0, max(1, len(newest)), PIECE):
            found = [one for _, _, one in newest[first : first + PIECE]]
            more = first + PIECE < len(newest)
            yield DiskScanned(disk=number, found=found, more=more, failed=failed and not more)

    def _listed(self) -> Iterator[tuple[float, FoundBlock]]:
        """Yield what lies in all folders, and when it was written. A block may come more than
        once.
        """
        for folder in self._folders:
            for name, written_s in self._store.listed(folder):
                if self.threads.is_closed:
                    return
                one = _found(name.removeprefix(folder))
                if one is not None:
                    yield written_s, one

    def write(self, blocks: list[DiskBlock]) -> Ended:
        """Write each block as an object."""
        return self._each(blocks, self._write, Outcome.FAILED)

    def read(self, blocks: list[DiskBlock]) -> Ended:
        """Read each block, and verify it."""
        return self._each(blocks, self._read, Outcome.LATER)

    def erase(self, blocks: list[DiskBlock]) -> Ended:
        """Delete all objects of each block."""
        return self._each(blocks, self._erase, Outcome.FAILED)

    def _each(
        self,
        blocks: list[DiskBlock],
        work: Callable[[DiskBlock], tuple[Outcome, int]],
        refused: Outcome,
    ) -> Ended:
        ended: list[tuple[Outcome, int]] = []
        for block in blocks:
            try:
                ended.append(work(block))
                self._is_well = True
            except Exception as error:  # whatever it is: the object may be whole
                self._tell("used", error)
                ended.append((refused, 0))
        return [outcome for outcome, _ in ended], [checksum for _, checksum in ended]

    def _tell(self, what: str, error: Exception) -> None:
        """Log the first of several failures in a row."""
        if self._is_well:
            _log.warning("the bucket cannot be %s, its blocks count as misses: %s", what, error)
        self._is_well = False

    def _tell_more(self) -> None:
        """Log once that a listing shows a part only."""
        if not self._has_more:
            _log.warning(
                "the bucket holds more than the %d blocks that this node may use: it uses those "
                "written last; have the bucket expire objects sooner, or raise `object-size` "
                "(%d blocks at most)", self.num_slots, MAX_OBJECTS,
            )  # fmt: skip
        self._has_more = True

    # ------------------------------------------------------------------ objects

    def _write(self, block: DiskBlock) -> tuple[Outcome, int]:
        data, size = self._data(block), self._block_bytes
        checksum = block.checksum
        if checksum is None:
            checksum = checksum_of(data, self._layout)
        body = bytearray(PAGE_BYTES + size + (EXTRA_BYTES if self._cipher is not None else 0))
        page, place = memoryview(body)[:PAGE_BYTES], memoryview(body)[PAGE_BYTES:]
        pack_block_header(page, BlockHeader(block.key, checksum, size, 0, block.tenant))
        if self._cipher is None:
            place[:] = data
        else:
            of_block, _ = self._cipher.seal(block.tenant, checksum, data, place)
            self._cipher.seal_header(page, of_block)
        self._store.put(self._folders[0] + _name(block.key, block.tenant), body)
        return Outcome.OK, checksum

    def _read(self, block: DiskBlock) -> tuple[Outcome, int]:
        body = memoryview(bytearray(PAGE_BYTES + self._block_bytes + EXTRA_BYTES))
        for folder in self._folders:
            num_bytes = self._store.get(folder + _name(block.key, block.tenant), body)
            if num_bytes is not None:
                checksum = self._received(block, body[:num_bytes])
                return (Outcome.CORRUPT, 0) if checksum is None else (Outcome.OK, checksum)
        return Outcome.ABSENT, 0

    def _received(self, block: DiskBlock, body: memoryview) -> int | None:
        """Bring a block that was read to its own memory. Return its checksum, or None when it is
        not what was written.
        """
        page, place = body[:PAGE_BYTES], body[PAGE_BYTES : PAGE_BYTES + self._block_bytes]
        if len(place) < self._block_bytes:
            return None
        opener = None
        if self._cipher is None:
            header = unpack_block_header(page)
        else:
            try:
                header, opener = self._cipher.open_header(page) or (None, None)
            except OtherKey:
                return None
        if header is None or (header.key, header.tenant) != (block.key, block.tenant):
            return None
        if block.checksum not in (None, header.checksum) or header.num_bytes != len(place):
            return None
        data = self._data(block)
        if self._cipher is not None:
            # The tag says that these are the bytes the checksum was of: no need to hash them again.
            assert opener is not None, "an encrypted header comes with its opener"
            return header.checksum if self._cipher.open(opener, place, data) else None
        data[:] = place
        return header.checksum if checksum_of(data, self._layout) == header.checksum else None

    def _erase(self, block: DiskBlock) -> tuple[Outcome, int]:
        """Delete the block as every tenant's, because a node may not know whose it is."""
        for folder in self._folders:
            for name, _ in list(self._store.listed(f"{folder}{block.key.hex()}.")):
                self._store.delete(name)
        return Outcome.OK, 0

    def _data(self, block: DiskBlock) -> memoryview:
        return self._arena[block.offset : block.offset + self._block_bytes]


def _name(key: BlockKey, tenant: str) -> str:
    """Return the name of an object in its folder, with the tenant in base64."""
    return f"{key.hex()}.{base64.urlsafe_b64encode(tenant.encode()).decode().rstrip('=')}"


def _found(name: str) -> FoundBlock | None:
    """Return what the name of an object says, or None if it is not a block's."""
    key, dot, tenant = name.partition(".")
    try:
        padded = tenant + "=" * (-len(tenant) % 4)
        whose = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
        found = FoundBlock(bytes.fromhex(key), NO_SLOT, whose, None)
    except (binascii.Error, ValueError):
        return None
    is_block = dot and len(found.key) == KEY_BYTES and name == _name(found.key, whose)
    return found if is_block else None
