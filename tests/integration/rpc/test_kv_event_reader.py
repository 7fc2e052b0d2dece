"""Block events of engines, read over real sockets: from their begin, after gaps, in both forms."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from mooncake.base import ConfigError
from mooncake.base.block_events.engine_events import ClearedBlocks, RemovedBlocks, StoredBlocks
from mooncake.base.block_events.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventsConfig,
)
from mooncake.rpc.kv_event_reader import EventNews, EventSource, KvEventReader, _received
from mooncake.rpc.kv_events import END, KvEventPublisher
from tests.support.waiting import LONG_S

SHORT_S = 0.05
"""How long a batch may take before the next one is published."""
ENGINE = "http://engine"


def removed(number: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[number], medium="GPU")


class Reading:
    """A reader, and the news that have come."""

    def __init__(self, *sources: EventSource) -> None:
        self.reader = KvEventReader(sources)
        self._came: list[EventNews] = []

    def next(self) -> EventNews:
        while not self._came:
            ready, _, _ = select.select([self.reader.news.fileno()], [], [], LONG_S)
            assert ready, "nothing comes"
            self._came += self.reader.news.receive()
        return self._came.pop(0)

    def publish(self, published: KvEventPublisher, first: int) -> list[Any]:
        """Publish removed blocks from `first` on until what was published is read: ZeroMQ drops
        what comes before a subscription, and the next batch shows the gap. Return what was read.
        """
        found: list[Any] = []
        for number in range(first, first + 1_000_000):
            published.publish([removed(number)])
            ready, _, _ = select.select([self.reader.news.fileno()], [], [], SHORT_S)
            while self._came or ready:
                found += self.numbers(1)
                ready, _, _ = select.select([self.reader.news.fileno()], [], [], 0)
            if found and found[-1] is not None:
                return found
        return found

    def numbers(self, count: int) -> list[Any]:
        """Return the blocks of the next batches with one removed block each."""
        found: list[Any] = []
        while len(found) < count:
            events = self.next().events
            if events is None:
                found.append(None)
            else:
                [event] = events
                assert isinstance(event, RemovedBlocks)
                found += event.block_hashes
        return found


@pytest.fixture
def home(tmp_path: Path) -> EventSource:
    return EventSource(ENGINE, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")


def publisher(source: EventSource, **settings: Any) -> KvEventPublisher:
    config = KvEventsConfig(
        endpoint=source.endpoint, replay_endpoint=source.replay_endpoint, **settings
    )
    return KvEventPublisher(config, lambda: 1.0)


def test_what_was_published_before_and_what_comes_are_read_in_order(home: EventSource) -> None:
    published = publisher(home, topic="kv")
    stored = BlockStored(
        block_hashes=[1, 2], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2,
        medium="GPU",
    )  # fmt: skip
    published.publish([AllBlocksCleared()])
    published.publish([stored, removed(1)])
    reading = Reading(home)
    assert reading.next() == EventNews(home, [ClearedBlocks()])
    assert reading.next().events == [
        StoredBlocks(
            block_hashes=[1, 2], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2,
            medium="GPU",
        ),
        RemovedBlocks(block_hashes=[1], medium="GPU"),
    ]  # fmt: skip
    found = reading.publish(published, 0)
    assert found == list(range(len(found)))
    reading.reader.close()
    published.close()


def test_after_a_restart_all_is_read_again(home: EventSource) -> None:
    published = publisher(home)
    for number in range(3):
        published.publish([removed(number)])
    reading = Reading(home)
    assert reading.numbers(3) == [0, 1, 2]
    reading.reader.restart("http://another")
    reading.reader.restart(ENGINE)
    assert reading.numbers(4) == [None, 0, 1, 2]
    reading.reader.close()
    published.close()


def test_an_engine_that_is_replaced_is_read_from_its_begin(home: EventSource) -> None:
    published = publisher(home)
    published.publish([removed(0)])
    published.publish([removed(1)])
    reading = Reading(home)
    assert reading.numbers(2) == [0, 1]
    published.close()
    another = publisher(home)
    another.publish([removed(10)])
    reading.reader.restart(ENGINE)  # as the gateway does when the engine is up again
    found = reading.numbers(2)
    while found[-1] != 10:  # the first replay may have gone with the old process
        reading.reader.restart(ENGINE)
        found += reading.numbers(1)
    assert None in found
    reading.reader.close()
    another.close()


def test_replays_without_a_topic_are_read(home: EventSource) -> None:
    """As earlier releases of vLLM send them."""
    context: zmq.Context[Any] = zmq.Context()
    events, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    assert home.replay_endpoint is not None
    events.bind(home.endpoint)
    replay.bind(home.replay_endpoint)
    reading = Reading(home)
    asker, empty, first = replay.recv_multipart()
    assert (empty, first) == (b"", bytes(8))
    batch = msgspec.msgpack.encode([1.0, [["BlockRemoved", [7], "GPU"]]])
    for frames in ((b"odd",), (bytes(8), batch), (END, b"")):
        replay.send_multipart((asker, b"", *frames))
    assert reading.numbers(1) == [7]
    reading.reader.close()
    context.destroy(linger=0)


def test_a_batch_that_cannot_be_read_is_left_out_and_told_once(
    home: EventSource, caplog: pytest.LogCaptureFixture
) -> None:
    published = publisher(home)
    for _ in range(3):
        published._next_no += 1
        published._queue.put(((published._next_no - 1).to_bytes(8, "big"), b"\xc1"))
    published.publish([removed(3)])
    reading = Reading(home)
    assert reading.numbers(1) == [3]
    assert caplog.text.count("publishes block events that cannot be read") == 1
    reading.reader.close()
    published.close()


def test_a_full_mailbox_is_a_loss(home: EventSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.rpc.kv_event_reader.MAX_NEWS", 2)
    reading = Reading()  # its thread reads nothing
    batches = [msgspec.msgpack.encode((1.0, [removed(number)], 0)) for number in range(5)]
    for batch in batches[:4]:
        reading.reader._tell(home, batch)
    assert reading.numbers(2) == [0, 1]
    reading.reader._tell(home, batches[4])
    assert reading.numbers(2) == [None, 4]
    reading.reader.close()


def test_a_flood_of_batches_is_taken_in_turns(
    home: EventSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.rpc.kv_event_reader.MAX_TAKEN", 3)

    class Flood:
        def recv_multipart(self, flags: int) -> list[bytes]:
            return [b""]

    assert len(_received(Flood())) == 3  # type: ignore[arg-type]
    published = publisher(home)
    for number in range(20):
        published.publish([removed(number)])
    reading = Reading(home)
    assert reading.numbers(20) == list(range(20))
    reading.reader.close()
    published.close()


def test_an_address_that_cannot_be_one_is_named() -> None:
    with pytest.raises(ConfigError, match="engine-events: http://engine: cannot connect to tcp://"):
        KvEventReader([EventSource(ENGINE, "tcp://nothing")])
