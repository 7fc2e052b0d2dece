"""A byte stream between two machines of a cluster: both ends prove themselves, then all bytes are
encrypted. `relay` joins it to a socket of this machine, so that the users of both ends need not
know about it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from mooncake.base import ProtocolError, SystemIds
from mooncake.identity.credential import Credential
from mooncake.transfer.net.blocking import let_in, receive, send, shake_hands
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.handshake import Channel, Credentials
from mooncake.transfer.net.seals import TAG_BYTES

PROVE_S = 10.0
"""How long the other end may take to prove itself, in all."""
_MOST_BYTES = 1 << 16


class SealedLink:
    """Encrypts what one end of a stream sends, and decrypts what it receives. One thread may send
    while another receives.
    """

    def __init__(self, sock: socket.socket, channel: Channel) -> None:
        """Wrap a proven connection. Use `connect` or `accept` instead."""
        self._socket = sock
        self._channel = channel

    @classmethod
    def connect(cls, address: tuple[str, int], credential: Credential, name: str) -> SealedLink:
        """Return the link to the process that listens at `address` under `name`.

        Raises:
            OSError: nobody listens there, or the listener did not answer.
            HandshakeRefused: one side does not belong to the cluster.
            ProtocolError: the listener does not speak this protocol.
        """
        until_s = time.monotonic() + PROVE_S
        sock = socket.create_connection(address, PROVE_S)
        try:
            side = _credentials(credential, "lead").connect(name)
            shake_hands(sock, side, until_s)
            return cls._proven(sock, side.channel)
        except BaseException:
            sock.close()
            raise

    @classmethod
    def accept(cls, sock: socket.socket, credential: Credential, name: str) -> SealedLink:
        """Return the link to the process that has connected to `sock`, once it has proven itself.

        Raises:
            OSError: it did not prove itself in time.
            Forbidden: it does not belong to the cluster.
            ProtocolError: it does not speak this protocol.
        """
        until_s = time.monotonic() + PROVE_S
        side = _credentials(credential, name).accept()
        let_in(sock, side, until_s)
        return cls._proven(sock, side.channel)

    @classmethod
    def _proven(cls, sock: socket.socket, channel: Channel | None) -> SealedLink:
        assert channel is not None
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return cls(sock, channel)

    def send(self, data: bytes) -> None:
        """Send some bytes, at most 64 KiB. Raises OSError when the other end has gone."""
        sealed = b"".join(self._channel.sent.begin().seal([memoryview(data)]))
        send(self._socket, sealed)

    def receive(self) -> bytes:
        """Return the next bytes that were sent; empty: the other end has gone.

        Raises:
            OSError: the connection is broken.
            ProtocolError: the bytes were altered on their way.
        """
        sealed = receive(self._socket, _MOST_BYTES + TAG_BYTES)
        if sealed is None:
            return b""
        whole = memoryview(bytearray(sealed))
        data = whole[:-TAG_BYTES]
        self._channel.received.begin().open(data, whole[-TAG_BYTES:])
        return bytes(data)

    def relay(self, local: socket.socket) -> None:
        """Forward bytes in both directions until one end has gone; then close both."""
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
        """Shut the connection, so that both ends find the other gone. Any thread may call this."""
        _shut(self._socket)

    def close(self) -> None:
        """Close a link that nobody relays."""
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
