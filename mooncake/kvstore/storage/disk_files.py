"""Adapter: the `Disks` port over files, with threads. It decides nothing: the node says which block
goes where; this module moves and verifies the bytes.

A directory holds segment files of many slots, preallocated as they are first needed and written
with direct I/O where the file system allows. A directory is locked by its process. The threads that
move blocks also encrypt the slots if there are keys (`record_cipher`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mooncake.base import ConfigError, KvLayout, format_bytes
from mooncake.base.mailbox import Mailbox
from mooncake.crypto.keys import KeyRing
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.config import SsdConfig
from mooncake.kvstore.storage.block_record import (
    BLANK_PAGE,
    PAGE_BYTES,
    BlockHeader,
    aligned,
    num_counted,
    pack_block_header,
    unpack_block_header,
)
from mooncake.kvstore.storage.bucket import Bucket
from mooncake.kvstore.storage.disk import DiskBlock, DiskDone, DiskScanned, FoundBlock, Outcome
from mooncake.kvstore.storage.disk_threads import DiskThreads
from mooncake.kvstore.storage.record_cipher import (
    EXTRA_BYTES,
    Opener,
    Openers,
    OtherKey,
    RecordCipher,
)
from mooncake.kvstore.storage.segment_files import SegmentFiles
from mooncake.transfer.engine import Region

MAX_RUN_BLOCKS = 512
"""Blocks moved by one call, which takes no more than 1,024 pieces of memory."""
MAX_RUN_BYTES = 16 << 20
SHARED_BYTES = 512 << 10
"""Smaller blocks are encrypted by one thread at a time. Several threads would mostly wait for
Python's own lock, which each block releases and takes again.
"""
SCAN_PAGES = 256
"""Headers read by one call at the start."""

_log = logging.getLogger(__name__)

Ended = tuple[list[Outcome], list[int]]
NOTHING = (None, None)


class FileDisks:
    """Reads and writes the disks of one node, with a few threads each. See `Disks`, and
    `Polled` for events.
    """

    def __init__(
        self,
        configs: Sequence[SsdConfig],
        layout: KvLayout,
        *,
        num_threads: int = 4,
        direct: bool = True,
        keys: KeyRing | None = None,
        bucket: Bucket | None = None,
    ) -> None:
        """Lock and open the directories. Raises ConfigError when one cannot be used.

        bucket: the last disk.

        keys: blocks are encrypted with the first, and decrypted with any; None: they are not
        encrypted.
        """
        cipher = None if keys is None else RecordCipher(keys, layout.fingerprint)
        self._layout = layout
        self._events: Mailbox[DiskDone | DiskScanned] = Mailbox()
        self._last_op = 0
        self._disks: list[_FileDisk | Bucket] = []
        self._hasher = DiskThreads(1, "kv-hash")
        self._arena: memoryview = memoryview(b"")
        try:
            for number, config in enumerate(configs):
                threads = DiskThreads(num_threads, f"kv-disk{number}")
                self._disks.append(_FileDisk(config, layout, threads, cipher, direct=direct))
        except BaseException:
            self.close()
            raise
        if bucket is not None:
            self._disks.append(bucket)

    @property
    def num_slots(self) -> Sequence[int]:
        return [disk.num_slots for disk in self._disks]

    @property
    def can_hash(self) -> bool:
        return True

    @property
    def is_direct(self) -> bool:
        """True if all directories that were written to allow direct I/O."""
        files = [disk.files for disk in self._disks if isinstance(disk, _FileDisk)]
        return all(each.is_direct for each in files)

    def attach(self, arena: Region) -> None:
        """Start to scan every disk."""
        self._arena = arena.buffer
        for number, disk in enumerate(self._disks):
            disk.attach(arena.buffer)
            self.scan(number)

    def scan(self, disk: int) -> None:
        owner = self._disks[disk]

        def scanned() -> None:
            for event in owner.scan(disk):
                self._events.put(event)

        owner.threads.put(scanned)

    def write(self, disk: int, blocks: list[DiskBlock]) -> int:
        owner = self._disks[disk]
        return self._start(owner.threads, blocks, owner.write, urgent=False)

    def read(self, disk: int, blocks: list[DiskBlock]) -> int:
        """Read blocks as the port says. Reads run before writes, because readers wait for them."""
        owner = self._disks[disk]
        return self._start(owner.threads, blocks, owner.read, urgent=True)

    def erase(self, disk: int, blocks: list[DiskBlock]) -> int:
        owner = self._disks[disk]
        return self._start(owner.threads, blocks, owner.erase, urgent=False)

    def checksum(self, offsets: list[int]) -> int:
        size = self._layout.block_bytes
        blocks = [DiskBlock(b"", 0, offset) for offset in offsets]

        def hashed(blocks: list[DiskBlock]) -> Ended:
            data = (self._arena[block.offset : block.offset + size] for block in blocks)
            digests = [checksum_of(each, self._layout) for each in data]
            return [Outcome.OK] * len(blocks), digests

        return self._start(self._hasher, blocks, hashed, urgent=False)

    def fileno(self) -> int:
        """A descriptor that becomes readable when an operation ended."""
        return self._events.fileno()

    def poll(self) -> Sequence[DiskDone | DiskScanned]:
        """Return what ended since the last call, without waiting."""
        return self._events.receive()

    def close(self) -> None:
        """End what runs, drop what waits, and unlock the directories. The node must not be driven
        any more. A second call does nothing.
        """
        for disk in self._disks:
            disk.close()
        self._disks = []
        self._hasher.close()
        self._arena = memoryview(b"")
        self._events.close()

    def _start(
        self,
        threads: DiskThreads,
        blocks: list[DiskBlock],
        work: Callable[[list[DiskBlock]], Ended],
        *,
        urgent: bool,
    ) -> int:
        self._last_op += 1
        op_id = self._last_op

        def job() -> None:
            began_s = time.perf_counter()
            try:
                outcomes, checksums = work(blocks)
            except Exception:
                _log.exception("an operation on %d blocks failed", len(blocks))
                outcomes, checksums = [Outcome.FAILED] * len(blocks), [0] * len(blocks)
            seconds = time.perf_counter() - began_s
            done = DiskDone(op_id=op_id, outcomes=outcomes, checksums=checksums, seconds=seconds)
            self._events.put(done)

        threads.put(job, urgent=urgent)
        return op_id


class _FileDisk:
    """One directory: it moves blocks to and from its segment files."""

    def __init__(
        self,
        config: SsdConfig,
        layout: KvLayout,
        threads: DiskThreads,
        cipher: RecordCipher | None,
        *,
        direct: bool,
    ) -> None:
        self.threads = threads
        self._cipher = cipher
        self._openers = Openers(0)
        one_by_one = cipher is not None and layout.block_bytes < SHARED_BYTES
        self._filling = threading.Lock() if one_by_one else contextlib.nullcontext()
        self._layout = layout
        self._block_bytes = layout.block_bytes
        self._padded_bytes = aligned(layout.block_bytes)
        self._place_bytes = (
            self._padded_bytes if cipher is None else self._padded_bytes + PAGE_BYTES
        )
        """Bytes of a thread's own memory that a block takes: encrypting it needs EXTRA_BYTES behind
        it.
        """
        self._run_blocks = max(1, min(MAX_RUN_BLOCKS, MAX_RUN_BYTES // layout.block_bytes))
        self._lock_fd = _lock_directory(Path(config.directory))
        self._sequence_lock = threading.Lock()
        self._sequence_no = 0
        self._arena: memoryview = memoryview(b"")
        self._straight = False
        self._local = threading.local()
        try:
            self.files = SegmentFiles(
                Path(config.directory),
                layout,
                config.num_bytes,
                direct=direct,
                encrypted=cipher is not None,
            )
        except BaseException:
            os.close(self._lock_fd)
            raise
        if cipher is not None:
            self._openers = Openers(self.files.num_slots)
        if self.files.num_slots < 1:
            self.close()
            raise ConfigError(
                f"kvstore.ssd: {format_bytes(config.num_bytes)} in {config.directory} is less "
                "than one block of this model with its header "
                f"({format_bytes(self.files.slot_bytes)}); give more"
            )

    @property
    def num_slots(self) -> int:
        return self.files.num_slots

    def attach(self, arena: memoryview) -> None:
        """Move blocks directly between this arena and the files if both are page-aligned. Encrypted
        blocks are read directly too, and decrypted in place.
        """
        self._arena = arena
        address = np.frombuffer(arena, np.uint8).__array_interface__["data"][0]
        self._straight = address % PAGE_BYTES == 0 and self._block_bytes % PAGE_BYTES == 0

    def close(self) -> None:
        """Wait for the threads, close the files, and unlock the directory."""
        self.threads.close()
        self.files.close()
        self._arena = memoryview(b"")
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # ------------------------------------------------------------------ operations (in threads)

    def scan(self, number: int) -> Iterator[DiskScanned]:
        """Read the header of every slot of every file. There is one event."""
        seen: list[tuple[int, int, BlockHeader]] = []
        num_dropped, num_closed = self.files.num_foreign, 0
        for slot, page in self._existing_headers():
            try:
                header, opener = self._unpack(page) if page is not None else NOTHING
            except OtherKey:
                num_dropped, num_closed = num_dropped + 1, num_closed + 1
                continue
            if header is None or header.num_bytes != self._block_bytes:
                num_dropped += page is None or bytes(page) != BLANK_PAGE
                continue
            seen.append((header.sequence_no, slot, header))
            if opener is not None:
                self._openers.put(slot, opener)
        seen.sort(key=lambda one: one[:2])
        counted = num_counted([number for number, _, _ in seen])
        newest = {header.key: slot for _, slot, header in seen[:counted]}
        order = [one for one in seen[:counted] if newest[one[2].key] == one[1]]
        kept = {slot for _, slot, _ in order}
        # Otherwise an old copy is found when the newest is gone, or later numbers never end.
        self.erase([DiskBlock(h.key, slot, 0) for _, slot, h in seen if slot not in kept])
        num_dropped += len(seen) - len(order)
        self._sequence_no = order[-1][0] if order else 0
        found = [FoundBlock(h.key, slot, h.tenant, h.checksum) for _, slot, h in order]
        self._tell_unusable(num_closed)
        yield DiskScanned(disk=number, found=found, num_dropped=num_dropped)

    def _tell_unusable(self, num_closed: int) -> None:
        """Log what an operator may not have intended. It only costs computing blocks again."""
        if num_closed:
            _log.warning(
                "%s: %d blocks are encrypted with a key that is not here: they are not used, and "
                "overwritten in time", self.files.directory, num_closed,
            )  # fmt: skip
        if self.files.num_of_other_kind:
            kind = "encrypted" if self._cipher is None else "not encrypted"
            _log.warning(
                "%s: files deleted because they were %s: %d",
                self.files.directory, kind, self.files.num_of_other_kind,
            )  # fmt: skip

    def _existing_headers(self) -> Iterator[tuple[int, memoryview | None]]:
        """Yield each slot of every file, and its header, which is None if it cannot be read."""
        for slots in self.files.existing_slots():
            for first in slots[::SCAN_PAGES]:
                run = range(first, min(first + SCAN_PAGES, slots.stop))
                pages = self._headers(len(run))
                try:
                    self.files.headers(os.preadv, first, pages)
                    unread = range(0)
                except OSError:  # read them one by one
                    unread, run = run, range(0)
                for index, slot in enumerate(run):
                    yield slot, pages[PAGE_BYTES * index : PAGE_BYTES * (index + 1)]
                for slot in unread:
                    try:
                        self.files.headers(os.preadv, slot, pages[:PAGE_BYTES])
                        yield slot, pages[:PAGE_BYTES]
                    except OSError:
                        yield slot, None

    def write(self, blocks: list[DiskBlock]) -> Ended:
        """Write each run of neighbouring slots with one call."""
        return self._by_runs(blocks, self._write_run)

    def read(self, blocks: list[DiskBlock]) -> Ended:
        """Read each run of neighbouring slots with one call, and verify every block."""
        return self._by_runs(blocks, self._read_run)

    def erase(self, blocks: list[DiskBlock]) -> Ended:
        """Overwrite the headers and flush the device once, so that no loss of power undoes it.

        If the flush fails, no slot counts as erased.
        """
        page = self._headers(1)
        page[:] = bytes(PAGE_BYTES)

        def blank(run: list[DiskBlock]) -> list[int | None]:
            if self._cipher is not None:
                self._openers.forget(run[0].slot)
            self.files.headers(os.pwritev, run[0].slot, page)
            return [0]

        def flush(run: list[DiskBlock]) -> list[int | None]:
            self.files.flush(block.slot for block in run)
            return [0]

        outcomes = [self._guarded(blank, [block])[0] for block in blocks]
        blanked = [
            block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Outcome.OK
        ]
        flushed, _ = self._guarded(flush, blanked)
        if flushed is not Outcome.OK:
            outcomes = [flushed] * len(blocks)
        return outcomes, [0] * len(blocks)

    # ------------------------------------------------------------------ bytes

    def _by_runs(
        self, blocks: list[DiskBlock], work: Callable[[list[DiskBlock]], list[int | None]]
    ) -> Ended:
        """Call `work` on runs of blocks whose slots are neighbours in one file, whatever their
        order here. It returns a checksum for each block, None for one that has wrong contents.
        """
        order = sorted(range(len(blocks)), key=lambda index: blocks[index].slot)
        outcomes, checksums = [Outcome.FAILED] * len(blocks), [0] * len(blocks)
        first, limit = 0, self._run_blocks
        for stop in range(1, len(order) + 1):
            if stop < len(order) and stop - first < limit:
                slot = blocks[order[stop]].slot
                if slot == blocks[order[stop - 1]].slot + 1 and not self.files.begins_file(slot):
                    continue
            run, first = order[first:stop], stop
            outcome, found = self._guarded(work, [blocks[index] for index in run])
            for index, checksum in zip(run, found, strict=True):
                outcomes[index] = Outcome.CORRUPT if checksum is None else outcome
                checksums[index] = checksum or 0
        return outcomes, checksums

    def _write_run(self, blocks: list[DiskBlock]) -> list[int | None]:
        """Write the blocks, then their headers. No scan finds a block that has no header."""
        first, last = blocks[0].slot, self._next_sequence_no(len(blocks))
        headers, checksums = self._headers(len(blocks)), []
        for index, block in enumerate(blocks):
            checksum = block.checksum
            if checksum is None:
                checksum = checksum_of(self._data(block), self._layout)
            checksums.append(checksum)
            number = last - len(blocks) + 1 + index
            header = BlockHeader(block.key, checksum, self._block_bytes, number, block.tenant)
            pack_block_header(headers[PAGE_BYTES * index : PAGE_BYTES * (index + 1)], header)
        places = self._places(blocks, straight=self._straight and self._cipher is None)
        with self._filling:
            openers = self._fill(blocks, places, checksums, headers)
        self.files.make_room(first)
        self.files.blocks(os.pwritev, first, [place[: self._padded_bytes] for place in places])
        self.files.headers(os.pwritev, first, headers)
        for block, opener in zip(blocks, openers, strict=False):
            self._openers.put(block.slot, opener)
        return list(checksums)

    def _fill(
        self,
        blocks: list[DiskBlock],
        places: list[memoryview],
        checksums: list[int],
        headers: memoryview,
    ) -> list[Opener]:
        """Bring blocks to the memory that they are written from. With a cipher, encrypt them and
        their headers on the way, and return their openers.
        """
        openers: list[Opener] = []
        for index, (block, place) in enumerate(zip(blocks, places, strict=True)):
            if self._cipher is not None:
                self._openers.forget(block.slot)
                out = place[: self._block_bytes + EXTRA_BYTES]
                of_block, opener = self._cipher.seal(
                    block.tenant, checksums[index], self._data(block), out
                )
                page = headers[PAGE_BYTES * index : PAGE_BYTES * (index + 1)]
                self._cipher.seal_header(page, of_block)
                openers.append(opener)
            elif not self._straight:
                place[: self._block_bytes] = self._data(block)
        return openers

    def _read_run(self, blocks: list[DiskBlock]) -> list[int | None]:
        """Read a run of neighbours. Their headers are read too if something in them is not
        known.
        """
        first, headers = blocks[0].slot, self._headers(len(blocks))
        openers = [self._opener(block) for block in blocks]
        is_known = [opener is not None or self._cipher is None for opener in openers]
        if not all(is_known) or any(block.checksum is None for block in blocks):
            self.files.headers(os.preadv, first, headers)
        places = self._places(blocks, straight=self._straight)
        self.files.blocks(os.preadv, first, [place[: self._padded_bytes] for place in places])
        return [
            self._received(
                block, place, headers[PAGE_BYTES * index : PAGE_BYTES * (index + 1)], openers[index]
            )
            for index, (block, place) in enumerate(zip(blocks, places, strict=True))
        ]

    def _opener(self, block: DiskBlock) -> Opener | None:
        """Return the opener of a block if nothing in its header is needed."""
        known = self._cipher is not None and block.checksum is not None
        return self._openers.get(block.slot) if known else None

    def _places(self, blocks: list[DiskBlock], *, straight: bool) -> list[memoryview]:
        """Return the memory that files are read into or written from: the blocks' own, or this
        thread's.
        """
        if straight:
            return [self._data(block) for block in blocks]
        step, bounce = self._place_bytes, self._bounce()
        return [bounce[step * index : step * (index + 1)] for index in range(len(blocks))]

    def _received(
        self, block: DiskBlock, place: memoryview, page: memoryview, opener: Opener | None
    ) -> int | None:
        """Bring a block that was read to its own memory. Return its checksum, or None when it is
        another block.
        """
        checksum, data = block.checksum, self._data(block)
        if checksum is None or (self._cipher is not None and opener is None):
            try:
                header, opener = self._unpack(page)
            except OtherKey:
                return None
            if header is None or (header.key, header.num_bytes) != (block.key, self._block_bytes):
                return None
            if checksum not in (None, header.checksum):
                return None
            checksum = header.checksum
        if self._cipher is None:
            if not self._straight:
                data[:] = place[: self._block_bytes]
            return checksum if checksum_of(data, self._layout) == checksum else None
        # The tag says that these are the bytes the checksum was of: no need to hash them again.
        if opener is None or opener.checksum != checksum:
            return None
        return checksum if self._cipher.open(opener, place[: self._block_bytes], data) else None

    def _unpack(self, page: memoryview) -> tuple[BlockHeader | None, Opener | None]:
        """Return the contents of a header, and the opener of its block if it is encrypted.

        Raises:
            OtherKey: the header was made with a key that is not here.
        """
        if self._cipher is None:
            return unpack_block_header(page), None
        return self._cipher.open_header(page) or NOTHING

    def _data(self, block: DiskBlock) -> memoryview:
        return self._arena[block.offset : block.offset + self._block_bytes]

    def _bounce(self) -> memoryview:
        """Return this thread's aligned memory for a run of blocks that cannot be moved directly."""
        memory: memoryview | None = getattr(self._local, "memory", None)
        if memory is None:
            memory = memoryview(mmap.mmap(-1, self._run_blocks * self._place_bytes))
            self._local.memory = memory
        return memory

    def _headers(self, count: int) -> memoryview:
        """Return this thread's aligned memory for so many headers of a run."""
        memory: memoryview | None = getattr(self._local, "headers", None)
        if memory is None:
            memory = memoryview(mmap.mmap(-1, max(self._run_blocks, SCAN_PAGES) * PAGE_BYTES))
            self._local.headers = memory
        return memory[: count * PAGE_BYTES]

    def _next_sequence_no(self, count: int) -> int:
        """Take so many numbers; return the last of them."""
        with self._sequence_lock:
            self._sequence_no += count
            return self._sequence_no

    def _guarded(
        self, work: Callable[[list[DiskBlock]], list[int | None]], blocks: list[DiskBlock]
    ) -> tuple[Outcome, list[int | None]]:
        nothing: list[int | None] = [0] * len(blocks)
        try:
            return Outcome.OK, work(blocks)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return Outcome.FULL, nothing
            _log.warning("%s: %s", self.files.directory, error)
            return Outcome.FAILED, nothing


def _lock_directory(directory: Path) -> int:
    """Lock a directory for this process; return the descriptor of the lock."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"kvstore.ssd: {directory} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"kvstore.ssd: {directory} is in use by another process; give each pool its own"
        ) from error
    return fd
