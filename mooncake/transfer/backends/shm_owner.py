"""The owner's side of shared memory: hands our regions to peers of this host that prove themselves.

Lives in one I/O loop; only the state page is also touched by whoever withdraws a region.
"""

from __future__ import annotations

import logging
import socket
import threading

from mooncake.base.errors import ProtocolError
from mooncake.transfer.backends import shm_wire as wire
from mooncake.transfer.backends.io_loop import HUNG_UP, READABLE, IoLoop
from mooncake.transfer.backends.listener import Listener
from mooncake.transfer.handshake import AcceptingSide, Credentials
from mooncake.transfer.regions import RegionTable

_LOG = logging.getLogger(__name__)
_HANDSHAKE_S = 5.0
_MAX_SESSIONS = 1024


class ShmOwner:
    """Listens on an abstract Unix socket: no file is left behind, whatever happens to us."""

    def __init__(self, credentials: Credentials, table: RegionTable, loop: IoLoop) -> None:
        self._credentials = credentials
        self._table = table
        self._loop = loop
        self._lock = threading.Lock()
        self._page = wire.StatePage()
        self._closed = False
        self._sessions: set[OwnerSession] = set()
        name = f"mooncake-{credentials.ids.hex(8)}"
        self.endpoint = f"@{name}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(f"\0{name}")
        sock.listen(128)
        table.watch_withdrawals(self._withdraw)
        self._listener = Listener(
            sock, loop, "shared-memory", _MAX_SESSIONS, lambda: self.num_sessions, self._take
        )

    @property
    def num_sessions(self) -> int:
        """Peers connected now, proven or not."""
        return len(self._sessions)

    def _take(self, sock: socket.socket) -> OwnerSession:
        session = OwnerSession(self, sock, self._loop, self._credentials.accept())
        self._sessions.add(session)
        return session

    def _withdraw(self, region_id: int) -> None:
        with self._lock:
            if not self._closed:
                self._page.withdraw(region_id)

    def welcome(self, sock: socket.socket, answer: bytes) -> None:
        """Send the end of a handshake and the state page."""
        with self._lock:
            if not self._closed:
                socket.send_fds(sock, [answer], [self._page.fd])

    def hand_out(self, sock: socket.socket, ask: wire.OpenRegion) -> None:
        """Answer a peer that wants a region."""
        # Under the lock, which a withdrawal takes before it closes the region's descriptor.
        with self._lock:
            region = self._table.get(ask.region_id)
            if self._closed or region is None or not region.alive:
                reason, unshared = f"region {ask.region_id} is not registered", False
            elif region.fd is None:
                reason, unshared = f"region {ask.region_id} cannot be mapped by others", True
            else:
                slot = self._page.slot_of(ask.region_id)
                if slot is not None:
                    opened = wire.RegionOpened(ask.region_id, region.num_bytes, slot)
                    socket.send_fds(sock, [wire.encode(opened)], [region.fd])
                    return
                reason, unshared = "too many regions are shared", True
        sock.send(wire.encode(wire.RegionRefused(ask.region_id, reason, unshared)))

    def forget(self, session: OwnerSession) -> None:
        """A session has ended."""
        self._sessions.discard(session)

    def close(self) -> None:
        """Mark all regions as gone at once; sessions and the listener go when the loop turns."""
        with self._lock:
            self._closed = True
            self._page.close()
        self._loop.post(self._hang_up)

    def _hang_up(self) -> None:
        self._listener.close()
        for session in list(self._sessions):
            session.close()


class OwnerSession:
    """One peer of this host. Made in the loop, which it lives in."""

    def __init__(
        self, owner: ShmOwner, sock: socket.socket, loop: IoLoop, handshake: AcceptingSide
    ) -> None:
        self._owner = owner
        self._sock = sock
        self._loop = loop
        self._handshake = handshake
        self._closed = False
        self._loop.add(self._sock.fileno(), READABLE, self._on_event)
        self._timer = self._loop.call_later(_HANDSHAKE_S, self._on_silence)

    @property
    def is_stranger(self) -> bool:
        return self._handshake.identity is None and not self._closed

    def _on_silence(self) -> None:
        _LOG.warning("shared-memory peer dropped: no handshake in time")
        self.close()

    def _on_event(self, events: int) -> None:
        try:
            if events & HUNG_UP:
                self.close()
                return
            data = self._sock.recv(wire.MAX_MESSAGE_BYTES)
            if self._handshake.identity is None:
                self._on_handshake(data)
            else:
                self._owner.hand_out(self._sock, wire.decode_ask(data))
        except BlockingIOError:
            self.close()  # a peer that asks and does not listen
        except (OSError, ProtocolError) as error:
            _LOG.warning("shared-memory peer dropped: %s", error)
            self.close()

    def _on_handshake(self, data: bytes) -> None:
        answer = self._handshake.step(data)
        if self._handshake.identity is not None:
            self._owner.welcome(self._sock, answer)
            self._timer.cancel()
            return
        self._sock.send(answer)
        if self._handshake.refusal is not None:
            _LOG.warning("shared-memory peer refused: %s", self._handshake.refusal)
            self.close()

    def close(self) -> None:
        """Hang up."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self._loop.remove(self._sock.fileno())
            self._sock.close()
            self._owner.forget(self)
