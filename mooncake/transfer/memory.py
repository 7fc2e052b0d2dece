"""Allocates memory that other processes of this host can map: anonymous files.

Callers own what they get, and close the descriptors. The kernel makes a page resident when it is
first written. So a start does not wait until the kernel has cleared gigabytes of unused memory.
Registration with a NIC or a GPU pins all of it; `make_resident` uses several threads to do that
first.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mooncake.base.errors import TransferError
from mooncake.base.memory import format_bytes

PAGE_BYTES = mmap.PAGESIZE
RESIDENT_BYTES = 2**30
"""Bytes of a step in which memory is made resident; less memory is pinned soon enough."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and newer, which the mmap module does not name."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def allocate_shared(num_bytes: int, label: str) -> tuple[mmap.mmap, int]:
    """Return zeroed memory of at least `num_bytes`, page aligned, and its descriptor.

    Huge pages are asked for; the size is sealed, so that no peer can shrink it. Raises
    TransferError when there is not enough memory.
    """
    if num_bytes < 1:
        raise TransferError(f"{label}: cannot allocate {num_bytes} bytes")
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    fd = os.memfd_create(f"mooncake-{label}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # not every kernel has huge pages for such files
            memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        os.close(fd)
        raise TransferError(
            f"{label}: cannot allocate {format_bytes(num_bytes)} of memory ({error.strerror}); "
            "lower the size or free memory on this machine"
        ) from error
    return memory, fd


def make_resident(address: int, num_bytes: int, report: Callable[[int, int], None]) -> None:
    """Have the kernel clear memory in several threads at once; `report` is called with (bytes done,
    bytes in all). If the kernel cannot, or has too little memory, pinning makes the memory resident
    later.
    """
    if num_bytes <= RESIDENT_BYTES:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise

    def clear(begin: int) -> None:
        size = min(RESIDENT_BYTES, num_bytes - begin)
        madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(size), _POPULATE_WRITE)

    begins = range(0, num_bytes, RESIDENT_BYTES)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "make-resident") as threads:
        for number, _ in enumerate(threads.map(clear, begins), 1):
            report(min(number * RESIDENT_BYTES, num_bytes), num_bytes)


class SharedWords:
    """Words of 64 bits, 0 at first, that other processes can read, and also write if allowed."""

    def __init__(self, num_words: int, *, theirs: bool = False) -> None:
        """`theirs`: the process that gets the descriptor may write the words."""
        num_bytes = 8 * num_words
        fd = os.memfd_create("mooncake-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
            mode = os.O_RDWR if theirs else os.O_RDONLY
            self.fd = os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self.words = memoryview(self._memory).cast("Q")

    def given(self) -> None:
        """Close the descriptor; no further process will get it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap the words; a process that has mapped them keeps them."""
        self.given()
        self.words.release()
        self._memory.close()


def map_words(fd: int, num_words: int, *, writable: bool = False) -> memoryview:
    """Return the words behind a peer's descriptor. Raises TransferError as `map_shared` does."""
    _check(fd, 8 * num_words)
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(fd, 8 * num_words, flags=mmap.MAP_SHARED, prot=prot)
    return memoryview(memory).cast("Q")


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Return the memory behind `fd` that another process allocated.

    Raises TransferError when it is shorter than `num_bytes` or could shrink while it is used.
    """
    _check(fd, num_bytes)
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED)


def _check(fd: int, num_bytes: int) -> None:
    """Raise TransferError for a peer's memory that is too short, or that the peer could shorten
    while it is used: the kernel kills a process that touches the missing part.
    """
    if os.fstat(fd).st_size < num_bytes:
        raise TransferError(f"the peer's memory is shorter than the {num_bytes} bytes it promised")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # of a file, which has none
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise TransferError("the peer's memory is not sealed against shrinking")
