"""How block events reach the engines of a gateway: a few at a time, and past what is wrong."""

from __future__ import annotations

import select
from typing import Any

from mooncake.base.block_events.engine_events import EngineEvent, StoredBlocks
from mooncake.base.mailbox import Mailbox
from mooncake.launch.cluster.gateways.engine_gateway import TAKEN_AT_ONCE, taking
from mooncake.rpc.kv_event_reader import EventNews, EventSource
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.engines.fleet import Fleet

SOURCE = EventSource("http://one", "tcp://one:1")


def stored(name: int) -> list[EngineEvent]:
    return [StoredBlocks(block_hashes=[name], token_ids=[name] * 4, block_size=4)]


def num_blocks(fleet: Fleet) -> int:
    return fleet.status()[0].num_blocks


def test_many_events_are_taken_in_several_turns() -> None:
    news: Mailbox[EventNews] = Mailbox()
    fleet = Fleet([SOURCE.engine], SchedulerConfig(), [SOURCE.engine])
    take = taking(news, fleet)
    for number in range(3 * TAKEN_AT_ONCE):
        news.put(EventNews(SOURCE, stored(number)))
    found = []
    while select.select([news.fileno()], [], [], 0)[0]:
        take()
        found.append(num_blocks(fleet))
        assert len(found) < 10
    assert found[:3] == [TAKEN_AT_ONCE, 2 * TAKEN_AT_ONCE, 3 * TAKEN_AT_ONCE]
    news.close()


def test_events_that_cannot_be_taken_are_a_loss_and_the_next_ones_are_taken() -> None:
    news: Mailbox[EventNews] = Mailbox()
    fleet = Fleet([SOURCE.engine], SchedulerConfig(), [SOURCE.engine])
    take = taking(news, fleet)
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    bad: list[EngineEvent] = [
        StoredBlocks(block_hashes=[9], token_ids=[9] * 4, block_size=4, extra_keys=[nested])
    ]
    for events in (stored(1), bad, stored(2), stored(3)):
        news.put(EventNews(SOURCE, events))
    take()
    assert num_blocks(fleet) == 2
    news.close()
