"""Requests through the shipped machines on simulated wires: right tokens, real reuse, nothing left
behind.
"""

from __future__ import annotations

from random import Random

import pytest

from mooncake.base import FinishReason, Grammar, Role
from mooncake.base.large_settings import MIN_NAMED_BYTES
from mooncake.instance.config import InstanceConfig
from mooncake.scheduler.config import SchedulerConfig
from mooncake.telemetry.events import FirstToken
from tests.support.sim.cluster import Cluster, HeapRunner, engine_config, request, specs

PROMPT = list(range(1, 60))
EAGER = SchedulerConfig(fetch_latency_s=0.0, local_bytes_per_s=1e12, remote_bytes_per_s=1e12)
"""Fetching always looks cheaper than computing."""


def prompts(count: int, seed: int, *, shared: int = 0) -> list[list[int]]:
    random = Random(seed)
    head = [random.randrange(97) for _ in range(shared)]
    return [
        head + [random.randrange(97) for _ in range(random.randrange(1, 60))] for _ in range(count)
    ]


LAYOUTS = {
    "colocated": specs(0, 1, kvstores=False),
    "colocated with pool": specs(0, 1),
    "1+1": specs(1, 1),
    "1+1 without pool": specs(1, 1, kvstores=False),
    "2+2": specs(2, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk_tokens", [3, 10, 24])
def test_tokens_do_not_depend_on_the_layout(layout: str, chunk_tokens: int) -> None:
    engine = engine_config(max_chunk_tokens=chunk_tokens)
    cluster = Cluster(LAYOUTS[layout], prefill=engine, decode=engine)
    for index, prompt in enumerate(prompts(12, seed=1, shared=21)):
        cluster.world.submit(request(f"r{index}", prompt, max_tokens=1 + index, seed=index))
        cluster.run(0.02)
    cluster.run(20)
    cluster.check_streams()
    cluster.check_quiet()


def test_preemption_changes_nothing() -> None:
    cluster = Cluster(specs(1, 1), decode=engine_config(num_blocks=24))
    for index, prompt in enumerate(prompts(8, seed=2)):
        cluster.world.submit(request(f"r{index}", prompt[:24], max_tokens=40, seed=index))
    cluster.run(60)
    cluster.check_streams()
    assert cluster.counter("preemptions") > 0
    cluster.check_quiet()


def test_a_prefix_in_another_nodes_pool_is_fetched() -> None:
    cluster = Cluster(specs(2, 1), scheduler=EAGER, restart_s=None)
    first = cluster.world.submit(request("first", PROMPT))
    cluster.run(5)
    computed_by = next(e.worker_id for e in cluster.events.events if isinstance(e, FirstToken))
    cluster.world.kill(computed_by)  # its pages are gone; its node's pool is not
    cluster.run(1)
    second = cluster.world.submit(request("second", [*PROMPT, 5, 6, 7]))
    cluster.run(5)
    cluster.check_streams()
    assert first.finals[0].num_cached_tokens == 0
    assert second.finals[0].num_cached_tokens == len(PROMPT) // 4 * 4
    assert cluster.counter("blocks_fetched") == len(PROMPT) // 4
    cluster.check_quiet()


def test_generated_tokens_are_remembered_too() -> None:
    cluster = Cluster(specs(1, 1), scheduler=EAGER)
    stream = cluster.world.submit(request("turn-1", PROMPT[:30], max_tokens=30))
    cluster.run(5)
    again = cluster.world.submit(request("turn-2", PROMPT[:30] + stream.tokens + [9], max_tokens=4))
    cluster.run(5)
    cluster.check_streams()
    assert again.finals[0].num_cached_tokens >= 56 // 4 * 4


def test_one_token_requests_free_their_reservation() -> None:
    cluster = Cluster(specs(1, 1))
    for index in range(5):
        cluster.world.submit(request(f"r{index}", PROMPT[: 10 + index], max_tokens=1))
    cluster.run(10)
    cluster.check_streams()
    cluster.check_quiet()


def test_a_decode_worker_without_room_takes_the_blocks_from_the_pool_later() -> None:
    instance = InstanceConfig(hold_s=0.05, push_timeout_s=5.0, quarantine_s=1.0)
    cluster = Cluster(specs(1, 1), decode=engine_config(num_blocks=20), instance=instance)
    for index, prompt in enumerate(prompts(6, seed=3)):
        cluster.world.submit(request(f"r{index}", (prompt * 8)[:40], max_tokens=30, seed=index))
    cluster.run(60)
    cluster.check_streams()
    assert cluster.counter("handed_over_by_pool") > 0
    cluster.check_quiet()


@pytest.mark.parametrize("bound", [{}, {"max_reservations": 2}])
def test_what_waits_for_room_on_a_decode_worker_ends_once(bound: dict[str, int]) -> None:
    """Whom a full worker turns away has not failed: it waits for room, however often."""
    instance = InstanceConfig(quarantine_s=1.0, push_timeout_s=5.0, **bound)
    prefill = engine_config(max_waiting=400)
    decode = engine_config(max_waiting=400, num_blocks=30)
    cluster = Cluster(
        specs(1, 1),
        prefill=prefill,
        decode=decode,
        instance=instance,
        scheduler=SchedulerConfig(max_queue=300),
    )
    streams = [
        cluster.world.submit(request(f"r{index}", PROMPT[:20], max_tokens=4, seed=index))
        for index in range(300)
    ]
    cluster.settle(200)
    cluster.check_quiet()
    cluster.check_streams()
    assert [len(stream.finals) for stream in streams] == [1] * 300


@pytest.mark.parametrize("num_bytes", [16, MIN_NAMED_BYTES])
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_grammars_are_prepared_before_their_first_step(num_prefill: int, num_bytes: int) -> None:
    """Steps wait for masks, and everybody in the batch with them. A large grammar travels beside
    its request.
    """
    cluster = Cluster(specs(num_prefill, 1))
    grammar = Grammar(text='start: "a"'.ljust(num_bytes), end_ids=[1])
    cluster.world.submit(request("plain", PROMPT))
    cluster.world.submit(request("bound", PROMPT, grammar=grammar))
    waiting = {Role.PREFILL: num_prefill, Role.DECODE: 1}
    while any(waiting.values()):
        assert cluster.world.heap.step()
        for role, runner in ((r, one) for r in waiting for one in cluster.world.runners(r)):
            assert isinstance(runner, HeapRunner)
            starts = [start for plan in runner.inner.plans for start in plan.starts]
            bound = [start for start in starts if start.request.sampling.grammar is not None]
            if runner.inner.prepared:
                waiting[role] = 0
            assert runner.inner.prepared == [grammar] or not bound, "it came unprepared"
    cluster.run(20)
    cluster.check_streams()


def test_prompt_logprobs_are_complete_in_spite_of_a_warm_cache() -> None:
    cluster = Cluster(specs(1, 1))
    cluster.world.submit(request("warm", PROMPT))
    cluster.run(5)
    stream = cluster.world.submit(request("asks", PROMPT, num_prompt_logprobs=0))
    cluster.run(5)
    cluster.check_streams()
    assert stream.finals[0].num_cached_tokens == 0


def test_a_request_id_may_be_used_again() -> None:
    cluster = Cluster(specs(1, 1))
    for _ in range(3):
        cluster.world.submit(request("again", PROMPT))
        cluster.run(5)
        cluster.check_streams()
    cluster.check_quiet()


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.011, 0.03, 0.06, 0.1, 0.2, 0.3])
def test_an_abort_at_any_time_leaves_nothing(after_s: float) -> None:
    cluster = Cluster(specs(1, 1))
    stream = cluster.world.submit(request("gone", PROMPT, max_tokens=100))
    other = cluster.world.submit(request("stays", PROMPT[::-1], max_tokens=20))
    cluster.run(after_s)
    cluster.world.abort("gone")
    cluster.run(10)
    assert [final.reason for final in stream.finals] == [FinishReason.ABORT]
    assert other.finals[0].reason is FinishReason.LENGTH
    cluster.check_streams()
    cluster.check_quiet()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "kvstore-prefill-0"])
@pytest.mark.parametrize("after_s", [0.005, 0.02, 0.05, 0.1, 0.2, 0.5])
def test_a_killed_worker_costs_a_pause_and_no_token(victim: str, after_s: float) -> None:
    cluster = Cluster(specs(2, 2))
    for index, prompt in enumerate(prompts(10, seed=4, shared=9)):
        cluster.world.submit(request(f"r{index}", prompt, max_tokens=40, seed=index))
    cluster.run(after_s)
    cluster.world.kill(victim)
    cluster.run(60)
    cluster.check_streams()
    cluster.world.submit(request("later", PROMPT))
    cluster.run(10)
    cluster.check_streams()
    cluster.check_quiet()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_the_only_worker_of_its_kind_is_waited_for(victim: str) -> None:
    cluster = Cluster(specs(1, 1), restart_s=3.0)
    for index, prompt in enumerate(prompts(4, seed=5)):
        cluster.world.submit(request(f"r{index}", prompt, max_tokens=40, seed=index))
    cluster.run(0.1)
    cluster.world.kill(victim)
    cluster.run(60)
    cluster.check_streams()
    cluster.check_quiet()


@pytest.mark.parametrize("after_s", [0.01, 0.03, 0.08, 0.2])
def test_what_died_with_the_gateway_is_reclaimed_by_the_next(after_s: float) -> None:
    """Nobody told the pools of the death: they ask the new gateway, and it knows who is there."""
    cluster = Cluster(specs(2, 2), restart_s=None)
    for index, prompt in enumerate(prompts(10, seed=6, shared=9)):
        cluster.world.submit(request(f"r{index}", prompt, max_tokens=20, seed=index))
    cluster.run(after_s)
    cluster.world.kill("prefill-0")
    cluster.world.start_gateway()
    cluster.world.streams.clear()
    cluster.run(60)
    pools = cluster.pools()
    assert sum(pool.counters["puts"] for pool in pools) > 0
    assert [pool.num_open for pool in pools] == [0] * 4
    cluster.world.submit(request("later", PROMPT))
    cluster.run(10)
    cluster.check_streams()
    cluster.check_integrity()
