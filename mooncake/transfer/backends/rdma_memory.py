"""Registered memory as RDMA sees it: each region of this process on each NIC, and who is near whom.

Registered when the region is made, on the maker's thread (pinning takes a while), and withdrawn
with it. Read by the RDMA loop. Memory of a device is registered where its driver or the kernel
(dmabuf) lets NICs reach it; where not, it is not ours to move.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake.base.errors import TransferError
from mooncake.transfer.backends.rdma_nic import Nic, Registration
from mooncake.transfer.backends.rdma_wire import RegionKeys, RegionUnknown
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.regions import AnyRegion, DeviceRegion, RegionTable
from mooncake.transfer.topology import ANYWHERE, Matrix, NicChoice, choose_nics, memory_location

_LOG = logging.getLogger(__name__)
_NUMA_MAPS = Path("/proc/self/numa_maps")


@dataclass(frozen=True, slots=True)
class _Known:
    """A region as our NICs know it."""

    address: int
    """Where it begins for them."""
    num_bytes: int
    on: Mapping[str, Registration]
    """By the names of the NICs."""
    near: NicChoice


class RdmaMemory:
    """See the module."""

    def __init__(self, table: RegionTable, nics: Sequence[Nic], matrix: Matrix) -> None:
        self._nics = nics
        self._matrix = matrix
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        table.watch_additions(self._add)
        table.watch_withdrawals(self._withdraw)

    def _add(self, region: AnyRegion) -> None:
        """Register a new region with all NICs. Raises TransferError when host memory cannot be."""
        if isinstance(region, DeviceRegion):
            found = self._reach(region.memory)
            if found is None:
                return
            address, done = found
            location = region.memory.location
            region.protocols.add("rdma")
        else:
            address, location = region.address, _location(region.address)
            done = self._on_all(lambda nic: nic.register(address, region.num_bytes))
        near = choose_nics(self._matrix, location)
        with self._lock:
            self._known[region.region_id] = _Known(address, region.num_bytes, done, near)

    def _on_all(self, register: Callable[[Nic], Registration]) -> dict[str, Registration]:
        """Register with all NICs or, raising TransferError, with none."""
        done: dict[str, Registration] = {}
        try:
            for nic in self._nics:
                done[nic.address.name] = register(nic)
        except TransferError:
            for registration in done.values():
                registration.close()
            raise
        return done

    def _reach(self, memory: DeviceMemory) -> tuple[int, dict[str, Registration]] | None:
        """Return where a device's memory begins for NICs and its registrations; None without."""
        reasons = []
        if memory.reachable_by_nics():
            try:
                plain = self._on_all(lambda nic: nic.register(memory.address, memory.num_bytes))
            except TransferError as error:
                reasons.append(error.message)
            else:
                return memory.address, plain
        buffer = memory.dmabuf()
        if buffer is not None:
            fd, offset = buffer.fd, buffer.offset
            try:
                shown = self._on_all(lambda nic: nic.register_dmabuf(fd, offset, memory.num_bytes))
            except TransferError as error:
                reasons.append(error.message)
            else:
                return offset, shown
            finally:
                os.close(fd)  # the registrations keep what it stands for
        _LOG.info(
            "NICs do not reach %s, its bytes go by host memory: %s",
            memory.device,
            "; ".join(reasons) or "neither nvidia_peermem nor dmabuf is there",
        )
        return None

    def _withdraw(self, region_id: int) -> None:
        with self._lock:
            known = self._known.pop(region_id, None)
        for registration in known.on.values() if known is not None else ():
            registration.close()

    def close(self) -> None:
        """Withdraw everything; to be called when no queue pair is left."""
        with self._lock:
            region_ids = list(self._known)
        for region_id in region_ids:
            self._withdraw(region_id)

    def local(self, region_id: int, nic: str) -> tuple[int, int] | None:
        """Return (address, local key) of a region on one of our NICs; None when withdrawn."""
        with self._lock:
            known = self._known.get(region_id)
        return None if known is None else (known.address, known.on[nic].local_key)

    def keys(self, region_id: int) -> RegionKeys | RegionUnknown:
        """Return what a peer needs to reach a region."""
        with self._lock:
            known = self._known.get(region_id)
        if known is None:
            return RegionUnknown(region_id, f"region {region_id} is not registered")
        rkeys = {name: registration.remote_key for name, registration in known.on.items()}
        return RegionKeys(region_id, known.address, known.num_bytes, rkeys)

    def nics_near(self, region_id: int) -> NicChoice:
        """Return the NICs for a region of ours, best first."""
        with self._lock:
            known = self._known.get(region_id)
        return choose_nics(self._matrix, ANYWHERE) if known is None else known.near


def _location(address: int) -> str:
    with contextlib.suppress(OSError):
        return memory_location(_NUMA_MAPS.read_text(), address)
    return ANYWHERE
