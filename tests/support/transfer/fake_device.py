"""A device whose memory the host cannot address, without hardware: copies on demand, failures too.

Copies end at once unless they are held: then each is under way until it is released. They go to and
from pinned memory only, as real ones should.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mooncake.base.errors import TransferError
from mooncake.transfer.device import CopyDone, DmaBuf, Ranges

PAGE = 4096


@dataclass(frozen=True)
class _Work:
    kind: str
    run: Callable[[], None]
    done: CopyDone


class FakeDeviceMemory:
    """See the module; a `DeviceMemory`."""

    def __init__(
        self, num_bytes: int, device: str = "fake:0", location: str = "anywhere", gap: int = 0
    ) -> None:
        """`gap`: bytes before the memory in what its dmabuf stands for."""
        self._device = device
        self._location = location
        self._gap = gap
        self._fd = os.memfd_create("fake-device")
        os.ftruncate(self._fd, gap + num_bytes)
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._held: deque[_Work] | None = None
        self._pinned: list[tuple[int, int]] = []
        self.nics_reach = False
        self.has_dmabuf = False
        self.fails: Callable[[str], str | None] = lambda kind: None
        """Says how a copy ("in", "out") or "flush" fails; None = it does not."""
        self.is_strict = True
        """Whether copies must be with pinned memory."""
        self.log: list[str] = []
        """What was asked of it: "out", "in", "settle", "flush"."""

    @property
    def device(self) -> str:
        return self._device

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def address(self) -> int:
        return 0xD000_0000_0000

    @property
    def location(self) -> str:
        return self._location

    def reachable_by_nics(self) -> bool:
        return self.nics_reach

    def dmabuf(self) -> DmaBuf | None:
        return DmaBuf(os.dup(self._fd), self._gap) if self.has_dmabuf else None

    def pin(self, buffer: memoryview) -> None:
        self._pinned.append(_span(buffer))

    def unpin(self, buffer: memoryview) -> None:
        self._pinned.remove(_span(buffer))

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def settle(self, done: CopyDone) -> None:
        self.log.append("settle")
        done(None)

    def flush(self) -> None:
        self.log.append("flush")
        error = self.fails("flush")
        if error is not None:
            raise TransferError(error)

    def copy_out(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        def run() -> None:
            at = 0
            for offset, length in ranges:
                host[at : at + length] = self._read(offset, length)
                at += length

        self._do("out", ranges, host, run, done)

    def copy_in(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        def run() -> None:
            at = 0
            for offset, length in ranges:
                os.pwrite(self._fd, host[at : at + length], self._gap + offset)
                at += length

        self._do("in", ranges, host, run, done)

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, self._gap + offset)

    def _do(
        self, kind: str, ranges: Ranges, host: memoryview, run: Callable[[], None], done: CopyDone
    ) -> None:
        assert all(at >= 0 and n > 0 and at + n <= self._num_bytes for at, n in ranges)
        begin, length = _span(host)
        assert sum(n for _, n in ranges) <= length
        if self.is_strict:
            assert any(at <= begin and begin + length <= at + n for at, n in self._pinned)
        self.log.append(kind)
        work = _Work(kind, run, done)
        with self._lock:
            if self._held is not None:
                self._held.append(work)
                return
        self._end(work)

    def _end(self, work: _Work) -> None:
        error = self.fails(work.kind)
        if error is None:
            work.run()
        work.done(error)

    # ------------------------------------------------------------ for tests

    def hold(self) -> None:
        """Let copies stay under way from now on."""
        with self._lock:
            self._held = deque() if self._held is None else self._held

    @property
    def num_held(self) -> int:
        with self._lock:
            return len(self._held or ())

    def release_one(self) -> bool:
        """End the oldest copy that is under way; False when there is none."""
        with self._lock:
            work = self._held.popleft() if self._held else None
        if work is not None:
            self._end(work)
        return work is not None

    def release(self) -> None:
        """End all copies, and hold none any more."""
        while self.release_one():
            pass
        with self._lock:
            left, self._held = self._held or deque(), None
        for work in left:
            self._end(work)

    def fill(self, data: bytes, offset: int = 0) -> None:
        """Put bytes there, behind everybody's back."""
        os.pwrite(self._fd, data, self._gap + offset)

    def content(self) -> bytes:
        """Return all bytes there."""
        return self._read(0, self._num_bytes)

    def close(self) -> None:
        os.close(self._fd)


class UnpinnableMemory(FakeDeviceMemory):
    """One whose device takes no host memory."""

    def pin(self, buffer: memoryview) -> None:
        raise TransferError(f"{self.device} pins no {buffer.nbytes} bytes")


def _span(buffer: memoryview) -> tuple[int, int]:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes
