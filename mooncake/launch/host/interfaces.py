"""The network interfaces of this machine, as getifaddrs(3) tells them, and which one NCCL uses."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator

_ADDRESS_AT = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Family -> where a socket address has the numeric one, and its length."""


class _Entry(ctypes.Structure):
    """The beginning of `struct ifaddrs`."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


LOOPBACK = "127.0.0.1"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""The variable by which NCCL knows the interface over which its ranks meet and, without RDMA,
exchange. It chooses one itself otherwise, and listens there.
"""


def bind_nccl(host: str) -> None:
    """Have NCCL in this process, and in those that it starts, use the interface that has the
    address `host`, unless the user has named others.
    """
    if (name := interface_of(host)) is not None:
        os.environ.setdefault(NCCL_INTERFACE, f"={name}")


def interface_of(host: str) -> str | None:
    """Return the name of the interface that has the address `host`, or one that the name `host`
    stands for, or None if no interface has it.
    """
    wanted = {
        (family, socket.inet_pton(family, str(address[0]).partition("%")[0]))
        for family, _, _, _, address in socket.getaddrinfo(host, None)
    }
    return next((name for name, *has in _addresses() if tuple(has) in wanted), None)


def _addresses() -> Iterator[tuple[str, socket.AddressFamily, bytes]]:
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        at = first
        while at:
            entry = at.contents
            if entry.address:
                family = ctypes.c_ushort.from_address(entry.address).value
                if family in _ADDRESS_AT:
                    offset, length = _ADDRESS_AT[socket.AddressFamily(family)]
                    number = ctypes.string_at(entry.address + offset, length)
                    yield entry.name.decode(), socket.AddressFamily(family), number
            at = entry.next
    finally:
        libc.freeifaddrs(first)
