"""Several gateways place requests on the same workers: each knows the workers from the workers, and
what the others have placed from them.
"""

from __future__ import annotations

from random import Random

import pytest

from mooncake.base import FinishReason, Role
from mooncake.instance.config import InstanceConfig
from mooncake.rpc.membership import ANSWER_S
from mooncake.scheduler.config import SchedulerConfig
from mooncake.sim.world.network import NetworkConfig
from mooncake.telemetry.events import Placed
from tests.support.engine.fake_runner import expected_output
from tests.support.scheduler.scheduling import PROFILE
from tests.support.sim import cluster as cluster_support
from tests.support.sim.cluster import LAYOUT, Cluster, engine_config, request, specs

FIRST, SECOND, THIRD = "gateway", "gateway-1", "gateway-2"
HEAD = [(7 * token) % 97 for token in range(120)]


def cluster_of(*gateway_ids: str, **changes: object) -> Cluster:
    """Return a cluster of two prefill and two decode workers that these gateways have met."""
    cluster = Cluster(specs(2, 2), profile=PROFILE, **changes)  # type: ignore[arg-type]
    for gateway_id in gateway_ids[1:]:
        cluster.world.start_gateway(gateway_id)
    cluster.run(3)
    return cluster


def members(cluster: Cluster, gateway_id: str) -> dict[str, str]:
    """Return worker id -> epoch of the workers a gateway places requests on."""
    views = cluster.world.gateway_hosts[gateway_id].conductor.views
    return {view.worker_id: view.worker.epoch for view in views}


def num_indexed(cluster: Cluster, gateway_id: str) -> int:
    return cluster.world.gateway_hosts[gateway_id].conductor.num_indexed_blocks


def burst(cluster: Cluster, gateway_ids: list[str]) -> list[Placed]:
    """Send siblings a moment after each other, the n-th to the n-th gateway; return where they
    went.
    """
    for number, gateway_id in enumerate(gateway_ids):
        sibling = request(f"sibling-{number}", [*HEAD, number])
        cluster.world.submit(sibling, gateway_id)
        cluster.run(0.003)
    assert num_indexed(cluster, FIRST) == 0, "the first blocks were stored already"
    return [event for event in cluster.events.events if isinstance(event, Placed)]


def test_all_gateways_serve_all_workers() -> None:
    cluster = cluster_of(FIRST, SECOND, THIRD)
    assert members(cluster, FIRST) == members(cluster, SECOND) == members(cluster, THIRD)
    random = Random(1)
    for number in range(24):
        prompt = [random.randrange(97) for _ in range(random.randrange(1, 60))]
        gateway_id = random.choice([FIRST, SECOND, THIRD])
        cluster.world.submit(request(f"r{number}", prompt, max_tokens=9), gateway_id)
        cluster.run(0.01)
    cluster.run(20)
    cluster.check_streams()
    cluster.check_quiet()
    assert num_indexed(cluster, FIRST) > 0
    assert num_indexed(cluster, FIRST) == num_indexed(cluster, SECOND)
    assert num_indexed(cluster, FIRST) == num_indexed(cluster, THIRD)


@pytest.mark.parametrize("pair", [(FIRST, SECOND), (SECOND, FIRST), (SECOND, THIRD)])
def test_a_burst_over_two_gateways_follows_its_first_request(pair: tuple[str, str]) -> None:
    cluster = cluster_of(FIRST, SECOND, THIRD)
    placed = burst(cluster, list(pair))
    assert len({event.prefill for event in placed}) == 1
    assert [event.num_cached_tokens for event in placed] == [0, 120]
    cluster.run(10)
    cluster.check_streams()
    cluster.check_quiet()


def test_gateways_that_do_not_hear_of_each_other_compute_a_prefix_twice() -> None:
    """What the news is good for; and a cut between gateways costs no more than that."""
    cluster = cluster_of(FIRST, SECOND)
    cluster.world.network.partition(FIRST, SECOND, cut=True)
    placed = burst(cluster, [FIRST, SECOND])
    assert [event.num_cached_tokens for event in placed] == [0, 0]
    cluster.run(10)
    cluster.world.network.partition(FIRST, SECOND, cut=False)
    cluster.run(5)
    cluster.check_streams()
    cluster.check_quiet()


def test_what_others_have_placed_counts_as_load() -> None:
    """Four prompts with nothing in common, two gateways: no worker gets more than its half."""
    cluster = cluster_of(FIRST, SECOND)
    for number in range(4):
        prompt = [(number + 2) * token % 97 for token in range(120)]
        cluster.world.submit(request(f"r{number}", prompt), [FIRST, SECOND][number % 2])
        cluster.run(0.002)
    placed = [event.prefill for event in cluster.events.events if isinstance(event, Placed)]
    assert sorted(placed, key=str) == ["prefill-0", "prefill-0", "prefill-1", "prefill-1"]
    cluster.run(10)
    cluster.check_streams()
    cluster.check_quiet()


@pytest.mark.parametrize("victim", [FIRST, SECOND])
@pytest.mark.parametrize("after_s", [0.004, 0.03, 0.1])
def test_a_gateway_dies_and_comes_back_knowing_the_cluster(victim: str, after_s: float) -> None:
    """The other goes on; what it had placed is forgotten; the new one rebuilds all from facts."""
    cluster = cluster_of(FIRST, SECOND)
    other = SECOND if victim == FIRST else FIRST
    for number in range(6):
        long = [*HEAD[number:], number]
        cluster.world.submit(request(f"mine-{number}", long), victim)
        cluster.world.submit(request(f"other-{number}", long[::-1], max_tokens=30), other)
    cluster.run(after_s)
    for number in range(6):
        del cluster.world.streams[f"mine-{number}"]  # its clients are cut off
    cluster.world.start_gateway(victim)
    cluster.run(0.9)
    bookings, others = (
        cluster.world.gateway_hosts[name].conductor.bookings for name in (victim, other)
    )
    assert bookings.owners == ({other} if others.own_ids() else set())
    assert others.owners == set(), "bookings of a former life"
    cluster.run(30)
    assert members(cluster, victim) == members(cluster, other)
    assert len(members(cluster, victim)) == 8
    assert num_indexed(cluster, victim) == num_indexed(cluster, other) > 0
    warm = cluster.world.submit(request("warm", [0, *HEAD[::-1], 1]), victim)
    cluster.run(5)
    assert warm.finals[0].num_cached_tokens > 0
    cluster.check_streams()
    cluster.check_quiet()


def test_a_gateway_that_stays_away_leaves_nothing_behind() -> None:
    cluster = cluster_of(FIRST, SECOND)
    placed = burst(cluster, [SECOND, SECOND])
    bookings = cluster.world.gateway_hosts[FIRST].conductor.bookings
    assert bookings.owners == {SECOND}
    cluster.world.kill_gateway(SECOND)
    cluster.world.streams.clear()
    cluster.run(30)
    assert bookings.owners == set()
    cluster.check_quiet()
    cluster.world.submit(request("later", HEAD))
    cluster.run(5)
    cluster.check_streams()
    assert len(placed) == 2


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_whatever_dies(seed: int) -> None:
    """Words get lost and overtake each other, workers and gateways die: every request of a gateway
    that lives ends once, with the oracle's tokens.
    """
    random = Random(seed)
    gateways = [FIRST, SECOND, THIRD]
    cluster = cluster_of(
        *gateways,
        scheduler=SchedulerConfig(
            max_attempts=50, replace_wait_s=60.0, stall_timeout_s=10.0, heartbeat_timeout_s=4.0
        ),
        network=NetworkConfig(
            encode=True,
            message_jitter_s=random.choice([0.0, 0.001, 0.02]),
            loss=random.choice([0.0, 0.002, 0.01]),
            reordered=random.choice([0.0, 0.02]),
        ),
        instance=InstanceConfig(quarantine_s=1.0, push_timeout_s=5.0, ask_again_s=2.0),
        restart_s=random.choice([0.2, 1.0]),
        seed=seed,
    )
    asked: dict[str, str] = {}
    for number in range(30):
        prompt = [*HEAD[: random.choice([0, 40, 90])], *random.choices(range(97), k=20)]
        asked[f"r{number}"] = gateway_id = random.choice(gateways)
        cluster.world.submit(request(f"r{number}", prompt, max_tokens=12, seed=number), gateway_id)
        cluster.run(random.choice([0.0, 0.003, 0.05, 0.3]))
        if random.random() < 0.1:
            cluster.world.kill(random.choice(sorted(cluster.world.workers)))
        if random.random() < 0.07:
            victim = random.choice(gateways)
            cluster.world.start_gateway(victim)
            for name in [name for name, owner in asked.items() if owner == victim]:
                del asked[name], cluster.world.streams[name]
        cluster.check_integrity()
    cluster.run(120)
    cluster.check_streams(may_refuse=True)
    cluster.check_quiet()
    assert asked, "nobody was left to ask"
    for gateway_id in gateways:
        assert members(cluster, gateway_id) == members(cluster, FIRST)
        assert not cluster.world.gateway_hosts[gateway_id].conductor.bookings.owners
    finished = [stream.finals[0].reason for stream in cluster.world.streams.values()]
    assert FinishReason.LENGTH in finished


LONG = 500
"""Output tokens that take longer than a gateway's silence is borne."""


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster of two gateways, each with two requests that run for long on slow workers."""
    monkeypatch.setattr(cluster_support, "STEP_S", 0.03)
    engine = engine_config(num_blocks=700, max_model_len=LONG + 200)
    cluster = cluster_of(
        FIRST, SECOND, decode=engine, prefill=engine,
        scheduler=SchedulerConfig(heartbeat_timeout_s=2.0),
    )  # fmt: skip
    for number in range(4):
        asked = request(f"r{number}", HEAD[number:40], max_tokens=LONG, seed=number)
        cluster.world.submit(asked, [FIRST, SECOND][number % 2])
    cluster.run(2)
    assert num_running(cluster) == 4
    return cluster


def num_running(cluster: Cluster) -> int:
    """Return the sequences in all decode batches."""
    machines = [w.machine for w in cluster.world.workers.values() if w.spec.role is Role.DECODE]
    return sum(machine.instance.load().num_running for machine in machines if machine is not None)


def check_long_streams(cluster: Cluster) -> None:
    for stream in cluster.world.streams.values():
        assert [final.reason for final in stream.finals] == [FinishReason.LENGTH]
        assert stream.tokens == expected_output(LAYOUT, stream.request, max_model_len=LONG + 200)
    cluster.check_quiet()


@pytest.mark.parametrize("victim", [FIRST, SECOND])
def test_workers_let_go_of_what_a_dead_gateway_asked_for(long_runs: Cluster, victim: str) -> None:
    """Nobody comes in its place; the other's requests never notice."""
    cluster = long_runs
    cluster.world.kill_gateway(victim)
    for number in range(4):
        if victim == [FIRST, SECOND][number % 2]:
            del cluster.world.streams[f"r{number}"]
    cluster.run(2.0 + ANSWER_S + 1.5)
    assert num_running(cluster) == 2, "the requests of the dead are still computed"
    assert cluster.world.gateway_hosts.keys() == {FIRST, SECOND} - {victim}
    cluster.run(60)
    check_long_streams(cluster)
    [gateway_host] = cluster.world.gateway_hosts.values()
    assert (
        gateway_host.gateway.status(cluster.world.heap.now()).counters.get("attempts_lost", 0) == 0
    )


def test_gateways_that_cannot_reach_each_other_are_both_alive_to_workers(
    long_runs: Cluster,
) -> None:
    cluster = long_runs
    cluster.world.network.partition(FIRST, SECOND, cut=True)
    cluster.run(3.5)
    now = cluster.world.heap.now()
    for gateway_host in cluster.world.gateway_hosts.values():
        assert [one.state for one in gateway_host.gateway.status(now).gateways] == ["up", "silent"]
    cluster.run(ANSWER_S + 2)
    assert num_running(cluster) == 4
    cluster.world.network.partition(FIRST, SECOND, cut=False)
    cluster.run(60)
    check_long_streams(cluster)
    for gateway_host in cluster.world.gateway_hosts.values():
        status = gateway_host.gateway.status(cluster.world.heap.now())
        assert status.counters.get("attempts_lost", 0) == 0
        assert [one.state for one in status.gateways] == ["up", "up"]


def test_a_gateway_that_stood_still_for_long_places_its_requests_again(long_runs: Cluster) -> None:
    cluster = long_runs
    cluster.world.gateway_hosts[SECOND].process.hang(2.0 + ANSWER_S + 3)
    cluster.run(2.0 + ANSWER_S + 2)
    assert num_running(cluster) == 2
    cluster.run(60)
    check_long_streams(cluster)
    counters = cluster.world.gateway_hosts[SECOND].gateway.status(cluster.world.heap.now()).counters
    assert counters["attempts_lost"] == 2


def test_a_gateway_that_says_goodbye_is_forgotten_at_once() -> None:
    cluster = cluster_of(FIRST, SECOND)
    cluster.world.gateway_hosts[SECOND].gateway.say_goodbye()
    cluster.world.kill_gateway(SECOND)
    cluster.run(0.5)
    status = cluster.world.gateway.status(cluster.world.heap.now())
    assert [gateway.id for gateway in status.gateways] == [FIRST]
    cluster.run(5)


@pytest.mark.parametrize("to", [FIRST, SECOND])
@pytest.mark.parametrize("source", ["node-prefill-0", "node-decode-1"])
def test_one_gateways_bad_link_ends_no_worker(source: str, to: str) -> None:
    """The one that hears nothing uses these workers no more; the other goes on with them. When the
    link is whole again both use them, in the epoch they had.
    """
    scheduler = SchedulerConfig(heartbeat_timeout_s=2.0)
    cluster = cluster_of(FIRST, SECOND, scheduler=scheduler)
    before = members(cluster, FIRST)
    for number in range(8):
        prompt = HEAD[number : number + 60]
        cluster.world.submit(
            request(f"r{number}", prompt, max_tokens=40), [FIRST, SECOND][number % 2]
        )
    cluster.run(0.05)
    cluster.world.network.partition_one_way(source, to, cut=True)
    cluster.run(5)
    cut_off = {name for name in before if f"node-{name}".replace("kvstore-", "") == source}
    assert members(cluster, to).keys() == before.keys() - cut_off
    other = SECOND if to == FIRST else FIRST
    assert members(cluster, other) == before
    cluster.world.network.partition_one_way(source, to, cut=False)
    cluster.run(30)
    assert members(cluster, FIRST) == members(cluster, SECOND) == before
    assert all(worker.num_starts == 1 for worker in cluster.world.workers.values())
    cluster.check_streams()
    cluster.check_quiet()


def test_a_gateway_that_hears_no_peer_declares_no_worker_lost() -> None:
    cluster = cluster_of(FIRST, SECOND, scheduler=SchedulerConfig(heartbeat_timeout_s=2.0))
    before = members(cluster, FIRST)
    nodes = [*{worker.spec.node_id for worker in cluster.world.workers.values()}, FIRST]
    for node in nodes:
        cluster.world.network.partition_one_way(node, SECOND, cut=True)
    cluster.run(6)
    assert members(cluster, SECOND) == {}
    for node in nodes:
        cluster.world.network.partition_one_way(node, SECOND, cut=False)
    cluster.run(6)
    assert members(cluster, FIRST) == members(cluster, SECOND) == before


def test_a_node_that_no_gateway_hears_is_lost() -> None:
    cluster = cluster_of(FIRST, SECOND, scheduler=SchedulerConfig(heartbeat_timeout_s=2.0))
    for gateway_id in (FIRST, SECOND):
        cluster.world.network.partition_one_way("node-decode-1", gateway_id, cut=True)
    cluster.run(5)
    assert "decode-1" not in members(cluster, FIRST).keys() | members(cluster, SECOND).keys()
    for gateway_id in (FIRST, SECOND):
        cluster.world.network.partition_one_way("node-decode-1", gateway_id, cut=False)
    cluster.run(10)
    assert cluster.world.workers["decode-1"].num_starts == 2
    assert members(cluster, FIRST) == members(cluster, SECOND)
    assert members(cluster, FIRST)["decode-1"] == "e2"
