"""A mapped file as a device's memory: peers read it through windows, into which threads copy it.

NICs get the windows only. They would pin all of a file in memory, and ask nobody before they write
to it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from mooncake.transfer.device import CopyDone, DmaBuf, Ranges
from mooncake.transfer.topology import ANYWHERE

PART_BYTES = 8 * 2**20
"""Threads share the copy of a window by parts of this length."""


class _Copy:
    """The parts of one copy, of which the last to end tells how it went."""

    def __init__(self, done: CopyDone) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._num_left = 1
        self._error: str | None = None

    def begin(self) -> None:
        """Count one more part, whose end is awaited."""
        with self._lock:
            self._num_left += 1

    def end(self, error: str | None = None) -> None:
        """Note that a part has ended."""
        with self._lock:
            self._error = self._error or error
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._done(self._error)


class FileMemory:
    """A `DeviceMemory` that is only read."""

    device = "file"
    address = 0
    location = ANYWHERE

    def __init__(self, content: memoryview, threads: Executor) -> None:
        """`content` is the mapped file. `threads` copy, and are ended by the caller."""
        self._content = np.frombuffer(content, dtype=np.uint8)
        self._threads = threads

    @property
    def num_bytes(self) -> int:
        return len(self._content)

    def pin(self, buffer: memoryview) -> None:
        """Do nothing: threads copy to any memory."""

    def unpin(self, buffer: memoryview) -> None:
        """Do nothing."""

    def copy_out(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        copy, there, at = _Copy(done), np.frombuffer(host, dtype=np.uint8), 0
        for offset, length in ranges:
            for begin in range(0, length, PART_BYTES):
                part = slice(offset + begin, offset + min(length, begin + PART_BYTES))
                copy.begin()
                try:
                    self._threads.submit(self._copy, part, there[at + begin :], copy)
                except RuntimeError:  # the threads were ended
                    copy.end("the file is not lent any more")
            at += length
        copy.end()

    def _copy(self, part: slice, there: npt.NDArray[np.uint8], copy: _Copy) -> None:
        """Copy a part of the file. Other threads run meanwhile: numpy holds no lock of Python."""
        try:
            np.copyto(there[: part.stop - part.start], self._content[part])
        except Exception as error:  # otherwise the window would be lost
            copy.end(f"the file cannot be copied ({error!r})")
        else:
            copy.end()

    def copy_in(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        del ranges, host
        done("a file is only read")

    def settle(self, done: CopyDone) -> None:
        done(None)

    def flush(self) -> None:
        """Do nothing: no NIC writes here."""

    def reachable_by_nics(self) -> bool:
        return False

    def dmabuf(self) -> DmaBuf | None:
        return None
