"""The owner's side of shared memory: hands our regions to proven clients on this host.

Lives in one I/O loop; only its pages are also touched by threads that withdraw a region, or ask
whether a grant is in a client's hands.
"""

from __future__ import annotations

import logging
import socket
import threading

from mooncake.base.errors import ProtocolError
from mooncake.telemetry.audit import audit
from mooncake.transfer.net.handshake import AcceptingSide, Credentials, PeerIdentity
from mooncake.transfer.net.io_loop import HUNG_UP, READABLE, IoLoop
from mooncake.transfer.net.listener import Listener
from mooncake.transfer.net.session import HANDSHAKE_S
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.shm import wire

_LOG = logging.getLogger(__name__)
_MAX_SESSIONS = 1024


class ShmOwner:
    """Listens on an abstract Unix socket: no file is left behind when the process dies."""

    def __init__(self, credentials: Credentials, table: RegionTable, loop: IoLoop) -> None:
        self._table = table
        self._loop = loop
        self._lock = threading.Lock()
        self._page = wire.StatePage()
        self._hands: dict[int, wire.Hands] = {}
        """Of the clients that may copy, by our end of their pipe."""
        self._closed = False
        name = f"mooncake-{credentials.ids.hex(8)}"
        self.endpoint = f"@{name}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(f"\0{name}")
        sock.listen(128)
        table.watch_withdrawals(self._withdraw)
        self.listener: Listener[ShmSession] = Listener(
            sock,
            loop,
            "shared-memory",
            _MAX_SESSIONS,
            credentials.standing,
            lambda accepted: ShmSession(self, accepted, loop, credentials.accept()),
        )

    def _withdraw(self, region_id: int) -> None:
        with self._lock:
            if not self._closed:
                self._page.withdraw(region_id)

    def welcome(self, sock: socket.socket, answer: bytes) -> None:
        """Send the end of a handshake, and the pages by which we are understood; in the loop."""
        with self._lock:
            if self._closed:
                return
            hands = wire.Hands()
            fds = [self._page.fd, self._table.words.fd, hands.fd, hands.pipe]
            # Watched before they are sent: when that fails, the pipe hangs up at once.
            self._hands[hands.heard] = hands
            self._loop.add(hands.heard, 0, lambda _events: self._let_go(hands))
            try:
                socket.send_fds(sock, [answer], fds)
            finally:
                hands.given()

    def _let_go(self, hands: wire.Hands) -> None:
        """Forget a client that can copy no more; in the loop."""
        self._loop.remove(hands.heard)
        with self._lock:
            self._hands.pop(hands.heard, None)
        hands.close()

    def is_held(self, grant: int) -> bool:
        """Whether a client copies by a grant, or stands still in the middle of that."""
        with self._lock:
            return any(hands.hold(grant) for hands in self._hands.values())

    def hand_out(self, sock: socket.socket, ask: wire.OpenRegion) -> None:
        """Answer a client that asks for a region."""
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
                    opened = wire.RegionOpened(
                        ask.region_id, region.num_bytes, slot, region.guarded
                    )
                    socket.send_fds(sock, [wire.CODEC.encode(opened)], [region.fd])
                    return
                reason, unshared = "too many regions are shared", True
        sock.send(wire.CODEC.encode(wire.RegionRefused(ask.region_id, reason, unshared)))

    def close(self) -> None:
        """Mark all regions as gone at once; sessions and the listener go when the loop turns."""
        with self._lock:
            self._closed = True
            self._page.close()
        self._loop.post(self._hang_up)

    def _hang_up(self) -> None:
        for session in self.listener.close():
            session.close()
        for hands in list(self._hands.values()):
            self._let_go(hands)


class ShmSession:
    """The connection of one client on this host. Made in the loop, which it lives in."""

    def __init__(
        self, owner: ShmOwner, sock: socket.socket, loop: IoLoop, handshake: AcceptingSide
    ) -> None:
        self._owner = owner
        self._sock = sock
        self.loop = loop
        self._handshake = handshake
        self._closed = False
        loop.add(sock.fileno(), READABLE, self._on_event)
        self._timer = loop.call_later(HANDSHAKE_S, self._on_silence)

    @property
    def identity(self) -> PeerIdentity | None:
        return self._handshake.identity

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
                self._owner.hand_out(self._sock, wire.CODEC.decode_ask(data))
        except BlockingIOError:
            self.close()  # a client that asks and does not listen
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
            audit("proof_failed", proof="transfer", reason=self._handshake.refusal)
            self.close()

    def close(self) -> None:
        """Hang up."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self.loop.remove(self._sock.fileno())
            self._sock.close()
            self._owner.listener.forget(self)
