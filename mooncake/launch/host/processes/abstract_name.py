"""Finds out who is at the other end of a Unix socket, and who holds an abstract address of this
machine: any user may bind such an address, and so take it before its owner does.
"""

from __future__ import annotations

import os
import socket
import struct

_PEER = struct.Struct("3i")
"""The process, user and group at the other end of a socket, as the kernel says."""
_ANSWER_S = 1.0


def credentials_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end; for an address, those that listen."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(found)
    return pid, user


def foreign_holder(address: str, kind: socket.SocketKind) -> str | None:
    """Return, in words, which process of another user holds an address. Return None if a process of
    this user holds it, or none does any more.
    """
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(address)
            pid, user = credentials_of(sock)
        except (FileNotFoundError, TimeoutError, BlockingIOError):
            return None  # nobody holds it, or a holder that many processes ask
        except OSError:
            return "a process that does not listen there"
    return None if user == os.geteuid() else f"process {pid} of user {user}"
