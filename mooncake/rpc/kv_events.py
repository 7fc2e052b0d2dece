"""Publishes block events in vLLM's format, for routers outside the cluster. A PUB socket sends
them, and a ROUTER socket replays what a subscriber missed. A gateway owns one publisher; its thread
owns the sockets.

A message is [topic, number (8 bytes, big-endian), batch]; a batch is msgpack [time, events, 0] (the
format of vLLM 0.32). A replay request is [empty, first number]; the answers are [empty, topic,
number, batch] and in the end [empty, empty, -1, empty].
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from mooncake.base import ConfigError
from mooncake.base.block_events.kv_events import KvEvent, KvEventsConfig
from mooncake.base.mailbox import Mailbox
from mooncake.base.threads import VitalThread

MAX_QUEUED = 100_000
"""Batches that may wait for the thread. Further ones are dropped; subscribers see a gap in the
numbers.
"""
MAX_UNREAD = 100_000
"""Batches that wait for a slow subscriber; ZeroMQ drops what comes on top."""
MAX_REPLAY_BYTES = 64
"""Longest request for a replay: it holds one number."""
LINGER_MS = 500
"""How long `close` waits for subscribers to read what was sent."""
END = (-1).to_bytes(8, "big", signed=True)

logger = logging.getLogger(__name__)


class KvEventPublisher:
    """Publishes batches of events in order, numbered from 0 on."""

    def __init__(self, config: KvEventsConfig, now: Callable[[], float]) -> None:
        """Bind the sockets. now: seconds since 1970.

        Raises:
            ConfigError: an endpoint cannot be bound; the message names it.
        """
        self._now = now
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(MAX_UNREAD)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_REPLAY_BYTES)
        self._replay.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)  # one whole replay an asker
        try:
            self.endpoint = _bound(self._publisher, "endpoint", config.endpoint)
            self.replay_endpoint = None
            if config.replay_endpoint is not None:
                self.replay_endpoint = _bound(
                    self._replay, "replay_endpoint", config.replay_endpoint
                )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: Mailbox[tuple[bytes, bytes]] = Mailbox(MAX_QUEUED)
        self._next_no = self._num_dropped = 0
        self._ends = False
        self._thread = VitalThread(self._run, "kv-events")
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Publish one batch. Never waits. Call it in the gateway's thread only."""
        number = self._next_no.to_bytes(8, "big")
        self._next_no += 1  # a dropped batch has a number too: subscribers see the gap
        if self._queue.put((number, self._encoder.encode((self._now(), events, 0)))):
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            logger.warning("block events are dropped: %d batches wait to be published", MAX_QUEUED)

    def close(self) -> None:
        """Publish what is queued and free the sockets."""
        self._ends = True
        self._queue.ring()
        self._thread.join()
        self._queue.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue.fileno(), zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while not self._ends:
            ready = dict(poller.poll())
            self._publish_queued()
            if self._replay in ready:
                self._answer_replay()
        self._publish_queued()
        self._context.destroy(linger=LINGER_MS)

    def _publish_queued(self) -> None:
        for number, batch in self._queue.receive():
            self._kept.append((number, batch))
            self._publisher.send_multipart((self._topic, number, batch))

    def _answer_replay(self) -> None:
        asker, *rest = self._replay.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != len(END):
            return  # this is not a request for a replay
        for number, batch in self._kept:
            if number >= rest[1]:
                self._replay.send_multipart((asker, b"", self._topic, number, batch))
        self._replay.send_multipart((asker, b"", b"", END, b""))


def _bound(socket: zmq.Socket[bytes], name: str, address: str) -> str:
    """Bind `socket` and return its address, with the port that the system gave."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"kv-events-config: {name}: {address}: {error}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
