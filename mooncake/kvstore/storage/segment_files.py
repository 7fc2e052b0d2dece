"""Adapter: slots of one size in a few large files of one directory. Knows offsets and files, not
what is in a slot. The threads of one `FileDisks` call it.

The headers of a file lie together before its blocks: with a page between two blocks of 64 KiB,
writing and reading runs was a sixth slower.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mooncake.base import ConfigError, KvLayout
from mooncake.kvstore.storage.block_record import (
    PAGE_BYTES,
    FileHeader,
    aligned,
    pack_file_header,
    unpack_file_header,
)

SEGMENT_BYTES = 1 << 30
"""Approximate size of a file: room is taken from the file system in steps of this."""

Vectored = Callable[[int, list[memoryview], int], int]
"""os.preadv or os.pwritev"""


class SegmentFiles:
    """All segment files of a directory. A file with another layout, or with an unreadable header,
    is deleted: the files are a cache, the directory belongs to this node, and nothing will ever ask
    for those blocks here.
    """

    def __init__(
        self,
        directory: Path,
        layout: KvLayout,
        num_bytes: int,
        *,
        direct: bool,
        encrypted: bool = False,
    ) -> None:
        """`encrypted`: whether slots are encrypted. Files of the other kind cannot be used."""
        self.directory = directory
        self._padded_bytes = aligned(layout.block_bytes)
        self.slot_bytes = PAGE_BYTES + self._padded_bytes
        """Bytes that a slot takes on the disk."""
        per_file = max(1, (min(SEGMENT_BYTES, num_bytes) - PAGE_BYTES) // self.slot_bytes)
        self._header = FileHeader(layout.fingerprint, layout.block_bytes, per_file, encrypted)
        self._file_bytes = PAGE_BYTES + per_file * self.slot_bytes
        self.num_slots = num_bytes // self._file_bytes * per_file
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._direct = direct
        self.num_foreign = 0
        """Files that were deleted because they hold something else, or nothing that can be read."""
        self.num_of_other_kind = 0
        """Files among these that are encrypted while ours are plain, or plain while ours are
        encrypted.
        """
        try:
            self._open_existing()
        except OSError as error:
            self.close()
            raise ConfigError(f"kvstore.ssd: {directory}: {error}") from error

    @property
    def is_direct(self) -> bool:
        """True if the file system allows direct I/O (known once a file is open)."""
        return self._direct

    def existing_slots(self) -> Iterator[range]:
        """Yield the slots of each file that exists."""
        for number in sorted(self._fds):
            per_file = self._header.num_slots
            yield range(number * per_file, (number + 1) * per_file)

    def header_offset(self, slot: int) -> int:
        """Return where in its file the header of a slot begins."""
        return PAGE_BYTES * (1 + slot % self._header.num_slots)

    def block_offset(self, slot: int) -> int:
        """Return where in its file the block of a slot begins."""
        per_file = self._header.num_slots
        return PAGE_BYTES * (1 + per_file) + slot % per_file * self._padded_bytes

    def begins_file(self, slot: int) -> bool:
        """Return whether a slot is the first of its file."""
        return slot % self._header.num_slots == 0

    def make_room(self, slot: int) -> None:
        """Create and preallocate the file of a slot, if it does not exist. Raises OSError."""
        number = slot // self._header.num_slots
        with self._lock:
            if number in self._fds:
                return
            path = self._path(number)
            fd = self._open(path, os.O_CREAT)
            try:
                os.posix_fallocate(fd, 0, self._file_bytes)
                self._write_page(fd, pack_file_header(self._header))
            except OSError:
                os.close(fd)
                path.unlink()
                raise
            self._fds[number] = fd

    def headers(self, call: Vectored, slot: int, pages: memoryview) -> None:
        """Read or write headers, beginning with that of a slot. Raises OSError, also when the file
        ends early.
        """
        self._transfer(call, slot, self.header_offset(slot), [pages])

    def blocks(self, call: Vectored, slot: int, vectors: list[memoryview]) -> None:
        """Read or write blocks, beginning with that of a slot, each padded to whole pages. Raises
        OSError, also when the file ends early.
        """
        self._transfer(call, slot, self.block_offset(slot), vectors)

    def flush(self, slots: Iterable[int]) -> None:
        """Have the device keep what was written to these slots, with one flush for each file.
        Raises OSError.
        """
        for number in {slot // self._header.num_slots for slot in slots}:
            os.fdatasync(self._fds[number])

    def _transfer(self, call: Vectored, slot: int, offset: int, vectors: list[memoryview]) -> None:
        wanted = sum(map(len, vectors))
        fd = self._fds.get(slot // self._header.num_slots)
        if fd is None:
            raise OSError(errno.ENOENT, f"no file holds slot {slot}")
        moved = call(fd, vectors, offset)
        while moved < wanted:
            # Cut short by a limit of one call or by trouble; the next call says which.
            rest = _without(vectors, moved)
            more = call(fd, rest, offset + moved)
            if more == 0:
                raise OSError(errno.EIO, f"slot {slot} ends early")
            moved += more

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)

    def _open_existing(self) -> None:
        for path in sorted(self.directory.glob("segment-*.kv")):
            number = path.stem.removeprefix("segment-")
            in_limit = number.isdigit() and int(number) < self.num_slots // self._header.num_slots
            fd = self._open(path)
            header = self._read_header(fd)
            if in_limit and header == self._header:
                self._fds[int(number)] = fd
                continue
            os.close(fd)
            path.unlink()
            self.num_foreign += 1
            if header is not None and header.is_encrypted is not self._header.is_encrypted:
                self.num_of_other_kind += 1

    def _read_header(self, fd: int) -> FileHeader | None:
        if os.fstat(fd).st_size != self._file_bytes:
            return None
        with mmap.mmap(-1, PAGE_BYTES) as page:
            view = memoryview(page)
            try:
                num_bytes = os.preadv(fd, [view], 0)
            except OSError:
                return None
            finally:
                data = bytes(view)
                view.release()
        return unpack_file_header(data) if num_bytes == PAGE_BYTES else None

    def _write_page(self, fd: int, data: bytes) -> None:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            page[:] = data
            view = memoryview(page)
            written = os.pwritev(fd, [view], 0)
            view.release()
        if written != PAGE_BYTES:
            raise OSError(errno.EIO, "a file header was cut short")

    def _open(self, path: Path, flags: int = 0) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False
        return os.open(path, flags, 0o600)

    def _path(self, number: int) -> Path:
        return self.directory / f"segment-{number:05}.kv"


def _without(vectors: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of `vectors` after their first `num_bytes` bytes."""
    rest: list[memoryview] = []
    for vector in vectors:
        skipped = min(num_bytes, len(vector))
        num_bytes -= skipped
        if skipped < len(vector):
            rest.append(vector[skipped:])
    return rest
