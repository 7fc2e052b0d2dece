"""Prefixes that lie on SSD while their requests wait in the gateway: brought up meanwhile, they
cost less time; the same trace and seed with and without. And the busiest prefixes in an engine that
joins: its first requests wait for no fetch.
"""

from __future__ import annotations

import pytest

from mooncake.base import Priority, Role
from mooncake.kvstore.node.node import KvNode
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.measure import RequestMeasure
from mooncake.sim.simulation import START_S, Simulation
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine
from mooncake.sim.world.world import WorkerSpec
from tests.support.sim.cluster import Cluster, engine_config, request, specs
from tests.support.sim.traces import simulation

NUM_DOCUMENTS = 8
DOCUMENT_BLOCKS = 30
SSD_BYTES_PER_S = 6e9
"""Enough that all of a document comes sooner than it would be computed."""


def trace() -> list[TraceLine]:
    """Documents are read, fall out of HBM and DRAM, and are asked about while others compute."""
    lines = []

    def ask(at_s: float, ids: list[int], priority: Priority | None = None) -> None:
        more = {"priority": priority} if priority is not None else {}
        lines.append(
            TraceLine(
                timestamp=1e3 * at_s, input_length=len(ids) * TRACE_BLOCK_TOKENS, output_length=5,
                hash_ids=ids, **more,
            )
        )  # fmt: skip

    documents = [
        list(range(1000 * (number + 1), 1000 * (number + 1) + DOCUMENT_BLOCKS))
        for number in range(NUM_DOCUMENTS)
    ]
    for number, document in enumerate(documents):
        ask(10.0 * number, [*document, 10_000 + number])
    busy_s = 10.0 * NUM_DOCUMENTS
    for number in range(4):
        ask(busy_s + 0.1 * number, list(range(500_000 + 100 * number, 500_030 + 100 * number)))
    for number, document in enumerate(documents):
        ask(busy_s + 1.0, [*document, 700_000 + number], Priority.BATCH)
    return lines


def play(read_ahead_bytes: int) -> Simulation:
    """Return the run; every request has ended once."""
    lines = trace()
    played = simulation(
        lines, 1, 1, scheduler={"read_ahead_bytes": read_ahead_bytes},
        hbm_tokens=3 * DOCUMENT_BLOCKS * TRACE_BLOCK_TOKENS // 2,
        pool_tokens=6 * DOCUMENT_BLOCKS * TRACE_BLOCK_TOKENS, ssd_tokens=1_000_000,
        ssd_min_uses=1, ssd_bytes_per_s=SSD_BYTES_PER_S,
    )  # fmt: skip
    played.run()
    for _, machine in played.world.machines():
        machine.check_integrity()
    assert [one.num_finals for one in played.measures.requests] == [1] * len(lines)
    return played


def counted(played: Simulation, name: str) -> float:
    return sum(
        machine.counters[name] for _, machine in played.world.machines()
        if isinstance(machine, KvNode)
    )  # fmt: skip


@pytest.fixture(scope="module")
def both() -> tuple[Simulation, Simulation]:
    """The same trace and seed without and with."""
    return play(0), play(2 << 30)


def batch_ttfts(played: Simulation) -> list[float]:
    """Return the times to the first token of those that waited in the gateway."""
    found = [one.ttft_s for one in played.measures.requests[-NUM_DOCUMENTS:]]
    return [ttft for ttft in found if ttft is not None]


def test_requests_that_waited_start_sooner(both: tuple[Simulation, Simulation]) -> None:
    without, ahead = both
    late, early = batch_ttfts(without), batch_ttfts(ahead)
    assert len(late) == len(early) == NUM_DOCUMENTS
    assert counted(without, "blocks_prefetched") == 0
    assert counted(ahead, "blocks_prefetched") > 2 * DOCUMENT_BLOCKS
    assert sum(early) < 0.95 * sum(late)
    assert max(early) < 0.95 * max(late)
    assert without.measures.hit_tokens == ahead.measures.hit_tokens


def test_documents_come_up_whole_though_a_few_blocks_may_be_on_their_way(
    both: tuple[Simulation, Simulation],
) -> None:
    for played in both:
        documents = NUM_DOCUMENTS * DOCUMENT_BLOCKS * TRACE_BLOCK_TOKENS
        assert played.measures.hit_tokens == documents
        assert counted(played, "blocks_missed") == 0


def test_requests_that_do_not_wait_lose_nothing_by_it(both: tuple[Simulation, Simulation]) -> None:
    num = len(trace()) - NUM_DOCUMENTS
    without, ahead = ([one.ttft_s for one in played.measures.requests[:num]] for played in both)
    assert ahead == without


NUM_PREFIXES, PREFIX_BLOCKS = 4, 8
JOINS_S = 59.94
JOINER = "prefill-9"


def busy_trace() -> list[TraceLine]:
    """Return prompts of a few known prefixes in turn, just more than one engine can compute."""
    lines = []
    for number in range(600):
        known = 1000 * (number % NUM_PREFIXES + 1)
        ids = [*range(known, known + PREFIX_BLOCKS), 10_000 + 2 * number, 10_001 + 2 * number]
        lines.append(
            TraceLine(
                timestamp=130.0 * number, input_length=len(ids) * TRACE_BLOCK_TOKENS,
                output_length=5, hash_ids=ids,
            )
        )  # fmt: skip
    return lines


def play_join(read_ahead_bytes: int) -> tuple[list[RequestMeasure], list[RequestMeasure], int]:
    """Have an engine join. Return all requests, those that it computed, and how many blocks it had
    read ahead when its first one came.
    """
    played = simulation(busy_trace(), 1, 1, scheduler={"read_ahead_bytes": read_ahead_bytes})
    world = played.world
    spec = WorkerSpec(worker_id=JOINER, role=Role.PREFILL, node_id="joiner")
    world.heap.at(START_S + JOINS_S, lambda: world.add(spec))
    played.run()
    for _, machine in world.machines():
        machine.check_integrity()
    machine = world.workers[JOINER].machine
    assert machine is not None
    assert not isinstance(machine, KvNode)
    counters = machine.instance.load().counters
    of_joiner = [one for one in played.measures.requests if one.prefill == JOINER]
    return played.measures.requests, of_joiner, round(counters["blocks_prefetched"])


def test_the_first_requests_of_an_engine_that_joins_find_their_prefixes_there() -> None:
    without, first_without, none_ahead = play_join(0)
    ahead, first_ahead, num_ahead = play_join(32 << 30)
    assert (none_ahead, num_ahead) == (0, NUM_PREFIXES * PREFIX_BLOCKS)
    hits = PREFIX_BLOCKS * TRACE_BLOCK_TOKENS
    for first in (first_without, first_ahead):
        assert [one.num_cached_tokens for one in first[:NUM_PREFIXES]] == [hits] * NUM_PREFIXES
    late, early = (
        [one.ttft_s or 0.0 for one in first[:NUM_PREFIXES]]
        for first in (first_without, first_ahead)
    )
    print(f"TTFT of the first: {late} -> {early}")
    assert all(b < 0.95 * a for a, b in zip(late, early, strict=True))
    _, first_some, num_some = play_join(SchedulerConfig().read_ahead_bytes)
    assert num_some < num_ahead
    assert [one.ttft_s for one in first_some[:NUM_PREFIXES]] == late, "they wait for the rest"
    before = [one.ttft_s for one in without if one.submitted_s < START_S + JOINS_S]
    assert [one.ttft_s for one in ahead[: len(before)]] == before


@pytest.mark.parametrize("caches", [True, False])
def test_an_engine_that_keeps_no_prefixes_reads_none_ahead(caches: bool) -> None:
    cluster = Cluster(specs(1, 1), prefill=engine_config(enable_prefix_caching=caches))
    for name in ("first", "second"):
        cluster.world.submit(request(name, list(range(1, 60))))
        cluster.run(5)
    cluster.world.add(WorkerSpec(worker_id=JOINER, role=Role.PREFILL, node_id="joiner"))
    cluster.run(5)
    assert (cluster.counter("blocks_prefetched", JOINER) > 0) is caches
    assert (cluster.counter("blocks_fetched", JOINER) > 0) is caches
