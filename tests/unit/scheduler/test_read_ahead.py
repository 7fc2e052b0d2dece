"""What is asked of pool nodes while a request waits: only what lies on SSD, for the first in line,
so much at a time; and taken back when the request goes away.
"""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.base import BlockEvents, BlockKey, FinishReason, Priority, Role, Tier
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.scheduler.read_ahead import AGAIN_S, FRONT, GIVEN_UP_S
from mooncake.scheduler.waiting import RETRY_WAITING_S
from tests.support.scheduling import Pair, keys_of, request, snapshot

BLOCK_BYTES = 1000


class Waiting(Pair):
    """A prefill worker that is busy, a pool with disks, and batch requests that wait."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.store = self.join("kv", Role.KVSTORE)
        self.submit(request("busy", 1000, max_tokens=1))
        self._numbers = {Tier.DRAM: 1, Tier.SSD: 1}
        for tier in self._numbers:
            self.gateway.handle(snapshot(self.store, [], tier), self.now)

    def wait(self, name: str, num_prompt: int = 40, on_ssd: int = 10, **fields: Any) -> Any:
        """Have a batch request wait whose first blocks lie on SSD; return its keys."""
        waiting = request(name, num_prompt, 1, priority=Priority.BATCH, **fields)
        keys = keys_of(waiting)
        self.stored(Tier.SSD, keys[:on_ssd])
        self.submit(waiting)
        assert self.attempts(name) == []
        return keys

    def stored(self, tier: Tier, keys: list[BlockKey]) -> None:
        self._numbers[tier] += 1
        number = self._numbers[tier]
        self.gateway.handle(
            BlockEvents(worker=self.store, tier=tier, sequence_no=number, stored=keys), self.now
        )

    def asked(self) -> list[list[BlockKey]]:
        return [message.keys for message in self.channel.of(Prefetch, self.store.address)]


def test_what_lies_on_ssd_only_is_asked_for_at_once_and_once() -> None:
    house = Waiting()
    waiting = request("b", 40, 1, priority=Priority.BATCH)
    keys = keys_of(waiting)
    house.stored(Tier.DRAM, keys[:2])
    house.gateway.handle(snapshot(house.p0, keys[3:4]), house.now)
    assert house.wait("b", on_ssd=6) == keys
    assert house.asked() == [[keys[2], keys[4], keys[5]]]
    house.tick(GIVEN_UP_S / 2)
    assert len(house.asked()) == 1


def test_nothing_is_asked_for_who_is_placed_at_once() -> None:
    house = Pair()
    store = house.join("kv", Role.KVSTORE)
    placed = request("r", 40, 1)
    house.gateway.handle(snapshot(store, keys_of(placed), Tier.SSD), house.now)
    house.submit(placed)
    assert house.attempts("r") != []
    assert house.channel.of(Prefetch) == []


def test_bytes_under_way_are_bounded_and_go_on_as_blocks_come_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mooncake.scheduler.read_ahead.CHUNK_BYTES", 2 * BLOCK_BYTES)
    house = Waiting(read_ahead_bytes=5 * BLOCK_BYTES)
    keys = house.wait("b")
    assert house.asked() == [keys[:2], keys[2:4]]
    house.tick(RETRY_WAITING_S)
    assert len(house.asked()) == 2
    house.stored(Tier.DRAM, keys[:2])
    house.tick(RETRY_WAITING_S)
    assert house.asked()[2:] == [keys[4:6]]
    house.tick(GIVEN_UP_S + 1.0)  # the node has no room: others' turn
    assert house.asked()[3:] == [keys[6:8], keys[8:10]]


def test_only_the_first_in_line() -> None:
    house = Waiting()
    for number in range(FRONT + 3):
        house.wait(f"b{number}")
    assert len(house.asked()) == FRONT


def test_zero_bytes_turn_it_off() -> None:
    house = Waiting(read_ahead_bytes=0)
    house.wait("b")
    house.tick(1.0)
    assert house.asked() == []


def test_a_request_that_goes_away_is_taken_back() -> None:
    house = Waiting()
    house.wait("b0")
    house.wait("b1")
    house.gateway.abort("b1", house.now)
    prefetches = house.channel.of(Prefetch)
    stops = house.channel.of(StopPrefetch, house.store.address)
    assert [stop.ticket for stop in stops] == [prefetches[1].ticket]
    assert {message.reader.worker_id for message in (*prefetches, *stops)} == {"gateway"}


def test_one_that_is_placed_leaves_its_blocks_coming() -> None:
    house = Waiting()
    house.wait("b")
    house.output(house.p0, "busy", 0, [1], FinishReason.LENGTH)
    house.tick(RETRY_WAITING_S)
    assert len(house.attempts("b")) == 1
    assert house.channel.of(StopPrefetch) == []


def test_who_waits_long_is_looked_at_again() -> None:
    house = Waiting()
    keys = house.wait("b")
    for seconds in range(1, round(AGAIN_S) + 2):
        house.report(house.store)
        house.report(house.p0)
        house.report(house.d0)
        house.tick(1.0)
        del seconds
    assert house.asked() == [keys[:10]] * 2


def test_nodes_that_drain_are_not_asked() -> None:
    house = Waiting()
    house.report(house.store, draining=True)
    house.wait("b")
    assert house.asked() == []
