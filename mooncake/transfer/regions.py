"""Keeps the memory that one process has registered, and the gates by which it is withdrawn safely.

Every access by a peer is checked here, in the process that owns the memory, against its own table
of ranges. Threads that touch regions do so inside their gate; withdrawing a region marks it and
then passes all gates, so that no thread is still inside afterwards.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mooncake.base.errors import TransferError
from mooncake.transfer.device import HOST, CopyDone, DeviceMemory, Ranges, read_now
from mooncake.transfer.engine import Region
from mooncake.transfer.grants import NUM_SLOTS, Grants, Loan, Loans, Permit
from mooncake.transfer.memory import SharedWords, allocate_shared


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
        """Drop the gate of a thread that has ended."""
        with self._lock:
            self._gates.remove(gate)

    def pass_all(self) -> None:
        """Return when every thread that was inside its gate at the call has left it once."""
        with self._lock:
            gates = list(self._gates)
        for gate in gates:
            with gate:
                pass


class _Region:
    """What all registered memory has in common. `alive` turns False for good when it is
    withdrawn.
    """

    def __init__(self, region_id: int, label: str, num_bytes: int) -> None:
        self.region_id = region_id
        self.label = label
        self.num_bytes = num_bytes
        self.alive = True
        self.guarded = False
        """True if peers write to it by grants only."""
        self.read_only = False
        """True if no peer writes to it."""

    @property
    def withdrawn(self) -> str | None:
        """The reason why it may not be touched any more, or None."""
        return None if self.alive else f"region {self.region_id} ({self.label}) was unregistered"

    def check(self, offset: int, num_bytes: int) -> None:
        """Raise RangeRefused unless the range lies inside this live region."""
        if not self.alive:
            raise RangeRefused(self.withdrawn or "")
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise RangeRefused(
                f"bytes [{offset}, {offset + num_bytes}) lie outside region {self.region_id} "
                f"({self.label}) of {self.num_bytes} bytes"
            )


class HostRegion(_Region):
    """Registered host memory."""

    device = HOST

    def __init__(self, region_id: int, label: str, buffer: memoryview, fd: int | None) -> None:
        super().__init__(region_id, label, buffer.nbytes)
        self.buffer = buffer
        self.fd = fd
        """Descriptor that peers may map; None for memory that was not allocated here."""
        self.array: npt.NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)

    @property
    def address(self) -> int:
        """The address of the region's first byte in this process."""
        return int(self.array.ctypes.data)

    def read(self, ranges: Sequence[tuple[int, int]]) -> Iterable[memoryview]:
        return (self.buffer[offset : offset + length] for offset, length in ranges)


class DeviceRegion(_Region):
    """Registered memory of a device.

    Only the protocols in `protocols` move its bytes directly; otherwise the bytes are copied
    through host memory.
    """

    fd = None

    def __init__(self, region_id: int, label: str, memory: DeviceMemory) -> None:
        super().__init__(region_id, label, memory.num_bytes)
        self.memory = memory
        self.protocols: set[str] = set()
        """Protocols whose hardware reaches it by itself."""
        self._num_copies = 0
        self._changed = threading.Condition()

    @property
    def device(self) -> str:
        return self.memory.device

    @property
    def buffer(self) -> memoryview:
        raise ValueError(
            f"region {self.region_id} ({self.label}) lies in memory of {self.device}, which "
            "the CPU cannot read"
        )

    def read(self, ranges: Sequence[tuple[int, int]]) -> Iterable[memoryview]:
        return (read_now(self.memory, ranges),)

    def copy(self, out: bool, ranges: Ranges, host: memoryview, done: CopyDone) -> None:
        """Begin to copy `ranges` out to, or in from, pinned host memory. Never waits."""
        with self._changed:
            refusal = self._refusal(ranges)
            self._num_copies += refusal is None
        if refusal is not None:
            done(refusal)
            return

        def ended(error: str | None) -> None:
            with self._changed:
                self._num_copies -= 1
                self._changed.notify_all()
            done(error)

        (self.memory.copy_out if out else self.memory.copy_in)(ranges, host, ended)

    def _refusal(self, ranges: Ranges) -> str | None:
        try:
            for offset, num_bytes in ranges:
                self.check(offset, num_bytes)
        except RangeRefused as error:
            return error.message
        return None

    def drain(self) -> None:
        """Return when no copy is in hand. No copy begins after the region was withdrawn."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_copies == 0)


AnyRegion = HostRegion | DeviceRegion


class Withdrawable(Protocol):
    """What a running transfer needs: a region, a loan of a piece of one, or a grant."""

    @property
    def withdrawn(self) -> str | None:
        """The reason why it may not be touched any more, or None."""


def withdrawn(needed: Iterable[Withdrawable]) -> str | None:
    """Return why one of these may not be touched any more, or None."""
    for each in needed:
        reason = each.withdrawn
        if reason is not None:
            return reason
    return None


Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much is done, of how much). A total of 0 means that it is
not counted.
"""


def no_progress(what: str, done: int, whole: int) -> None:
    """Ignore the progress of a registration."""


class RegionTable:
    """The regions that one engine has registered. Ids start at 1 and are never reused;
    thread-safe.
    """

    def __init__(self, gates: Gates, progress: Progress = no_progress) -> None:
        """`progress` is told how far the registration of much memory has come."""
        self.gates = gates
        self.progress = progress
        self.loans = Loans(gates.pass_all)
        self.words = SharedWords(NUM_SLOTS)
        """The words of the grants, which peers of this host read."""
        self.grants = Grants(self.words.words)
        self._lock = threading.Lock()
        self._regions: dict[int, AnyRegion] = {}
        self._next_id = 1
        self._closed = False
        self._watchers: list[Callable[[int], None]] = []
        self._admitters: list[Callable[[AnyRegion], None]] = []

    def watch_additions(self, admit: Callable[[AnyRegion], None]) -> None:
        """Have `admit` called with each new region before anyone can use it.

        `admit` may raise TransferError: then the region is not registered.
        """
        self._admitters.append(admit)

    def watch_withdrawals(self, watcher: Callable[[int], None]) -> None:
        """Have `watcher` called with the id of each region as it is withdrawn."""
        self._watchers.append(watcher)

    def allocate(self, num_bytes: int, label: str) -> HostRegion:
        """Return new zeroed memory that peers of this host can map. Raises TransferError."""
        memory, fd = allocate_shared(num_bytes, label)
        return self._add(_memory_view(memory, num_bytes), label, fd)

    def register(self, buffer: memoryview, label: str, *, read_only: bool = False) -> HostRegion:
        """Register memory of the caller. Peers that want to write to it are refused if it is
        `read_only`. Raises TransferError unless it is writable and in one piece.
        """
        if buffer.readonly or not buffer.c_contiguous or buffer.nbytes == 0:
            raise TransferError(f"{label}: only writable, contiguous memory can be registered")
        return self._add(buffer.cast("B"), label, None, read_only=read_only)

    def register_device(
        self, memory: DeviceMemory, label: str, *, read_only: bool = False
    ) -> DeviceRegion:
        """Register memory of a device. Peers that want to write to it are refused if it is
        `read_only`. Raises TransferError.
        """
        region = DeviceRegion(self._new_id(label), label, memory)
        region.read_only = read_only
        self._admit(region)
        return region

    def _add(
        self, buffer: memoryview, label: str, fd: int | None, *, read_only: bool = False
    ) -> HostRegion:
        try:
            region = HostRegion(self._new_id(label), label, buffer, fd)
            region.read_only = read_only
        except TransferError:
            if fd is not None:
                os.close(fd)
            raise
        self._admit(region)
        return region

    def _new_id(self, label: str) -> int:
        with self._lock:
            if self._closed:
                raise TransferError(f"{label}: the transfer engine is closed")
            self._next_id += 1
            return self._next_id - 1

    def _admit(self, region: AnyRegion) -> None:
        try:
            for admit in self._admitters:
                admit(region)
        except TransferError:
            self._discard(region)
            raise
        with self._lock:
            self._regions[region.region_id] = region

    def _discard(self, region: AnyRegion) -> None:
        """Undo the registration of memory that a backend cannot serve."""
        region.alive = False
        for watcher in self._watchers:
            watcher(region.region_id)
        _close(region)

    def withdraw(self, region: Region) -> None:
        """Refuse the region from now on; on return no thread of this process touches it.

        Raises TransferError when it is not registered here, or a NIC does not let go of it.
        """
        with self._lock:
            known = self._regions.get(region.region_id)
            if known is None or known is not region:
                raise TransferError(f"region {region.region_id} is not registered here")
            del self._regions[region.region_id]
            known.alive = False
        try:
            for watcher in self._watchers:
                watcher(known.region_id)
        finally:
            self.gates.pass_all()
            _close(known)

    def find(self, region_id: int, offset: int, num_bytes: int) -> HostRegion:
        """Return the host region that holds the range. Raises RangeRefused, saying why not."""
        region = self.find_any(region_id, offset, num_bytes)
        if isinstance(region, DeviceRegion):
            raise RangeRefused(
                f"region {region_id} ({region.label}) lies in memory of {region.device}, "
                "which the CPU cannot read"
            )
        return region

    def views(
        self, ranges: Iterable[tuple[int, int, int]]
    ) -> tuple[list[memoryview], list[HostRegion]]:
        """Return the bytes of (region, offset, length) ranges, and the regions they lie in.

        Raises RangeRefused.
        """
        views: list[memoryview] = []
        regions: list[HostRegion] = []
        for region_id, offset, length in ranges:
            region = self.find(region_id, offset, length)
            if not regions or regions[-1] is not region:
                regions.append(region)
            views.append(region.buffer[offset : offset + length])
        return views, regions

    def borrowed(
        self, borrower: str, ranges: Sequence[tuple[int, int, int]], *, write: bool
    ) -> list[Loan]:
        """Return a pool client's loans of (region, offset, length) ranges. Raises RangeRefused."""
        loans = self.loans.find(borrower, ranges, write=write)
        if loans is None:
            raise RangeRefused(
                f"this client may not {'write' if write else 'read'} this memory: a pool client "
                "reaches only what was granted to it, or what it has pinned"
            )
        return loans

    def permits(self, regions: Iterable[AnyRegion], grant: int) -> list[Permit]:
        """Return what a peer's WRITE to `regions` must hold besides the regions. Raises
        RangeRefused when one of them is read only, when the grant was revoked, or when one is
        needed and none is given.
        """
        regions = list(regions)
        for region in regions:
            if region.read_only:
                raise RangeRefused(f"region {region.region_id} ({region.label}) is only read")
        if grant:
            permit = self.grants.permit(grant)
            if permit.withdrawn is not None:
                raise RangeRefused(permit.withdrawn)
            return [permit]
        for region in regions:
            if region.guarded:
                raise RangeRefused(f"region {region.region_id} is written to by grants only")
        return []

    def is_guarded(self, region_id: int) -> bool:
        """Return whether a region is written to by grants only."""
        region = self._regions.get(region_id)
        return region is not None and region.guarded

    def find_any(self, region_id: int, offset: int, num_bytes: int) -> AnyRegion:
        """Return the region that holds the range. Raises RangeRefused, saying why not."""
        region = self._regions.get(region_id)
        if region is None:
            raise RangeRefused(f"region {region_id} is not registered")
        region.check(offset, num_bytes)
        return region

    def get(self, region_id: int) -> HostRegion | None:
        """Return a registered region of host memory, or None."""
        region = self._regions.get(region_id)
        return region if isinstance(region, HostRegion) else None

    def get_device(self, region_id: int) -> DeviceRegion | None:
        """Return a registered region of device memory, or None."""
        region = self._regions.get(region_id)
        return region if isinstance(region, DeviceRegion) else None

    def close(self) -> None:
        """Withdraw all regions and accept no more."""
        with self._lock:
            self._closed = True
            regions = list(self._regions.values())
        for region in regions:
            self.withdraw(region)
        self.grants.close()
        self.words.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when a withdrawn region is still listed."""
        for region_id, region in self._regions.items():
            assert region.alive, f"region {region_id} is listed but withdrawn"
            assert region.region_id == region_id < self._next_id


def _close(region: AnyRegion) -> None:
    """Free what a withdrawn region keeps. Waits for a device's copies."""
    if isinstance(region, DeviceRegion):
        region.drain()
    elif region.fd is not None:
        os.close(region.fd)
        region.fd = None


def _memory_view(memory: mmap.mmap, num_bytes: int) -> memoryview:
    return memoryview(memory)[:num_bytes]
