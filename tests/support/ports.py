"""A port for a program that has to be told where to listen."""

from __future__ import annotations

import contextlib
import os
import socket

_FIRST, _LAST = 20_000, 32_000
"""Below those that the system gives to connections, and to whoever asks for any port."""
_OF_EACH = 16


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody has, and that nobody gets who does not ask for it by number. Test
    processes look for theirs in different places.
    """
    first = _FIRST + os.getpid() * _OF_EACH % (_LAST - _FIRST)
    for number in range(first, _LAST + 500):
        with contextlib.suppress(OSError), socket.create_server((host, number)):
            return number
    raise AssertionError("no port is free")
