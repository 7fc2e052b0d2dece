"""The messages of shared memory over a Unix socket, and the owner's state page.

After the handshake a client asks for regions by id and gets their memory as a descriptor. The state
page has one word a region, which shows clients that it is still registered: only the owner writes
it.
"""

from __future__ import annotations

import mmap
import os
import socket

import msgspec

from mooncake.transfer.net.codec import Codec

MAX_MESSAGE_BYTES = 16384
STATE_SLOTS = 8192
STATE_BYTES = STATE_SLOTS * 8


class OpenRegion(msgspec.Struct, frozen=True, tag="open"):
    """The client asks for a region."""

    region_id: int


class RegionOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The owner hands out the region, whose descriptor comes with this message."""

    region_id: int
    num_bytes: int
    slot: int
    """Word of the state page that holds `region_id` while it is registered."""


class RegionRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The owner refuses. `unshared`: the region exists, but only other protocols reach it."""

    region_id: int
    reason: str
    unshared: bool


Answer = RegionOpened | RegionRefused
CODEC: Codec[OpenRegion, Answer] = Codec(OpenRegion, Answer, "shared memory")


def receive_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return one packet and the descriptors that came with it; the caller owns them."""
    data, fds, _flags, _address = socket.recv_fds(
        sock, MAX_MESSAGE_BYTES, 2, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    return data, fds


class StatePage:
    """The owner's page; slots are used again, but never for the same region id."""

    def __init__(self) -> None:
        fd = os.memfd_create("mooncake-state", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, STATE_BYTES)
            self._memory = mmap.mmap(fd, STATE_BYTES, flags=mmap.MAP_SHARED)
            # Clients get a descriptor they cannot write through.
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")
        self._slots: dict[int, int] = {}
        self._free = list(range(STATE_SLOTS - 1, -1, -1))

    def slot_of(self, region_id: int) -> int | None:
        """Return the slot of a region, marking it registered; None when all are taken."""
        slot = self._slots.get(region_id)
        if slot is None and self._free:
            slot = self._slots[region_id] = self._free.pop()
            self._words[slot] = region_id
        return slot

    def withdraw(self, region_id: int) -> None:
        """Mark a region as gone."""
        slot = self._slots.pop(region_id, None)
        if slot is not None:
            self._words[slot] = 0
            self._free.append(slot)

    def close(self) -> None:
        """Mark all regions as gone and free the page."""
        for region_id in list(self._slots):
            self.withdraw(region_id)
        self._words.release()
        self._memory.close()
        os.close(self.fd)


def map_state(fd: int) -> memoryview:
    """Return an owner's state page, read-only words."""
    memory = mmap.mmap(fd, STATE_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    return memoryview(memory).cast("Q")
