"""Registers the regions of this process with each NIC, and knows which NICs are near which region.

A region is registered when it is made, on the caller's thread (pinning takes a while), and
withdrawn with it. Read by the RDMA loop. A device's memory is registered if its driver or the
kernel (dmabuf) lets NICs reach it; otherwise RDMA does not move it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake.base.errors import TransferError
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.memory import make_resident
from mooncake.transfer.rdma.nic import Nic, Registration
from mooncake.transfer.rdma.wire import RegionKeys, RegionUnknown
from mooncake.transfer.regions import AnyRegion, DeviceRegion, RegionTable
from mooncake.transfer.topology import ANYWHERE, Matrix, NicChoice, choose_nics, memory_location

_LOG = logging.getLogger(__name__)
_NUMA_MAPS = Path("/proc/self/numa_maps")


@dataclass(frozen=True, slots=True)
class _Known:
    """A region as our NICs see it."""

    address: int
    """The address of the memory for the NICs."""
    num_bytes: int
    register: Callable[[Nic], Registration]
    on: dict[str, Registration]
    """Registrations by the name of the NIC."""
    near: NicChoice
    in_host: bool


class RdmaMemory:
    """All registrations of one engine. Thread-safe."""

    def __init__(self, table: RegionTable, nics: Sequence[Nic], matrix: Matrix) -> None:
        self.table = table
        self._nics = nics
        self._matrix = matrix
        self._lost: set[str] = set()
        self._changing = threading.Lock()
        """Held while regions are registered. It is held longer than `_lock`, and taken before
        it.
        """
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        table.watch_additions(self._add)
        table.watch_withdrawals(self._withdraw)

    def _add(self, region: AnyRegion) -> None:
        """Register a new region with all NICs. Raises TransferError when a NIC cannot register host
        memory.
        """
        with self._changing:
            if isinstance(region, DeviceRegion):
                known = self._reach(region.memory)
                if known is None:
                    return
                region.protocols.add("rdma")
            else:
                address, num_bytes = region.address, region.num_bytes
                make_resident(
                    address,
                    num_bytes,
                    functools.partial(self.table.progress, f"clearing {region.label}"),
                )
                known = self._on_all(
                    address,
                    num_bytes,
                    lambda nic: nic.register(address, num_bytes),
                    _location(address),
                    in_host=True,
                )
            with self._lock:
                self._known[region.region_id] = known

    def _on_all(
        self,
        address: int,
        num_bytes: int,
        register: Callable[[Nic], Registration],
        location: str,
        in_host: bool = False,
    ) -> _Known:
        """Register with all NICs. If that raises TransferError, no NIC has a registration."""
        done: dict[str, Registration] = {}
        try:
            for number, nic in enumerate(self._nics):
                self.table.progress("registering memory with NICs", number, len(self._nics))
                if nic.address.name not in self._lost:
                    done[nic.address.name] = register(nic)
        except TransferError:
            for registration in done.values():
                registration.close()
            raise
        near = choose_nics(self._matrix, location)
        return _Known(address, num_bytes, register, done, near, in_host)

    def _reach(self, memory: DeviceMemory) -> _Known | None:
        """Register a device's memory; return None if no NIC reaches it."""
        num_bytes, location = memory.num_bytes, memory.location
        reasons = []
        if memory.reachable_by_nics():
            address = memory.address
            try:
                return self._on_all(
                    address, num_bytes, lambda nic: nic.register(address, num_bytes), location
                )
            except TransferError as error:
                reasons.append(error.message)
        buffer = memory.dmabuf()
        if buffer is not None:
            os.close(buffer.fd)
            by_dmabuf = functools.partial(_register_dmabuf, memory)
            try:
                return self._on_all(buffer.offset, num_bytes, by_dmabuf, location)
            except TransferError as error:
                reasons.append(error.message)
        _LOG.info(
            "NICs do not reach %s, its bytes go by host memory: %s",
            memory.device,
            "; ".join(reasons) or "neither nvidia_peermem nor dmabuf is there",
        )
        return None

    def _withdraw(self, region_id: int) -> None:
        with self._lock:
            known = self._known.pop(region_id, None)
        failure = None
        for registration in known.on.values() if known is not None else ():
            try:
                registration.close()
            except TransferError as error:
                failure = error
        if failure is not None:
            raise failure

    def lose(self, name: str) -> None:
        """Go on without a NIC that has failed; its queue pairs are closed."""
        with self._changing:
            self._lost.add(name)
            with self._lock:
                gone = [known.on.pop(name, None) for known in self._known.values()]
            for registration in gone:
                if registration is not None:
                    with contextlib.suppress(TransferError):  # a failed NIC reaches no memory
                        registration.close()

    def is_lost(self, name: str) -> bool:
        """Return whether this NIC has failed."""
        return name in self._lost

    def find_again(self, nic: Nic) -> None:
        """Register all regions with a NIC that works again. Raises TransferError when a region
        cannot be registered; the NIC then stays lost.
        """
        name = nic.address.name
        with self._changing:
            with self._lock:
                known = list(self._known.items())
            done: dict[int, Registration] = {}
            try:
                for region_id, region in known:
                    done[region_id] = region.register(nic)
            finally:
                with self._lock:
                    for region_id, registration in done.items():
                        if region_id in self._known and len(done) == len(known):
                            self._known[region_id].on[name] = registration
                        else:
                            registration.close()
            self._lost.discard(name)

    def close(self) -> None:
        """Withdraw everything. Call it only when no queue pair is left."""
        with self._lock:
            region_ids = list(self._known)
        for region_id in region_ids:
            with contextlib.suppress(TransferError):  # its device is closed next
                self._withdraw(region_id)

    def local(self, region_id: int, nic: str) -> tuple[int, int, bool] | None:
        """Return a region's address and local key on one of our NICs, and whether it lies in the
        host's memory; None when it was withdrawn.
        """
        with self._lock:
            known = self._known.get(region_id)
        if known is None or nic not in known.on:
            return None
        return known.address, known.on[nic].local_key, known.in_host

    def keys(self, region_id: int) -> RegionKeys | RegionUnknown:
        """Return what a peer needs to reach a region."""
        with self._lock:
            known = self._known.get(region_id)
        if known is None:
            return RegionUnknown(region_id, f"region {region_id} is not registered")
        rkeys = {name: registration.remote_key for name, registration in known.on.items()}
        guarded = self.table.is_guarded(region_id)
        return RegionKeys(region_id, known.address, known.num_bytes, rkeys, guarded)

    def nics_near(self, region_id: int) -> NicChoice:
        """Return the NICs for a region of ours, best first."""
        with self._lock:
            known = self._known.get(region_id)
        return choose_nics(self._matrix, ANYWHERE) if known is None else known.near


def _register_dmabuf(memory: DeviceMemory, nic: Nic) -> Registration:
    buffer = memory.dmabuf()
    if buffer is None:
        raise TransferError(f"{memory.device} cannot export its memory as a dmabuf")
    try:
        return nic.register_dmabuf(buffer.fd, buffer.offset, memory.num_bytes)
    finally:
        os.close(buffer.fd)  # the registration keeps what it stands for


def _location(address: int) -> str:
    with contextlib.suppress(OSError):
        return memory_location(_NUMA_MAPS.read_text(), address)
    return ANYWHERE
