"""Numbered slots, given to askers in turn, so that none starves; and the pinned host memory that
slots are of. The first slots serve our own copies; the others are lent as windows.

A slot is free, held or resting (its former holder may still be writing to it). The memory is one
registered region, made with the first device region, so every protocol serves it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.regions import HostRegion, RegionTable

Granted = Callable[[int], None]
"""Called with the slot that the asker holds from now on."""


class FairSlots:
    """Askers take turns, however much each asks for."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._held: set[int] = set()
        self._resting: set[int] = set()
        self._asks: OrderedDict[Hashable, deque[Granted]] = OrderedDict()
        self._serving = False

    @property
    def num_free(self) -> int:
        """Number of slots that nobody holds and that do not rest."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots that askers hold."""
        return len(self._held)

    @property
    def num_resting(self) -> int:
        """Number of slots that are out of use for a while."""
        return len(self._resting)

    @property
    def num_asks(self) -> int:
        """Number of asks without an answer."""
        return sum(len(asks) for asks in self._asks.values())

    def ask(self, asker: Hashable, granted: Granted) -> None:
        """Have `granted` called with a slot, at once or when it is the turn of `asker`."""
        self._asks.setdefault(asker, deque()).append(granted)
        self._serve()

    def forget(self, asker: Hashable) -> None:
        """Drop the open asks of `asker`."""
        self._asks.pop(asker, None)

    def release(self, slot: int) -> None:
        """Give back a held slot."""
        self._held.remove(slot)
        self._free.append(slot)
        self._serve()

    def rest(self, slot: int) -> None:
        """Take a slot that was held out of use until `wake`."""
        self._held.remove(slot)
        self._resting.add(slot)

    def wake(self, slot: int) -> None:
        """Put a resting slot back into use."""
        self._resting.remove(slot)
        self._free.append(slot)
        self._serve()

    def _serve(self) -> None:
        if self._serving:  # a callback gave a slot back: the loop below goes on
            return
        self._serving = True
        try:
            while self._free and self._asks:
                asker, asks = self._asks.popitem(last=False)
                granted = asks.popleft()
                if asks:
                    self._asks[asker] = asks
                slot = self._free.popleft()
                self._held.add(slot)
                granted(slot)
        finally:
            self._serving = False

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot is exactly one of free, held and resting."""
        places = sorted([*self._free, *self._held, *self._resting])
        assert places == list(range(self.num_slots)), f"slots {places} of {self.num_slots}"
        assert not (self._free and self._asks), "a slot is free although one is asked for"


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
    compares: bool = True
    """Whether what passes through windows is compared, if connections carry MACs. False: readers
    compare it with sums of their own.
    """
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
