"""The memory one process has registered, and the gates that let it be withdrawn safely.

The owner refuses: every access by a peer is checked here, against the range table of the process
whose memory it is. Threads that touch regions do so inside their gate; withdrawing a region marks
it and then passes all gates, so afterwards nobody is still inside.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mooncake.base.errors import TransferError
from mooncake.transfer.engine import Region
from mooncake.transfer.memory import allocate_shared


class RangeRefused(TransferError):
    """A peer (or our own batch) named memory that is not registered."""


class Gates:
    """The locks of all threads of a process that touch registered memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: list[threading.Lock] = []

    def new(self) -> threading.Lock:
        """Return the gate of one thread; it is held only around one bounded copy or syscall."""
        gate = threading.Lock()
        with self._lock:
            self._gates.append(gate)
        return gate

    def forget(self, gate: threading.Lock) -> None:
        """The thread of `gate` has ended."""
        with self._lock:
            self._gates.remove(gate)

    def pass_all(self) -> None:
        """Return when every thread that was inside its gate at the call has left it once."""
        with self._lock:
            gates = list(self._gates)
        for gate in gates:
            with gate:
                pass


class HostRegion:
    """Registered host memory; `alive` turns False for good when it is withdrawn."""

    def __init__(self, region_id: int, label: str, buffer: memoryview, fd: int | None) -> None:
        self._region_id = region_id
        self._buffer = buffer
        self.label = label
        self.fd = fd
        """Descriptor peers may map; None for memory that was not allocated here."""
        self.array: npt.NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
        self.alive = True

    @property
    def region_id(self) -> int:
        return self._region_id

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def check(self, offset: int, num_bytes: int) -> None:
        """Raise RangeRefused unless the range lies inside this live region."""
        if not self.alive:
            raise RangeRefused(f"region {self._region_id} ({self.label}) was unregistered")
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self._buffer.nbytes:
            raise RangeRefused(
                f"bytes [{offset}, {offset + num_bytes}) lie outside region {self._region_id} "
                f"({self.label}) of {self._buffer.nbytes} bytes"
            )


class RegionTable:
    """What one engine has registered. Ids start at 1 and are never used twice; thread-safe."""

    def __init__(self, gates: Gates) -> None:
        self.gates = gates
        self._lock = threading.Lock()
        self._regions: dict[int, HostRegion] = {}
        self._next_id = 1
        self._closed = False
        self._watchers: list[Callable[[int], None]] = []
        self._admitters: list[Callable[[HostRegion], None]] = []

    def watch_additions(self, admit: Callable[[HostRegion], None]) -> None:
        """Have `admit` called with each new region before anyone can use it.

        It may raise TransferError: then the region is not registered.
        """
        self._admitters.append(admit)

    def watch_withdrawals(self, watcher: Callable[[int], None]) -> None:
        """Have `watcher` called with the id of each region as it is withdrawn."""
        self._watchers.append(watcher)

    def allocate(self, num_bytes: int, label: str) -> HostRegion:
        """Return new zeroed memory that peers of this host can map. Raises TransferError."""
        memory, fd = allocate_shared(num_bytes, label)
        return self._add(_memory_view(memory, num_bytes), label, fd)

    def register(self, buffer: memoryview, label: str) -> HostRegion:
        """Register memory of the caller. Raises TransferError unless it is writable and in one
        piece.
        """
        if buffer.readonly or not buffer.c_contiguous or buffer.nbytes == 0:
            raise TransferError(f"{label}: only writable, contiguous memory can be registered")
        return self._add(buffer.cast("B"), label, None)

    def _add(self, buffer: memoryview, label: str, fd: int | None) -> HostRegion:
        with self._lock:
            if self._closed:
                if fd is not None:
                    os.close(fd)
                raise TransferError(f"{label}: the transfer engine is closed")
            region = HostRegion(self._next_id, label, buffer, fd)
            self._next_id += 1
        try:
            for admit in self._admitters:
                admit(region)
        except TransferError:
            self._discard(region)
            raise
        with self._lock:
            self._regions[region.region_id] = region
        return region

    def _discard(self, region: HostRegion) -> None:
        """A backend cannot serve this memory: as if it had never been."""
        region.alive = False
        for watcher in self._watchers:
            watcher(region.region_id)
        if region.fd is not None:
            os.close(region.fd)
            region.fd = None

    def withdraw(self, region: Region) -> None:
        """Refuse the region from now on; on return no thread of this process touches it.

        Raises TransferError when it is not registered here.
        """
        with self._lock:
            known = self._regions.get(region.region_id)
            if known is None or known is not region:
                raise TransferError(f"region {region.region_id} is not registered here")
            del self._regions[region.region_id]
            known.alive = False
        for watcher in self._watchers:
            watcher(known.region_id)
        self.gates.pass_all()
        if known.fd is not None:
            os.close(known.fd)
            known.fd = None

    def find(self, region_id: int, offset: int, num_bytes: int) -> HostRegion:
        """Return the region that holds the range. Raises RangeRefused, saying why not."""
        region = self._regions.get(region_id)
        if region is None:
            raise RangeRefused(f"region {region_id} is not registered")
        region.check(offset, num_bytes)
        return region

    def get(self, region_id: int) -> HostRegion | None:
        """Return a registered region, or None."""
        return self._regions.get(region_id)

    def close(self) -> None:
        """Withdraw all regions and take no more."""
        with self._lock:
            self._closed = True
            regions = list(self._regions.values())
        for region in regions:
            self.withdraw(region)

    def check_integrity(self) -> None:
        """Raise AssertionError when a withdrawn region is still listed."""
        for region_id, region in self._regions.items():
            assert region.alive, f"region {region_id} is listed but withdrawn"
            assert region.region_id == region_id < self._next_id


def _memory_view(memory: mmap.mmap, num_bytes: int) -> memoryview:
    return memoryview(memory)[:num_bytes]
