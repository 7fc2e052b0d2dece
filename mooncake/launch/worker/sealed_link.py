"""A byte stream between two machines of a cluster: both ends prove themselves, then all bytes are
encrypted. `relay` joins it to a socket of this machine, so that neither end's owner knows of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from mooncake.base import Forbidden, ProtocolError, SystemIds
from mooncake.identity import Credential
from mooncake.transfer.net.handshake import Channel, Credentials
from mooncake.transfer.net.protection import Protection
from mooncake.transfer.net.seals import TAG_BYTES

PROVE_S = 10.0
"""How long the other end may take to prove itself, in all."""
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 16


class SealedLink:
    """One end of the stream. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        """Use `connect` or `accept`."""
        self._socket = sock
        self._channel = channel

    @classmethod
    def connect(cls, address: tuple[str, int], credential: Credential, name: str) -> SealedLink:
        """Return the link to who listens at `address` under `name`.

        Raises:
            OSError: nobody listens there, or the listener did not answer.
            HandshakeRefused: one side is not of the cluster.
            ProtocolError: it does not speak this protocol.
        """
        until_s = time.monotonic() + PROVE_S
        sock = socket.create_connection(address, PROVE_S)
        try:
            side = _credentials(credential, "lead").connect(name)
            _send(sock, side.first_message)
            while side.channel is None:
                answer = side.step(_receive(sock, until_s))
                if answer is not None:
                    _send(sock, answer)
            return cls._proven(sock, side.channel)
        except BaseException:
            sock.close()
            raise

    @classmethod
    def accept(cls, sock: socket.socket, credential: Credential, name: str) -> SealedLink:
        """Return the link to who has connected to `sock`, once it has proven itself.

        Raises:
            OSError: it did not in time.
            Forbidden: it is not of the cluster.
            ProtocolError: it does not speak this protocol.
        """
        until_s = time.monotonic() + PROVE_S
        side = _credentials(credential, name).accept()
        while side.channel is None:
            _send(sock, side.step(_receive(sock, until_s)))
            if side.refusal is not None:
                raise Forbidden(f"a peer was refused: {side.refusal}")
        return cls._proven(sock, side.channel)

    @classmethod
    def _proven(cls, sock: socket.socket, channel: Channel) -> SealedLink:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return cls(sock, channel)

    def send(self, data: bytes) -> None:
        """Send some bytes, at most 64 KiB. OSError: the other end has gone."""
        sealed = b"".join(self._channel.sent.begin().seal([memoryview(data)]))
        _send(self._socket, sealed)

    def receive(self) -> bytes:
        """Return the next bytes that were sent; none: the other end has gone.

        Raises:
            OSError: the connection is broken.
            ProtocolError: they were altered on their way.
        """
        try:
            sealed = bytearray(_receive(self._socket))
        except EOFError:
            return b""
        whole = memoryview(sealed)
        data = whole[:-TAG_BYTES]
        self._channel.received.begin().open(data, whole[-TAG_BYTES:])
        return bytes(data)

    def relay(self, local: socket.socket) -> None:
        """Pass on what comes at either end, until one of them has gone; both are closed then."""
        outward = threading.Thread(target=self._send_all, args=(local,), daemon=True)
        outward.start()
        try:
            with contextlib.suppress(OSError, ProtocolError):
                while data := self.receive():
                    local.sendall(data)
        finally:
            _shut(local)
            self.hang_up()
            outward.join()
            local.close()
            self._socket.close()

    def hang_up(self) -> None:
        """Have both ends find that the other has gone; from any thread."""
        _shut(self._socket)

    def close(self) -> None:
        """Hang up a link that nobody relays."""
        self.hang_up()
        self._socket.close()

    def _send_all(self, local: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := local.recv(_MOST_BYTES):
                self.send(data)
        self.hang_up()


def _credentials(credential: Credential, name: str) -> Credentials:
    return Credentials(
        engine_id=name,
        credential=credential,
        ids=SystemIds(),
        protection=Protection.ENCRYPT,
        least=Protection.ENCRYPT,
    )


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket, until_s: float | None = None) -> bytes:
    """Return the next message, which has to be whole at `until_s`, by the monotonic clock.

    Raises:
        EOFError: the other end has gone.
        TimeoutError: it was not whole in time.
    """
    [count] = _LENGTH.unpack(_exactly(sock, _LENGTH.size, until_s))
    if count > _MOST_BYTES + TAG_BYTES:
        raise ProtocolError(f"a message of {count} bytes on a link of ranks")
    return _exactly(sock, count, until_s)


def _exactly(sock: socket.socket, count: int, until_s: float | None) -> bytes:
    found = bytearray()
    while len(found) < count:
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left_s)
        part = sock.recv(count - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)
