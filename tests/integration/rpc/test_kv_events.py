"""Block events on the wire, as a subscriber written for vLLM reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from mooncake.base import ConfigError
from mooncake.base.block_events.kv_events import BlockRemoved, BlockStored, KvEventsConfig
from mooncake.rpc.kv_events import END, KvEventPublisher

STORED = BlockStored(
    block_hashes=[2**64 - 1, 5], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2,
    medium="GPU",
)  # fmt: skip
REMOVED = BlockRemoved(block_hashes=[5], medium="GPU")
ANY_PORT = "tcp://127.0.0.1:*"
WAIT_MS = 10_000


class Readers:
    """Sockets of subscribers, closed together."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def connect(self, kind: int, address: str | None) -> zmq.Socket[bytes]:
        assert address is not None
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.connect(address)
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def readers() -> Iterator[Readers]:
    readers = Readers()
    yield readers
    readers.close()


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    config = KvEventsConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT, topic="kv", buffer_steps=3)
    publisher = KvEventPublisher(config, lambda: 12.5)
    yield publisher
    publisher.close()


def subscribed(readers: Readers, publisher: KvEventPublisher) -> zmq.Socket[bytes]:
    """Return a subscriber that misses nothing from now on."""
    socket = readers.connect(zmq.SUB, publisher.endpoint)
    socket.setsockopt(zmq.RCVTIMEO, 50)
    while True:
        publisher.publish([REMOVED])
        try:
            socket.recv_multipart()
        except zmq.Again:
            continue
        break
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    return socket


def replayed(readers: Readers, publisher: KvEventPublisher, first: int) -> list[int]:
    """Return the numbers of the batches that a replay from `first` on holds."""
    socket = readers.connect(zmq.DEALER, publisher.replay_endpoint)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    numbers: list[int] = []
    while True:
        empty, topic, number, batch = socket.recv_multipart()
        assert empty == b""
        if number == END:
            assert topic == batch == b""
            return numbers
        assert topic == publisher._topic
        numbers.append(int.from_bytes(number, "big"))


def test_a_batch_is_topic_number_and_msgpack(readers: Readers, publisher: KvEventPublisher) -> None:
    socket = subscribed(readers, publisher)
    publisher.publish([STORED, REMOVED])
    publisher.publish([REMOVED])
    frames = [socket.recv_multipart() for _ in range(2)]
    while msgspec.msgpack.decode(frames[0][2])[1][0]["type"] != "BlockStored":
        frames = [frames[1], socket.recv_multipart()]  # one of those sent until it heard
    (topic, number, batch), (_, next_number, _) = frames
    assert topic == b"kv"
    assert int.from_bytes(next_number, "big") == int.from_bytes(number, "big") + 1
    assert msgspec.msgpack.decode(batch) == [
        12.5,
        [
            {
                "type": "BlockStored", "block_hashes": [2**64 - 1, 5], "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4], "block_size": 2, "medium": "GPU", "lora_id": None,
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"},
        ],
        0,
    ]  # fmt: skip


def test_what_was_missed_can_be_asked_for(readers: Readers, publisher: KvEventPublisher) -> None:
    for _ in range(5):
        publisher.publish([REMOVED])
    wanted = [2, 3, 4]  # three are kept
    while (numbers := replayed(readers, publisher, 0)) != wanted:
        assert len(numbers) < 3 or numbers[-1] < 4  # its thread is not so far yet
    assert replayed(readers, publisher, 4) == [4]
    assert replayed(readers, publisher, 9) == []


def test_other_requests_are_ignored(readers: Readers, publisher: KvEventPublisher) -> None:
    socket = readers.connect(zmq.DEALER, publisher.replay_endpoint)
    for frames in ((b"",), (b"", b"\x00"), (b"a", b"b", b"c"), (b"", b"x" * 1000)):
        socket.send_multipart(frames)
    assert replayed(readers, publisher, 0) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"publisher": "kafka"}, "publisher: 'kafka' is not known"),
        ({"endpoint": "5557"}, "endpoint: '5557' does not begin with"),
        ({"replay_endpoint": "udp://x"}, "replay_endpoint: 'udp://x' does not begin with"),
        ({"buffer_steps": 0}, "buffer_steps: 0 is not a whole number"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KvEventsConfig(**settings)


def test_an_address_in_use_is_named(publisher: KvEventPublisher) -> None:
    config = KvEventsConfig(endpoint=publisher.endpoint)
    with pytest.raises(ConfigError, match=r"kv-events-config: endpoint: tcp://127.0.0.1.*in use"):
        KvEventPublisher(config, lambda: 0.0)


def test_a_whole_replay_reaches_a_slow_reader(readers: Readers) -> None:
    """ZeroMQ drops what is over a bound, by default 1,000 messages."""
    config = KvEventsConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT, buffer_steps=3000)
    publisher = KvEventPublisher(config, lambda: 0.0)
    for _ in range(3000):
        publisher.publish([STORED])
    while (numbers := replayed(readers, publisher, 0)) != list(range(3000)):
        assert len(numbers) < 3000  # its thread is not so far yet
    publisher.close()


def test_a_dropped_batch_leaves_a_gap_in_the_numbers(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.rpc.kv_events.MAX_QUEUED", 0)
    config = KvEventsConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT)
    publisher = KvEventPublisher(config, lambda: 0.0)
    publisher.publish([STORED])
    monkeypatch.setattr(publisher._queue, "_bound", 10)
    publisher.publish([STORED])
    while (numbers := replayed(readers, publisher, 0)) != [1]:
        assert numbers == []
    publisher.close()
