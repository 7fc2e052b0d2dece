"""Registered memory as RDMA sees it: each region of this process on each NIC, and who is near whom.

Registered when the region is made, on the maker's thread (pinning takes a while), and withdrawn
with it. Read by the RDMA loop.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from mooncake.base.errors import TransferError
from mooncake.transfer.backends.rdma_nic import Nic, Registration
from mooncake.transfer.backends.rdma_wire import RegionKeys, RegionUnknown
from mooncake.transfer.regions import HostRegion, RegionTable
from mooncake.transfer.topology import ANYWHERE, Matrix, NicChoice, choose_nics, memory_location

_NUMA_MAPS = Path("/proc/self/numa_maps")


class RdmaMemory:
    """See the module."""

    def __init__(self, table: RegionTable, nics: Sequence[Nic], matrix: Matrix) -> None:
        self._nics = nics
        self._matrix = matrix
        self._lock = threading.Lock()
        self._registrations: dict[int, Mapping[str, Registration]] = {}
        self._regions: dict[int, HostRegion] = {}
        self._choices: dict[int, NicChoice] = {}
        table.watch_additions(self._add)
        table.watch_withdrawals(self._withdraw)

    def _add(self, region: HostRegion) -> None:
        """Register a new region with all NICs. Raises TransferError."""
        address = region.array.ctypes.data
        done: dict[str, Registration] = {}
        try:
            for nic in self._nics:
                done[nic.address.name] = nic.register(address, region.num_bytes)
        except TransferError:
            for registration in done.values():
                registration.close()
            raise
        choice = choose_nics(self._matrix, _location(address))
        with self._lock:
            self._registrations[region.region_id] = done
            self._regions[region.region_id] = region
            self._choices[region.region_id] = choice

    def _withdraw(self, region_id: int) -> None:
        with self._lock:
            done = self._registrations.pop(region_id, {})
            self._regions.pop(region_id, None)
            self._choices.pop(region_id, None)
        for registration in done.values():
            registration.close()

    def close(self) -> None:
        """Withdraw everything; to be called when no queue pair is left."""
        with self._lock:
            region_ids = list(self._registrations)
        for region_id in region_ids:
            self._withdraw(region_id)

    def local(self, region_id: int, nic: str) -> tuple[int, int] | None:
        """Return (address, local key) of a region on one of our NICs; None when withdrawn."""
        with self._lock:
            region = self._regions.get(region_id)
            if region is None:
                return None
            return region.array.ctypes.data, self._registrations[region_id][nic].local_key

    def keys(self, region_id: int) -> RegionKeys | RegionUnknown:
        """Return what a peer needs to reach a region."""
        with self._lock:
            region = self._regions.get(region_id)
            if region is None:
                return RegionUnknown(region_id, f"region {region_id} is not registered")
            rkeys = {
                name: registration.remote_key
                for name, registration in self._registrations[region_id].items()
            }
            return RegionKeys(region_id, region.array.ctypes.data, region.num_bytes, rkeys)

    def nics_near(self, region_id: int) -> NicChoice:
        """Return the NICs for a region of ours, best first."""
        with self._lock:
            return self._choices.get(region_id) or choose_nics(self._matrix, ANYWHERE)


def _location(address: int) -> str:
    with contextlib.suppress(OSError):
        return memory_location(_NUMA_MAPS.read_text(), address)
    return ANYWHERE
