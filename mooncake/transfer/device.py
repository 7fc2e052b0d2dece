"""A device's memory as the transfer engine sees it: a port that the device's owner implements.

The host cannot address such memory. The device copies bytes to and from host memory by itself and
reports when a copy ends. No copy is needed where hardware lets a NIC reach the memory (GPUDirect).
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
"""(offset, number of bytes) ranges in a device's memory, none empty. In host memory they lie one
after another.
"""
CopyDone = Callable[[str | None], None]
"""Called once when a copy has ended, from any thread, with None or with why it failed. Either way
nothing touches memory for it any more.
"""


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """A descriptor that gives NICs access to device memory. The caller that got it closes it."""

    fd: int
    offset: int
    """Offset of the memory within what the descriptor stands for, in bytes."""


class DeviceMemory(Protocol):
    """Part of a device's memory. A copy is in hand until `done` is called, which may happen at
    once. Errors are passed to `done` and never raised.
    """

    @property
    def device(self) -> str:
        """The device's name, e.g. "cuda:0"."""

    @property
    def num_bytes(self) -> int:
        """The length of the memory."""

    @property
    def address(self) -> int:
        """The memory's address for the device, and for a NIC that can reach the device."""

    @property
    def location(self) -> str:
        """The device's location, as named in the topology matrix."""

    def pin(self, buffer: memoryview) -> None:
        """Prepare host memory for copies in the background. Raises TransferError."""

    def unpin(self, buffer: memoryview) -> None:
        """Undo `pin`; no copy may be under way."""

    def copy_out(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        """Begin to gather `ranges` into the start of `host`. May wait if `host` is not pinned."""

    def copy_in(self, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        """Begin to scatter the start of `host` to `ranges`. May wait if `host` is not pinned."""

    def settle(self, done: CopyDone) -> None:
        """Call `done` when no work that the device began before now can still write here."""

    def flush(self) -> None:
        """Make what a NIC wrote here visible to all work that the device begins from now on.

        Raises TransferError.
        """

    def reachable_by_nics(self) -> bool:
        """Return whether NICs can register `address` itself, with the help of a driver."""

    def dmabuf(self) -> DmaBuf | None:
        """Return a new descriptor for NICs that need one; None if this memory has none."""


def read_now(memory: DeviceMemory, ranges: Ranges) -> memoryview:
    """Return a copy of `ranges`, waiting for it. Checks and references use it; KV moves in other
    ways. Raises TransferError when the device fails.
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
