"""Pinned host memory in slots. The first slots serve our own copies; the others are lent as
windows.

One registered region, made with the first device region, so every protocol serves it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.regions import HostRegion, RegionTable


@dataclass(frozen=True, kw_only=True)
class StagingLimits:
    """Bounds of the host memory between devices and the network, and of waiting."""

    slot_bytes: int = 4 * 2**20
    """Bytes of one slice. PCIe is at full speed from 1 MiB on; each slice also costs messages."""
    num_slots: int = 8
    """Slots for batches of our own that touch our device."""
    num_windows: int = 16
    """Slots for peers that read or write our device."""
    num_windows_asked: int = 8
    """Windows of one peer that we hold or wait for."""
    max_windows_asked: int = 64
    """The connection of a client that asks for more windows at a time is closed."""
    num_sessions: int = 4096
    connect_s: float = 5.0
    fence_s: float = 5.0
    """An owner that has not answered this long after a batch was stopped counts as lost."""
    rest_s: float = 10.0
    """How long a window rests whose client was lost, if late bytes cannot be fenced."""


@dataclass(slots=True)
class Arena:
    """The slots of one engine. `open` may be called from any thread, the rest only after it."""

    table: RegionTable
    limits: StagingLimits
    _region: HostRegion | None = None
    _pinned_by: dict[str, DeviceMemory] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def region(self) -> HostRegion:
        """The memory. Available only after a device region was registered."""
        assert self._region is not None
        return self._region

    def open(self, memory: DeviceMemory) -> None:
        """Allocate host memory that `memory`'s device copies from and to. Raises TransferError."""
        limits = self.limits
        with self._lock:
            if self._region is None:
                num_slots = limits.num_slots + limits.num_windows
                self._region = self.table.allocate(num_slots * limits.slot_bytes, "staging")
                self._region.guarded = True
            if memory.device not in self._pinned_by:
                memory.pin(self._region.buffer)
                self._pinned_by[memory.device] = memory

    def offset(self, slot: int, is_window: bool = False) -> int:
        """Return where a slot begins in the region."""
        return (slot + is_window * self.limits.num_slots) * self.limits.slot_bytes

    def view(self, slot: int, num_bytes: int, is_window: bool = False) -> memoryview:
        """Return the start of a slot."""
        at = self.offset(slot, is_window)
        return self.region.buffer[at : at + num_bytes]

    def close(self) -> None:
        """Release the memory's pages. No copy is under way any more."""
        with self._lock:
            for memory in self._pinned_by.values():
                memory.unpin(self.region.buffer)
            self._pinned_by.clear()
