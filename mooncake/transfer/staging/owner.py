"""The owner's side of staging: it lends windows to proven clients, and copies between them and the
device.

All of it lives in the staging loop, except the copies, which post their end to the loop. What a
client has opened ends with its session; windows that it may still touch rest first. The client
fills a window by a grant for that window. The window lands only while the grant of the device's
memory is not revoked.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from mooncake.base.errors import ProtocolError, TransferError
from mooncake.transfer.device import HOST
from mooncake.transfer.grants import Fence, Resting
from mooncake.transfer.net.endpoint import ListenAddress, Protection
from mooncake.transfer.net.handshake import AcceptingSide, Credentials, PeerIdentity
from mooncake.transfer.net.io_loop import IoLoop, Timer
from mooncake.transfer.net.listener import Listener, tcp_listener
from mooncake.transfer.net.session import OwnerStream, Welcome
from mooncake.transfer.regions import DeviceRegion, RangeRefused, RegionTable
from mooncake.transfer.staging import wire
from mooncake.transfer.staging.slots import Arena, FairSlots


class State(Enum):
    """The state of a window."""

    WAITING = "for a slot, or for the device's own work"
    COPYING = "a copy is in hand"
    GRANTED = "the client has it"


@dataclass(slots=True, eq=False)
class Window:
    """One slice of one client, and the slot that is lent for it."""

    ticket: int
    region: DeviceRegion
    ranges: Sequence[tuple[int, int]]
    is_write: bool
    memory_grant: int = 0
    """The grant by which the device's memory is written."""
    slot: int | None = None
    grant: int = 0
    """The grant by which the client fills the window."""
    state: State = State.WAITING
    dropped: bool = False
    """True if the client has given it back."""

    @property
    def num_bytes(self) -> int:
        """Length of the slice."""
        return sum(length for _, length in self.ranges)


class StagingOwner:
    """Serves the control sessions of clients."""

    def __init__(
        self,
        listen: ListenAddress,
        credentials: Credentials,
        table: RegionTable,
        arena: Arena,
        loop: IoLoop,
        fence: Callable[[int], Fence],
    ) -> None:
        """Raises ConfigError when no port of `listen` can be bound."""
        self.table = table
        self.arena = arena
        self.loop = loop
        limits = arena.limits
        self.compares = limits.compares and credentials.protection is not Protection.NONE
        """True if what passes through windows is compared: the protocols may not protect it."""
        self.windows = FairSlots(arena.limits.num_windows)
        self.num_copying = 0
        self._landing: Counter[int] = Counter()
        """Number of copies to devices in hand, by the grant of their memory."""
        self._lock = threading.Lock()
        self._resting: Resting[list[int]] = Resting(fence, arena.limits.rest_s, self._wake)
        self._timer: Timer | None = None
        sock = tcp_listener(listen)
        self.port: int = sock.getsockname()[1]
        self.listener: Listener[StagingSession] = Listener(
            sock,
            loop,
            "staging",
            arena.limits.num_sessions,
            credentials.standing,
            lambda accepted: StagingSession(self, accepted, credentials.accept()),
        )
        """Keeps sessions that have ended while one of their copies is in hand."""

    def fence(self, identity: PeerIdentity, then: Callable[[], None]) -> None:
        """End the earlier sessions that a client has named. Call `then` when none of their copies
        is in hand.
        """
        former = self.listener.fenced(identity)
        for session in former:
            session.close()
        left = [session for session in former if session.num_copying]

        def look() -> None:
            if not any(session.num_copying for session in left):
                then()

        for session in left:
            session.on_idle = look
        if not left:
            then()

    def is_landing(self, grant: int) -> bool:
        """Return whether a window is copied to a device by this grant; from any thread."""
        with self._lock:
            return self._landing[grant] > 0

    def count_landing(self, grant: int, change: int) -> None:
        """Note that a copy to a device is in hand (1), or has ended (-1)."""
        with self._lock:
            self._landing[grant] += change
            if not self._landing[grant]:
                del self._landing[grant]

    def rest(self, window: Window) -> None:
        """Keep a granted window of a lost client out of use while it may be touched."""
        assert window.slot is not None
        self.windows.rest(window.slot)
        if window.is_write:
            self.table.grants.revoke(window.grant)
            self._resting.add(window.grant, [window.slot], time.monotonic())
            self._look()
        else:  # what the client reads late is useless, but must not be another's
            wake = functools.partial(self.windows.wake, window.slot)
            self.loop.call_later(self.arena.limits.rest_s, wake)

    def _look(self) -> None:
        """Put windows back into use that nobody can write to any more."""
        now = time.monotonic()
        look_s = self._resting.tick(now)
        if self._timer is not None:
            self._timer.cancel()
        if look_s is not None:
            self._timer = self.loop.call_later(look_s - now, self._look)

    def _wake(self, slots: list[int]) -> None:
        for slot in slots:
            self.windows.wake(slot)

    def close(self) -> None:
        """Refuse clients and end what they have opened. Copies in hand still run to their end."""
        for session in self.listener.close():
            session.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when a window is lost, or held without a holder."""
        self.windows.check_integrity()
        held = [slot for session in self.listener.sessions for slot in session.slots()]
        assert len(held) == len(set(held)) == self.windows.num_held, f"windows {held}"


class StagingSession:
    """One client's control session and its windows."""

    def __init__(self, owner: StagingOwner, sock: socket.socket, handshake: AcceptingSide) -> None:
        self.loop = owner.loop
        self.num_copying = 0
        self.on_idle: Callable[[], None] = lambda: None
        """Called when a copy has ended."""
        self._owner = owner
        self._windows: dict[int, Window] = {}
        self._stream = OwnerStream("staging", owner.loop, sock, handshake, self)

    @property
    def identity(self) -> PeerIdentity | None:
        return self._stream.identity

    def slots(self) -> list[int]:
        """Return the windows held for this client."""
        return [window.slot for window in self._windows.values() if window.slot is not None]

    # ------------------------------------------------------------ messages

    def on_proven(self, identity: PeerIdentity, welcome: Welcome) -> None:
        """Fence the client's earlier sessions before it is let in."""
        self._owner.fence(identity, functools.partial(welcome, ()))

    def on_frame(self, body: bytes) -> None:
        """Take one message. Raises ProtocolError."""
        ask = wire.CODEC.decode_ask(body)
        if isinstance(ask, wire.AskRegion):
            self._send(self._facts(ask.region_id))
        elif isinstance(ask, wire.Open):
            self._open(ask)
        elif isinstance(ask, wire.Land):
            self._land(ask)
        elif isinstance(ask, wire.Drop):
            self._drop(ask.ticket)
        else:
            self._sync(ask)

    def _send(self, answer: wire.Answer) -> None:
        self._stream.send(wire.CODEC.encode(answer))

    def _facts(self, region_id: int) -> wire.RegionFacts:
        region = self._owner.table.get_device(region_id)
        window_bytes = self._owner.arena.limits.slot_bytes
        if region is None:
            return wire.RegionFacts(region_id, HOST, [], window_bytes)
        return wire.RegionFacts(
            region_id, region.device, sorted(region.protocols), window_bytes, self._owner.compares
        )

    # ------------------------------------------------------------ windows

    def _device(self, region_id: int, ranges: Sequence[tuple[int, int]]) -> DeviceRegion:
        """Return the region, which must hold the ranges. Raises RangeRefused."""
        region = self._owner.table.get_device(region_id)
        if region is None:
            raise RangeRefused(f"region {region_id} is not registered")
        for offset, length in ranges:
            region.check(offset, length)
        return region

    def _open(self, ask: wire.Open) -> None:
        limits = self._owner.arena.limits
        if ask.ticket in self._windows or len(self._windows) >= limits.max_windows_asked:
            raise ProtocolError("the client asked for more windows than it may hold")
        try:
            region = self._device(ask.region_id, ask.ranges)
            if ask.is_write:
                self._owner.table.permits([region], ask.grant)
        except RangeRefused as error:
            self._send(wire.Refused(ask.ticket, error.message))
            return
        window = Window(ask.ticket, region, ask.ranges, ask.is_write, ask.grant)
        if window.num_bytes > limits.slot_bytes:
            self._send(wire.Refused(ask.ticket, f"a window has {limits.slot_bytes} bytes"))
            return
        self._windows[ask.ticket] = window
        got = functools.partial(self._got, window)
        ready = functools.partial(self._owner.windows.ask, self, got)
        if ask.is_write and not ask.settled:
            self._settle(region, ready)
        else:
            ready()

    def _settle(self, region: DeviceRegion, then: Callable[[], None]) -> None:
        """Call `then` when the device's own work is done, unless the session has ended."""

        def settled(_error: str | None) -> None:
            if not self._stream.closed:
                then()

        region.memory.settle(self._posting(settled))

    def _posting(self, act: Callable[[str | None], None]) -> Callable[[str | None], None]:
        return lambda error: self.loop.post(lambda: act(error))

    def _got(self, window: Window, slot: int) -> None:
        if window.dropped or self._stream.closed:
            self._owner.windows.release(slot)
            self._windows.pop(window.ticket, None)
            return
        window.slot = slot
        if window.is_write:
            self._grant(window)
        else:
            self._copy(window, self._filled)

    def _copy(self, window: Window, then: Callable[[Window, str | None], None]) -> None:
        assert window.slot is not None
        window.state = State.COPYING
        self.num_copying += 1
        self._owner.num_copying += 1

        def ended(error: str | None) -> None:
            self.num_copying -= 1
            self._owner.num_copying -= 1
            then(window, error)
            if self._stream.closed and not self.num_copying:
                self._owner.listener.forget(self)
            self.on_idle()

        view = self._owner.arena.view(window.slot, window.num_bytes, is_window=True)
        window.region.copy(not window.is_write, window.ranges, view, self._posting(ended))

    def _grant(self, window: Window) -> None:
        assert window.slot is not None
        window.state = State.GRANTED
        arena = self._owner.arena
        offset = arena.offset(window.slot, is_window=True)
        checksum = 0 if window.is_write or not self._owner.compares else self._checksum(window)
        if window.is_write:
            try:
                window.grant = self._owner.table.grants.issue(window=True)
            except TransferError as error:
                self._filled(window, error.message)
                return
        region_id = arena.region.region_id
        self._send(wire.Granted(window.ticket, region_id, offset, checksum, window.grant))

    def _checksum(self, window: Window) -> int:
        assert window.slot is not None
        return wire.checksum_of(
            [self._owner.arena.view(window.slot, window.num_bytes, is_window=True)]
        )

    def _filled(self, window: Window, error: str | None) -> None:
        """Grant a window into which the device's bytes were copied, unless that copy failed."""
        if error is None and not window.dropped and not self._stream.closed:
            self._grant(window)
            return
        self._free(window)
        if error is not None:
            self._send(wire.Refused(window.ticket, error))

    def _land(self, ask: wire.Land) -> None:
        window = self._windows.get(ask.ticket)
        if window is None or not window.is_write or window.state is not State.GRANTED:
            raise ProtocolError("the client reported a window that it was not granted")
        self._owner.table.grants.revoke(window.grant)
        # Counted before it is looked at: whoever revokes the memory's grant sees one or the other.
        self._owner.count_landing(window.memory_grant, 1)
        try:
            if ask.checksum and ask.checksum != self._checksum(window):
                raise RangeRefused(wire.ALTERED)
            self._owner.table.permits([window.region], window.memory_grant)
        except RangeRefused as error:
            self._landed(window, error.message)
        else:
            self._copy(window, self._landed)

    def _landed(self, window: Window, error: str | None) -> None:
        self._owner.count_landing(window.memory_grant, -1)
        self._free(window)
        if error is not None:
            self._send(wire.Refused(window.ticket, error))
        else:
            self._send(wire.Done(window.ticket))

    def _drop(self, ticket: int) -> None:
        window = self._windows.get(ticket)
        if window is None:
            return
        window.dropped = True
        if window.state is State.GRANTED:
            self._free(window)

    def _free(self, window: Window) -> None:
        assert window.slot is not None
        if window.grant:
            self._owner.table.grants.revoke(window.grant)
        del self._windows[window.ticket]
        self._owner.windows.release(window.slot)

    # ------------------------------------------------------------ NICs that need no window

    def _sync(self, ask: wire.Settle | wire.Flush) -> None:
        done = functools.partial(self._send, wire.Done(ask.ticket))
        try:
            region = self._device(ask.region_id, ())
            if isinstance(ask, wire.Flush):
                region.memory.flush()
                done()
            else:
                self._settle(region, done)
        except TransferError as error:
            self._send(wire.Refused(ask.ticket, error.message))

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Close the session. Windows that the client may touch rest; a window being copied ends
        with its copy.
        """
        self._stream.close()
        slots = self._owner.windows
        slots.forget(self)
        for window in list(self._windows.values()):
            if window.state is State.COPYING:
                continue
            del self._windows[window.ticket]
            if window.slot is not None:
                self._owner.rest(window)
        if not self.num_copying:
            self._owner.listener.forget(self)
