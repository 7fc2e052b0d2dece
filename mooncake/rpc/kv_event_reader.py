"""Reads the block events of other engines, in vLLM's format (`rpc.kv_events` describes it). One
thread owns the sockets of all engines; what it has read waits in a mailbox for its owner's loop.

Earlier releases of vLLM leave the topic out of their answers to replay requests: both are read.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from mooncake.base import ConfigError, ProtocolError
from mooncake.base.block_events.engine_events import EngineEvent, read_engine_events
from mooncake.base.mailbox import Mailbox
from mooncake.base.threads import VitalThread
from mooncake.rpc.kv_events import END

MAX_BATCH_BYTES = 16 << 20
MAX_UNREAD = 100_000
"""Batches of one engine that may wait for the thread. ZeroMQ drops further ones, which is a gap."""
MAX_TAKEN = 1000
"""Batches that are taken from one socket in one turn: others have theirs, however many come."""
MAX_NEWS = 10_000
"""Batches that may wait for the owner's loop. Further ones are dropped, which is a gap, too."""
MAX_HELD = 10_000
"""Batches of one engine that may wait for the end of a replay."""
REPLAY_S = 5.0
"""A replay that has not ended after this long ends with what has come."""
LOOK_MS = 500
NUMBER_BYTES = 8

logger = logging.getLogger(__name__)


class EventSource(NamedTuple):
    """Where one process of an engine publishes."""

    engine: str
    """The name of the engine. Several processes of one engine may publish apart."""
    endpoint: str
    replay_endpoint: str | None = None


class EventNews(NamedTuple):
    """Events of one source, in their order."""

    source: EventSource
    events: list[EngineEvent] | None
    """None: some events are lost, so what was said before may be wrong."""


class EventOrder:
    """Puts the batches of one source in order, and says when missed ones must be asked for. Pure.

    Its methods return what the reader can use now: batches, and None where some are lost.
    """

    def __init__(self, *, can_replay: bool) -> None:
        self._can_replay = can_replay
        self.restart()

    def restart(self) -> None:
        """Begin again: the caller has forgotten all that it was told."""
        self._next: int | None = 0 if self._can_replay else None
        """The number of the next batch; None: any."""
        self.asks_from = self._next
        """The number from which on a replay is wanted; None: none is."""
        self._replayed: dict[int, bytes] = {}
        self._held: deque[tuple[int, bytes]] = deque(maxlen=MAX_HELD)

    def live(self, number: int, batch: bytes) -> list[bytes | None]:
        """Take a batch as it was published."""
        if self.asks_from is not None:
            self._held.append((number, batch))
            return []
        if self._next is None or number == self._next:
            self._next = number + 1
            return [batch]
        begins_anew = number < self._next
        if not self._can_replay:
            self._next = number + 1
            return [None, batch]
        self._held.append((number, batch))
        if begins_anew:  # the engine's process is another one
            self._next = 0
        self.asks_from = self._next
        return [None] if begins_anew else []

    def replayed(self, number: int, batch: bytes) -> None:
        """Take a batch of a replay."""
        is_asked = self.asks_from is not None and number >= self.asks_from
        if is_asked and len(self._replayed) < MAX_UNREAD:
            self._replayed[number] = batch

    def end_replay(self) -> list[bytes | None]:
        """Take what a replay has brought, and what was published meanwhile."""
        if self.asks_from is None:
            return []
        assert self._next is not None
        held, self._held = list(self._held), deque(maxlen=MAX_HELD)
        found, self._replayed = self._replayed, {}
        self.asks_from = None
        if held and not found and held[-1][0] < self._next:  # the engine has begun anew
            self._next = self.asks_from = 0
            anew = (at for at in range(len(held)) if at == 0 or held[at][0] <= held[at - 1][0])
            self._held.extend(held[max(anew) :])
            return [None]
        usable: list[bytes | None] = []
        for number, batch in (*sorted(found.items()), *held):
            if number < self._next:
                continue  # it came twice
            if number > self._next:
                usable.append(None)
            usable.append(batch)
            self._next = number + 1
        return usable


class _Reader:
    """The sockets of one source. Its thread alone calls it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource) -> None:
        self.source = source
        self.order = EventOrder(can_replay=source.replay_endpoint is not None)
        self.asked_s: float | None = None
        """When the replay was asked for that has not ended; None: there is none."""
        self.live = context.socket(zmq.SUB)
        self.replay: zmq.Socket[bytes] | None = None
        try:
            self.live.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            self.live.set_hwm(MAX_UNREAD)
            self.live.setsockopt(zmq.SUBSCRIBE, b"")
            self.live.connect(source.endpoint)
            if source.replay_endpoint is not None:
                self.replay = context.socket(zmq.DEALER)
                self.replay.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
                self.replay.set_hwm(MAX_UNREAD)
                self.replay.connect(source.replay_endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"engine-events: {source.engine}: cannot connect to {source.endpoint} and "
                f"{source.replay_endpoint}: {error}"
            ) from None

    def read(self) -> list[bytes | None]:
        """Return what can be used of all that has come."""
        usable: list[bytes | None] = []
        for frames in _received(self.live):
            if len(frames) == 3 and len(frames[1]) == NUMBER_BYTES:
                usable += self.order.live(int.from_bytes(frames[1], "big"), frames[2])
        for frames in _received(self.replay) if self.replay is not None else ():
            if len(frames) < 3 or len(frames[-2]) != NUMBER_BYTES:
                continue
            if frames[-2] == END:
                usable += self._ended()
            else:
                self.order.replayed(int.from_bytes(frames[-2], "big"), frames[-1])
        return usable

    def ask(self, now: float) -> list[bytes | None]:
        """Ask for what is missing, once; end a replay that takes too long."""
        if self.order.asks_from is None or self.replay is None:
            return []
        if self.asked_s is None:
            self.asked_s = now
            number = self.order.asks_from.to_bytes(NUMBER_BYTES, "big")
            try:
                self.replay.send_multipart((b"", number), zmq.NOBLOCK)
            except zmq.Again:
                logger.debug("%s: the replay endpoint takes no request", self.source.engine)
            return []
        return self._ended() if now - self.asked_s > REPLAY_S else []

    def restart(self) -> None:
        self.order.restart()
        self.asked_s = None

    def _ended(self) -> list[bytes | None]:
        self.asked_s = None
        return self.order.end_replay()


class KvEventReader:
    """Reads the events of several sources, from the first that each still has."""

    def __init__(
        self, sources: Sequence[EventSource], now: Callable[[], float] = time.monotonic
    ) -> None:
        """Connect to all sources. One that is not there yet is read once it is.

        Raises:
            ConfigError: an address cannot be one; the message names it.
        """
        self._now = now
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._readers = [_Reader(self._context, source) for source in sources]
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.news: Mailbox[EventNews] = Mailbox(MAX_NEWS)
        self._orders: Mailbox[str] = Mailbox()
        self._lost: set[EventSource] = set()
        """Sources of which the mailbox could not take a batch."""
        self._warned: set[EventSource] = set()
        self._ends = False
        self._thread = VitalThread(self._run, "kv-event-reader")
        self._thread.start()

    def restart(self, engine: str) -> None:
        """Read an engine's events again, from the oldest that it still has. The next news says that
        events were lost; those that are read again follow. Any thread may call this.
        """
        self._orders.put(engine)

    def close(self) -> None:
        """Free the sockets and the mailbox."""
        self._ends = True
        self._orders.ring()
        self._thread.join()
        self._orders.close()
        self.news.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._orders.fileno(), zmq.POLLIN)
        for each in self._readers:
            poller.register(each.live, zmq.POLLIN)
            if each.replay is not None:
                poller.register(each.replay, zmq.POLLIN)
        while not self._ends:
            self._turn()
            is_asking = any(each.asked_s is not None for each in self._readers)
            poller.poll(LOOK_MS if is_asking else None)
        self._context.destroy(linger=0)

    def _turn(self) -> None:
        anew = set(self._orders.receive())
        for each in self._readers:
            if each.source.engine in anew:
                each.restart()
                self._tell(each.source, None)
            for batch in (*each.read(), *each.ask(self._now())):
                self._tell(each.source, batch)

    def _tell(self, source: EventSource, batch: bytes | None) -> None:
        try:
            events = None if batch is None else read_engine_events(batch)
        except ProtocolError as error:
            if source not in self._warned:
                self._warned.add(source)
                logger.warning(
                    "%s publishes block events that cannot be read: %s", source, error.message
                )
            return
        if source in self._lost and self.news.put(EventNews(source, None)):
            self._lost.discard(source)
        if source in self._lost or not self.news.put(EventNews(source, events)):
            self._lost.add(source)


def _received(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Return messages that have come, at most `MAX_TAKEN`."""
    found: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while len(found) < MAX_TAKEN:
            found.append(socket.recv_multipart(zmq.NOBLOCK))
    return found
