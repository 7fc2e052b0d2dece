"""Memory of a device, as the transfer engine sees it: a port that the device's owner implements.

The host cannot address such memory. Bytes come and go by copies the device does on its own account
and tells the end of; where hardware lets a NIC reach it (GPUDirect), it goes without any copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake.base.errors import TransferError

HOST = "host"
"""The device of a region of host memory."""

Ranges = Sequence[tuple[int, int]]
"""(offset, number of bytes) in a device's memory, none empty; packed in a row elsewhere."""
CopyDone = Callable[[str | None], None]
"""Told once how a copy ended, from any thread: None, or why it failed. Either way nothing of it
touches memory any more."""


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """A descriptor through which the kernel shows device memory to a NIC. Its owner closes it."""

    fd: int
    offset: int
    """Where the memory begins in what the descriptor stands for."""


class DeviceMemory(Protocol):
    """Part of a device's memory. A copy is in hand until its `done`, which may come at once; what
    goes wrong is told there, never raised.
    """

    @property
    def device(self) -> str:
        """Its name, e.g. "cuda:0"."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """As the device, and a NIC that reaches it, know it."""

    @property
    def location(self) -> str:
        """Where the device sits, by its name in the topology matrix."""

    def pin(self, buffer: memoryview) -> None:
        """Make host memory fit for copies that run beside everything else. Raises TransferError."""

    def unpin(self, buffer: memoryview) -> None:
        """Undo `pin`; no copy is under way."""

    def copy_out(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        """Begin to gather `ranges` into the start of `host`; may wait where that is not pinned."""

    def copy_in(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        """Begin to scatter the start of `host` to `ranges`; may wait where it is not pinned."""

    def settle(self, done: CopyDone) -> None:
        """Call `done` when no work the device began before now can still write here by itself."""

    def flush(self) -> None:
        """Show what a NIC wrote here to all work the device begins from now on. Raises
        TransferError.
        """

    def reachable_by_nics(self) -> bool:
        """Whether NICs can register `address` itself (a driver of the device's helps them)."""

    def dmabuf(self) -> DmaBuf | None:
        """Return a new descriptor for NICs that need one; None where there is no such thing."""


def read_now(memory: DeviceMemory, ranges: Ranges) -> memoryview:
    """Return a copy of `ranges`, waiting for it: for checking and as reference, not for moving.

    Raises TransferError when the device fails.
    """
    there = memoryview(bytearray(sum(length for _, length in ranges)))
    _wait(lambda done: memory.copy_out(ranges, there, done))
    return there


def write_now(memory: DeviceMemory, ranges: Ranges, data: memoryview) -> None:
    """Write `data` to `ranges`, waiting for it. Raises TransferError when the device fails."""
    _wait(lambda done: memory.copy_in(ranges, data, done))


def _wait(begin: Callable[[CopyDone], None]) -> None:
    ended = threading.Event()
    errors: list[str] = []

    def done(error: str | None) -> None:
        errors.extend([error] if error is not None else [])
        ended.set()

    begin(done)
    ended.wait()
    if errors:
        raise TransferError(errors[0])
