"""KV pages in a device's own memory, as the transfer engine moves them (`transfer.device`).

Ranges that are whole rows of one length, as slices of blocks are, are first gathered on the device
into one piece, because one long copy costs less than many short ones. The device runs and ends
copies (`PageDevice`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from mooncake.model.copies import Copies, Mark
from mooncake.model.kv_tensors import KvTensors
from mooncake.transfer.device import CopyDone, DmaBuf, Ranges

LEAST_ROW_BYTES = 512
"""Shorter rows are not worth an index, so such ranges are copied one by one."""


class PageDevice(Protocol):
    """The device that holds the pages, and its copy engine beside the model's work."""

    @property
    def name(self) -> str: ...

    @property
    def location(self) -> str:
        """The device's name in the transfer engine's topology."""

    @property
    def copies(self) -> Copies: ...

    def run(self, out: bool, work: Callable[[], None], done: CopyDone) -> None:
        """Begin `work`, which copies to (`out`) or from the host. Call `done` once it has ended."""

    def when(self, mark: Mark, done: CopyDone) -> None:
        """Call `done` when the mark is reached."""

    def pin(self, buffer: memoryview) -> None:
        """See `DeviceMemory.pin`."""

    def unpin(self, buffer: memoryview) -> None:
        """See `DeviceMemory.unpin`."""

    def flush(self) -> None:
        """See `DeviceMemory.flush`."""

    def reachable_by_nics(self) -> bool:
        """See `DeviceMemory.reachable_by_nics`."""

    def dmabuf(self, address: int, num_bytes: int) -> DmaBuf | None:
        """See `DeviceMemory.dmabuf`."""


class PageMemory:
    """A `transfer.device.DeviceMemory`: all pages of one runner."""

    def __init__(self, kv: KvTensors, device: PageDevice) -> None:
        self.kv = kv
        self.last_guess: Callable[[], Mark | None] = lambda: None
        """Returns the end of the last step that was begun on a guess. That step may write to pages
        that now belong to another sequence.
        """
        self._bytes = kv.pages.view(-1).view(torch.uint8)
        self._num_bytes, self._address = self._bytes.numel(), self._bytes.data_ptr()
        self._device = device

    def free(self) -> None:
        """Release the pages. No transfer and no step may use them afterwards."""
        self.last_guess = lambda: None
        del self.kv, self._bytes

    @property
    def device(self) -> str:
        return self._device.name

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def address(self) -> int:
        return self._address

    @property
    def location(self) -> str:
        return self._device.location

    def pin(self, buffer: memoryview) -> None:
        self._device.pin(buffer)

    def unpin(self, buffer: memoryview) -> None:
        self._device.unpin(buffer)

    def flush(self) -> None:
        self._device.flush()

    def reachable_by_nics(self) -> bool:
        return self._device.reachable_by_nics()

    def dmabuf(self) -> DmaBuf | None:
        return self._device.dmabuf(self.address, self.num_bytes)

    def settle(self, done: CopyDone) -> None:
        """Wait for a step that was started speculatively. All other steps end before their pages
        are freed.
        """
        mark = self.last_guess()
        if mark is None:
            done(None)
        else:
            self._device.when(mark, done)

    def copy_out(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        def work() -> None:
            there = torch.frombuffer(host, dtype=torch.uint8)
            length = row_bytes(ranges)
            if length is None:
                at = 0
                for offset, size in ranges:
                    here = self._bytes[offset : offset + size]
                    there[at : at + size].copy_(here, non_blocking=True)
                    at += size
                return
            rows, index = self._rows(length), self._index(ranges, length)
            packed = there[: index.numel() * length].view(-1, length)
            packed.copy_(rows.index_select(0, index).view(torch.uint8), non_blocking=True)

        self._device.run(True, work, done)

    def copy_in(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        def work() -> None:
            here = torch.frombuffer(host, dtype=torch.uint8)
            length = row_bytes(ranges)
            if length is None:
                at = 0
                for offset, size in ranges:
                    there = self._bytes[offset : offset + size]
                    there.copy_(here[at : at + size], non_blocking=True)
                    at += size
                return
            rows, index = self._rows(length), self._index(ranges, length)
            packed = here[: index.numel() * length].to(rows.device, non_blocking=True)
            rows.index_copy_(0, index, packed.view(-1, length).view(rows.dtype))

        self._device.run(False, work, done)

    def _rows(self, length: int) -> torch.Tensor:
        """Return the pages as rows of `length` bytes, without the rest at the end. Rows are int64
        where the length allows, because each thread of a GPU moves one element.
        """
        count = self.num_bytes // length
        rows = self._bytes[: count * length].view(count, length)
        return rows if length % 8 else rows.view(torch.int64)

    def _index(self, ranges: Ranges, length: int) -> torch.Tensor:
        """Return the numbers of the rows of `ranges`, int64, on the device."""
        rows = [
            row
            for offset, size in ranges
            for row in range(offset // length, (offset + size) // length)
        ]
        return self._device.copies.send(torch.tensor(rows))


def row_bytes(ranges: Ranges) -> int | None:
    """Return a row length that divides all ranges. Returns None when it is better to copy them one
    by one.
    """
    if len(ranges) < 2:
        return None
    length = math.gcd(*(number for each in ranges for number in each))
    return length if length >= LEAST_ROW_BYTES else None
