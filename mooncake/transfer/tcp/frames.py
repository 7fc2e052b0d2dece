"""A frame on its way out, and a payload on its way in, each sealed while its bytes pass.

A head (header and ranges) has a tag of its own, checked before any byte of the payload is taken. A
payload goes straight from and to registered memory; its tag follows it, and until that is checked
the request has not succeeded.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from mooncake.transfer.net.seals import Seals
from mooncake.transfer.tcp import wire

_MAX_IOVECS = 1024
_SEALED_STEP_BYTES = 2**20
"""What is tagged at a time, just before the kernel copies it: both find it in the cache."""


class Outgoing:
    """A frame that is being sent."""

    def __init__(self, head: bytes, payload: Sequence[memoryview], seals: Seals) -> None:
        self._ready = [memoryview(seals.seal(head))]
        self._payload = list(payload)
        self._seal = seals.begin() if payload else None
        self._step_bytes = _SEALED_STEP_BYTES if seals.num_tag_bytes else wire.MAX_REQUEST_BYTES
        self._is_due = True
        self.is_ahead = wire.is_long(sum(map(len, payload)))
        """Whether the first bytes of a long payload are still to go, alone."""

    @property
    def is_sent(self) -> bool:
        """Whether all of it has gone."""
        return not (self._ready or self._payload)

    def views(self) -> list[memoryview]:
        """Return what goes next. To be called inside the gate: it reads the payload."""
        if self._is_due and self._seal is not None:
            self._is_due = False
            self._make_ready(wire.AHEAD_BYTES if self.is_ahead else self._step_bytes)
        return self._ready

    def _make_ready(self, num_bytes: int) -> None:
        assert self._seal is not None
        step: list[memoryview] = []
        for view in self._payload[: _MAX_IOVECS - 2]:  # beside head and tag
            step.append(view[:num_bytes])
            num_bytes -= len(step[-1])
            if num_bytes == 0:
                break
        step_bytes = sum(map(len, step))
        self._seal.update(step, step_bytes)
        wire.advance(self._payload, step_bytes)
        self._ready += step
        if not self._payload and (tag := self._seal.tag()):
            self._ready.append(memoryview(tag))

    def advance(self, num_bytes: int) -> None:
        """Drop what was sent."""
        wire.advance(self._ready, num_bytes)
        self._is_due = not self._ready and bool(self._payload)


class Incoming:
    """A payload, and its tag, that are being received."""

    def __init__(self, views: Sequence[memoryview], num_bytes: int, seals: Seals) -> None:
        """`views`: where the payload of `num_bytes` goes."""
        self._tag = memoryview(bytearray(seals.num_tag_bytes))
        self._views = [*views, self._tag] if self._tag else list(views)
        self._seal = seals.begin()
        self._is_whole = True
        self.num_left = num_bytes + len(self._tag)

    def receive(self, sock: socket.socket) -> int:
        """Receive some of it; return the number of bytes, 0 at the end of the stream.

        To be called inside the gate. Raises ProtocolError when all has come and was altered.
        """
        if len(self._views) == 1:
            count = sock.recv_into(self._views[0])
        else:
            count = sock.recvmsg_into(self._views[:_MAX_IOVECS])[0]
        self._seal.update(self._views, min(count, self.num_left - len(self._tag)))
        wire.advance(self._views, count)
        self.num_left -= count
        if self.num_left == 0 and self._is_whole:
            self._seal.check(self._tag)
        return count

    def drop(self, sock: socket.socket, scratch: memoryview) -> int:
        """Receive some of it and throw it away; what is left is not checked any more."""
        count = sock.recv_into(scratch[: self.num_left])
        self.num_left -= count
        self._is_whole = False
        return count
