"""A TCP relay on loopback: passes bytes on, records them, or holds them back in one direction."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.waiting import LONG_S

_PIECE_BYTES = 65_536


@dataclass
class Passage:
    """One connection through a relay."""

    client: socket.socket
    client_port: int
    """The port by which the process that connected can be found."""
    server: socket.socket | None = None
    sent: bytearray = field(default_factory=bytearray)
    """What the client sent, if the relay records."""
    received: bytearray = field(default_factory=bytearray)

    def close(self) -> None:
        """End both halves."""
        for sock in (self.client, self.server):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()


class Relay:
    """Passes connections to a port of this machine on, unless `is_cut` says that this one is not.

    A cut connection gets no answer, and nothing of it arrives: as over a link that loses packets.
    """

    def __init__(
        self,
        target: int | Callable[[], tuple[str, int] | None],
        *,
        target_host: str = "127.0.0.1",
        host: str = "127.0.0.1",
        port: int = 0,
        records: bool = False,
        is_cut: Callable[[Passage], bool] = lambda _passage: False,
    ) -> None:
        """`target`: a port, or who names an address for each connection; None refuses it."""
        self._target = target if callable(target) else lambda: (target_host, target)
        self._records = records
        self._is_cut = is_cut
        self._lock = threading.Lock()
        self.connections: list[Passage] = []
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *words: object) -> None:
        thread = threading.Thread(target=work, args=words, name="relay", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, address = self._listener.accept()
            except OSError:
                return
            passage = Passage(client, address[1])
            with self._lock:
                if self._closed:
                    passage.close()
                    return
                self.connections.append(passage)
            self._start(self._serve, passage)

    def _serve(self, passage: Passage) -> None:
        if self._is_cut(passage):
            return
        try:
            if (target := self._target()) is None:
                raise ConnectionRefusedError
            server = passage.server = socket.create_connection(target)
        except OSError:
            passage.close()
            return
        self._start(self._pump, server, passage.client, passage, passage.received)
        self._pump(passage.client, server, passage, passage.sent)

    def _pump(
        self, source: socket.socket, target: socket.socket, passage: Passage, record: bytearray
    ) -> None:
        try:
            while data := source.recv(_PIECE_BYTES):
                if self._records:
                    record += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            passage.close()

    def hang_up(self) -> None:
        """Break all connections; those that come next are looked at anew."""
        with self._lock:
            passages = list(self.connections)
            if not self._records:
                self.connections.clear()
        for passage in passages:
            passage.close()

    def close(self) -> None:
        """Stop, and break all connections."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(LONG_S)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
