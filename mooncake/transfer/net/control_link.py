"""A stream of small frames between two engines: a length (4 bytes, little-endian), then the body.
On one host, descriptors may come with a frame.

It knows sockets, not what the frames mean. All of it runs in the loop's own thread.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence

from mooncake.base.errors import MooncakeError, ProtocolError
from mooncake.transfer.net.endpoint import Address, new_stream
from mooncake.transfer.net.io_loop import HUNG_UP, READABLE, WRITABLE, IoLoop
from mooncake.transfer.net.listener import watch_host

MAX_FRAME_BYTES = 65536
_MAX_UNSENT_BYTES = 2**20
_LENGTH_BYTES = 4
_DEAD_HOST_S = 20.0
MAX_DESCRIPTORS = 4
"""Descriptors that come with one frame."""


def begin_to_connect(address: Address) -> socket.socket:
    """Return a socket that is connecting; its first event shows how that went. Raises OSError when
    it has failed at once.
    """
    sock = new_stream(address)
    try:
        sock.setblocking(False)
        if isinstance(address, str):
            sock.connect(address)  # a Unix socket connects at once or not at all
        else:
            failure = sock.connect_ex(address)
            if failure not in (0, errno.EINPROGRESS):
                raise OSError(failure, os.strerror(failure))
    except OSError:
        sock.close()
        raise
    return sock


def pack_frame(body: bytes) -> bytes:
    """Return the bytes of a frame."""
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class ControlLink:
    """A stream socket, connected or connecting. `on_end` is called once when it breaks: never from
    within `send`, and not after `close`.
    """

    def __init__(
        self,
        loop: IoLoop,
        sock: socket.socket,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[str], None],
        *,
        takes_descriptors: bool = False,
    ) -> None:
        """Take over a non-blocking socket. `on_frame` may raise MooncakeError to end the stream."""
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._takes_descriptors = takes_descriptors
        self._descriptors: list[int] = []
        """Descriptors that have arrived and that nobody has taken."""
        self._events = READABLE
        self._failure: str | None = None
        """The error that `send` met with."""
        self.closed = False
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_host(sock, _DEAD_HOST_S)
        loop.add(sock.fileno(), READABLE, self._on_event)

    def send(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one frame as soon as the socket takes it. A frame with descriptors is sent now or
        not at all.
        """
        if self.closed:
            return
        frame = pack_frame(body)
        if descriptors:
            try:
                if self._unsent:
                    raise BlockingIOError("the peer sends requests, but reads no answers")
                frame = frame[socket.send_fds(self._sock, [frame], descriptors) :]
            except OSError as error:
                self._end_soon(error.strerror or str(error))
                return
        self._unsent += frame
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            self._end_soon("the peer sends requests, but reads no answers")
        else:
            self._flush()

    def _on_event(self, events: int) -> None:
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._end(os.strerror(error))
            return
        if events & WRITABLE:
            self._flush()
        if events & (READABLE | HUNG_UP):
            self._receive()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # still connecting
                self._end_soon(error.strerror or str(error))
                return
        self._watch(READABLE | WRITABLE if self._unsent else READABLE)

    def _watch(self, events: int) -> None:
        if events != self._events and not self.closed:
            self._events = events
            self._loop.modify(self._sock.fileno(), events)

    def _receive(self) -> None:
        try:
            data = self._read()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        if not data:
            self._end("the peer has gone")
            return
        self._received += data
        try:
            while not self.closed and (body := self._next_frame()) is not None:
                self._on_frame(body)
            if not self._received:
                self._drop_descriptors()
            elif len(self._descriptors) > MAX_DESCRIPTORS:
                raise ProtocolError("the peer sends more descriptors than messages use")
        except MooncakeError as error:
            self._end(error.message)

    def _read(self) -> bytes:
        if not self._takes_descriptors:
            return self._sock.recv(MAX_FRAME_BYTES)
        data, came, _, _ = socket.recv_fds(
            self._sock, MAX_FRAME_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        self._descriptors += came
        return data

    def take_descriptors(self) -> list[int]:
        """Return the descriptors that came with the current frame, for the caller to close. Those
        that `on_frame` does not take are closed after it.
        """
        taken, self._descriptors = self._descriptors, []
        return taken

    def _drop_descriptors(self) -> None:
        for descriptor in self.take_descriptors():
            os.close(descriptor)

    def _next_frame(self) -> bytes | None:
        if len(self._received) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._received[:_LENGTH_BYTES], "little")
        if not 0 < length <= MAX_FRAME_BYTES:
            raise ProtocolError("the peer does not speak this protocol")
        if len(self._received) < _LENGTH_BYTES + length:
            return None
        body = bytes(self._received[_LENGTH_BYTES : _LENGTH_BYTES + length])
        del self._received[: _LENGTH_BYTES + length]
        return body

    def hand_over(self) -> socket.socket:
        """Return the socket, which belongs to the caller from now on. Raises ProtocolError when the
        peer has sent more than the frames so far, or has not taken what was sent.
        """
        if self._received or self._unsent or self._descriptors:
            raise ProtocolError("the peer does not speak this protocol")
        self.closed = True
        self._loop.remove(self._sock.fileno())
        return self._sock

    def _end_soon(self, reason: str) -> None:
        """End the stream after the caller of `send` has returned."""
        self._failure = self._failure or reason
        self._loop.post(lambda: self._end(reason))

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._on_end(self._failure or reason)

    def close(self) -> None:
        """Hang up; what was not sent is forgotten."""
        if not self.closed:
            self.closed = True
            self._loop.remove(self._sock.fileno())
            self._sock.close()
            self._drop_descriptors()
