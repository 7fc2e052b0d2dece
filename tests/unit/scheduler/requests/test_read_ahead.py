"""What is asked of pool nodes while a request waits: only what lies on SSD, for the first in line,
so much at a time; and taken back when the request goes away. And what an engine that joins is told
to read: the busiest prefixes that pools hold.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base import (
    BlockEvents,
    BlockKey,
    BlockSource,
    FinishReason,
    Priority,
    Role,
    Tier,
    WorkerRef,
)
from mooncake.base.blocks import block_keys
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.scheduler.requests.permits import RETRY_WAITING_S
from mooncake.scheduler.requests.read_ahead import GIVE_UP_S, MAX_REQUESTS, REPEAT_S
from tests.support.scheduler.scheduling import (
    BLOCK_TOKENS,
    FINGERPRINT,
    Pair,
    keys_of,
    request,
    snapshot,
)

BLOCK_BYTES = 1000


class Waiting(Pair):
    """A prefill worker that is busy, a pool with disks, and batch requests that wait."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.store = self.join("kv", Role.KVSTORE)
        self.submit(request("busy", 1000, max_tokens=1))
        self._numbers = {Tier.DRAM: 1, Tier.SSD: 1, Tier.OBJECT: 1}
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


def test_what_lies_below_dram_only_is_asked_for_at_once_and_once() -> None:
    harness = Waiting()
    waiting = request("b", 40, 1, priority=Priority.BATCH)
    keys = keys_of(waiting)
    harness.stored(Tier.DRAM, keys[:2])
    harness.stored(Tier.OBJECT, keys[:7])
    harness.gateway.handle(snapshot(harness.p0, keys[3:4]), harness.now)
    assert harness.wait("b", on_ssd=6) == keys
    assert harness.asked() == [[keys[2], *keys[4:7]]]
    harness.tick(GIVE_UP_S / 2)
    assert len(harness.asked()) == 1


def test_nothing_is_read_ahead_for_a_request_placed_at_once() -> None:
    harness = Pair()
    store = harness.join("kv", Role.KVSTORE)
    placed = request("r", 40, 1)
    harness.gateway.handle(snapshot(store, keys_of(placed), Tier.SSD), harness.now)
    harness.submit(placed)
    assert harness.attempts("r") != []
    assert harness.channel.of(Prefetch) == []


def test_bytes_under_way_are_bounded_and_go_on_as_blocks_come_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mooncake.scheduler.requests.read_ahead.CHUNK_BYTES", 2 * BLOCK_BYTES)
    harness = Waiting(read_ahead_bytes=5 * BLOCK_BYTES)
    keys = harness.wait("b")
    assert harness.asked() == [keys[:2], keys[2:4]]
    harness.tick(RETRY_WAITING_S)
    assert len(harness.asked()) == 2
    harness.stored(Tier.DRAM, keys[:2])
    harness.tick(RETRY_WAITING_S)
    assert harness.asked()[2:] == [keys[4:6]]
    harness.tick(GIVE_UP_S + 1.0)  # the node has no room: others' turn
    assert harness.asked()[3:] == [keys[6:8], keys[8:10]]


def test_only_the_first_in_line() -> None:
    harness = Waiting()
    for number in range(MAX_REQUESTS + 3):
        harness.wait(f"b{number}")
    assert len(harness.asked()) == MAX_REQUESTS


def test_zero_bytes_turn_it_off() -> None:
    harness = Waiting(read_ahead_bytes=0)
    harness.wait("b")
    harness.tick(1.0)
    assert harness.asked() == []


def test_a_request_that_goes_away_is_taken_back() -> None:
    harness = Waiting()
    harness.wait("b0")
    harness.wait("b1")
    harness.gateway.abort("b1", harness.now)
    prefetches = harness.channel.of(Prefetch)
    stops = harness.channel.of(StopPrefetch, harness.store.address)
    assert [stop.ticket for stop in stops] == [prefetches[1].ticket]
    assert {message.reader.worker_id for message in (*prefetches, *stops)} == {"gateway"}


def test_one_that_is_placed_leaves_its_blocks_coming() -> None:
    harness = Waiting()
    harness.wait("b")
    harness.output(harness.p0, "busy", 0, [1], FinishReason.LENGTH)
    harness.tick(RETRY_WAITING_S)
    assert len(harness.attempts("b")) == 1
    assert harness.channel.of(StopPrefetch) == []


def test_the_blocks_of_a_long_waiting_request_are_asked_for_again() -> None:
    harness = Waiting()
    keys = harness.wait("b")
    for seconds in range(1, round(REPEAT_S) + 2):
        harness.report(harness.store)
        harness.report(harness.p0)
        harness.report(harness.d0)
        harness.tick(1.0)
        del seconds
    assert harness.asked() == [keys[:10]] * 2


def test_nodes_that_drain_are_not_asked() -> None:
    harness = Waiting()
    harness.report(harness.store, draining=True)
    harness.wait("b")
    assert harness.asked() == []


class Busy(Pair):
    """A prefix of ten blocks that two requests of each of two tenants have used, in a pool."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.store = self.join("kv", Role.KVSTORE)
        self.prompts = {tenant: request("", 41, 1, tenant=tenant) for tenant in ("a", "b")}
        held: list[BlockKey] = []
        for tenant, prompt in self.prompts.items():
            for number in range(2):
                self.submit(msgspec.structs.replace(prompt, request_id=f"{tenant}{number}"))
            held += self.keys(tenant)
        self.gateway.handle(snapshot(self.store, held, Tier.DRAM), self.now)

    def keys(self, tenant: str) -> list[BlockKey]:
        """Return the keys of the full blocks of a tenant's prompt."""
        tokens = self.prompts[tenant].prompt_tokens
        return list(block_keys(FINGERPRINT, tokens, BLOCK_TOKENS, tenant))

    def told(self, worker: WorkerRef) -> list[Prefetch]:
        return self.channel.of(Prefetch, worker.address)


def test_an_engine_that_joins_reads_the_busiest_prefixes() -> None:
    harness = Busy()
    told = harness.told(harness.join("p1", Role.PREFILL))
    keys = [harness.keys("a"), harness.keys("b")]
    assert sorted(run.keys for run in told) == sorted(keys), "each tenant's under its own names"
    for run in told:
        assert run.sources == [BlockSource(store=harness.store, first=0, stop=10)]
    assert len({run.ticket for run in told}) == 2


def test_it_reads_no_more_than_the_bytes_allowed() -> None:
    harness = Busy(read_ahead_bytes=12 * BLOCK_BYTES)
    told = harness.told(harness.join("p1", Role.PREFILL))
    assert sum(len(run.keys) for run in told) == 12
    assert harness.told(harness.join("p2", Role.PREFILL, block_bytes=13 * BLOCK_BYTES)) == []


def test_it_is_told_of_few_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.scheduler.placement.pools.MAX_CHAINS", 1)
    harness = Busy()
    assert [run.keys for run in harness.told(harness.join("p1", Role.PREFILL))] == [
        harness.keys("a")
    ]


def test_it_reads_what_its_own_node_has_from_there() -> None:
    harness = Busy()
    keys = harness.keys("a")
    own = harness.join("kv1", Role.KVSTORE, node_id="node-p1")
    harness.gateway.handle(snapshot(own, keys[:4], Tier.DRAM), harness.now)
    told = harness.told(harness.join("p1", Role.PREFILL))
    sources = next(run.sources for run in told if run.keys == keys)
    assert {(source.store.worker_id, source.first, source.stop) for source in sources} == {
        ("kv", 0, 10)
    }, "one run of all is better than two"
    local = Busy(fetch_remote=False)
    own = local.join("kv1", Role.KVSTORE, node_id="node-p1")
    local.gateway.handle(snapshot(own, keys[:4], Tier.DRAM), local.now)
    told = local.told(local.join("p1", Role.PREFILL))
    assert [(run.keys, run.sources) for run in told] == [
        (keys[:4], [BlockSource(store=own, first=0, stop=4)])
    ]


def test_a_decode_worker_reads_ahead_only_where_it_computes_prompts() -> None:
    harness = Busy()
    assert harness.told(harness.join("d1", Role.DECODE)) == []
    harness.gateway.worker_lost("p0", harness.now)
    assert len(harness.told(harness.join("d2", Role.DECODE))) == 2


def test_nothing_is_read_of_weights_that_are_no_longer_served() -> None:
    harness = Busy()
    harness.conductor.use_fingerprint("layout-2")
    assert harness.told(harness.join("p1", Role.PREFILL)) == []
