"""The least of recompute, local fetch and remote fetch, over all workers; and the plainer policies
behind the same port.
"""

from collections.abc import Sequence
from functools import partial

import pytest

from mooncake.base import Role, SeededIds, Tier
from mooncake.scheduler.config import POLICIES, SchedulerConfig
from mooncake.scheduler.placement.views import Assignment, InstanceView
from mooncake.scheduler.placement.worker_choice import (
    MAX_ALTERNATIVES,
    OptionMaker,
    PrefillOption,
    Query,
    StoreRun,
    all_ways,
    local_ways,
    make_policy,
)
from tests.support.scheduler.scheduling import BLOCK_TOKENS, TOKEN_S, hello, ref
from tests.support.scheduler.scheduling import wanted as wanted_for

BLOCK_S = TOKEN_S * BLOCK_TOKENS

local_option = OptionMaker(local_ways)


def best_option(
    query: Query, view: InstanceView, queue_s: float, threshold: float
) -> PrefillOption:
    return OptionMaker(partial(all_ways, threshold=threshold))(query, view, queue_s)


def worker(name: str, node: str = "", queue_s: float = 0.0) -> InstanceView:
    view = InstanceView.of(hello(name, Role.PREFILL, node_id=node or f"node-{name}"))
    if queue_s:
        view.assign(
            Assignment(request_id="queued", placed_s=0, num_prefill_tokens=1, prefill_s=queue_s)
        )
    return view


def run(
    store: str, first: int, stop: int, *, block_s: float = BLOCK_S / 10, fixed_s: float = 0.001,
    tier: Tier = Tier.DRAM,
) -> StoreRun:  # fmt: skip
    """Return a run of a node. Below DRAM its blocks are as far for the node itself, too."""
    return StoreRun(
        store=ref(store),
        node_id=f"node-{store}",
        tier=tier,
        first=first,
        stop=stop,
        remote_s_per_block=block_s,
        remote_fixed_s=fixed_s,
        local_s_per_block=block_s if tier.is_below_dram else block_s / 10,
        local_fixed_s=fixed_s / 10,
    )


class ListedSources:
    """`Sources` from a plain list of runs; each can also be entered in its middle."""

    def __init__(self, runs: Sequence[StoreRun]) -> None:
        self.runs = runs

    def at(self, first: int) -> list[StoreRun]:
        found = [
            run(r.store.worker_id, first, r.stop, block_s=r.remote_s_per_block,
                fixed_s=r.remote_fixed_s, tier=r.tier)
            for r in self.runs if r.first <= first < r.stop
        ]  # fmt: skip
        return sorted(
            found,
            key=lambda r: (r.tier.nearness, -r.stop, r.remote_fixed_s, r.store.worker_id),
        )

    def longest(self, first: int) -> list[StoreRun]:
        return self.at(first)[:MAX_ALTERNATIVES]

    def local(self, first: int, node_id: str) -> StoreRun | None:
        return next((run for run in self.at(first) if run.node_id == node_id), None)


def query(
    num_tokens: int, own: dict[str, int] | None = None, runs: Sequence[StoreRun] = ()
) -> Query:
    return Query(wanted=wanted_for(num_tokens), own_matches=own or {}, sources=ListedSources(runs))


def fetched(option: PrefillOption) -> list[tuple[str, int, int]]:
    return [(s.store.worker_id, s.first, s.stop) for s in option.sources]


def test_without_any_match_the_prompt_is_computed() -> None:
    option = best_option(query(401), worker("p0"), 0.0, 1.0)
    assert option.num_cached_blocks == 0
    assert option.num_new_tokens == 401
    assert fetched(option) == []
    assert option.ttft_s == pytest.approx(0.401, rel=0.05)


def test_own_blocks_save_their_computation() -> None:
    option = best_option(query(401, {"p0": 90}), worker("p0"), 0.5, 1.0)
    assert option.num_new_tokens == 41
    assert option.ttft_s == pytest.approx(0.541, rel=0.05)


def test_a_remote_prefix_is_fetched_where_that_is_faster() -> None:
    wanted = query(401, {}, [run("kv1", 0, 100)])
    assert fetched(best_option(wanted, worker("p0"), 0.0, 1.0)) == [("kv1", 0, 100)]
    slow = query(401, {}, [run("kv1", 0, 100, block_s=2 * BLOCK_S)])
    assert fetched(best_option(slow, worker("p0"), 0.0, 1.0)) == []


def test_a_busy_sender_makes_recomputing_win() -> None:
    busy = query(401, {}, [run("kv1", 0, 100, fixed_s=5.0)])
    assert fetched(best_option(busy, worker("p0"), 0.0, 1.0)) == []


def test_only_what_is_missing_is_fetched() -> None:
    wanted = query(401, {"p0": 30}, [run("kv1", 0, 100)])
    assert fetched(best_option(wanted, worker("p0"), 0.0, 1.0)) == [("kv1", 30, 100)]


def test_the_own_nodes_pool_goes_first_and_another_continues() -> None:
    runs = [run("kv0", 0, 60), run("kv1", 0, 100)]
    option = best_option(query(401, {"p0": 10}, runs), worker("p0", "node-kv0"), 0.0, 1.0)
    assert fetched(option) == [("kv0", 10, 60), ("kv1", 60, 100)]


def test_a_prefix_spread_over_pools_is_gathered() -> None:
    runs = [run("kv1", 0, 40), run("kv2", 40, 70), run("kv3", 70, 95)]
    option = best_option(query(401, {}, runs), worker("p0"), 0.0, 1.0)
    assert fetched(option) == [("kv1", 0, 40), ("kv2", 40, 70), ("kv3", 70, 95)]
    assert option.num_cached_blocks == 95
    assert option.num_fetch_blocks == 95


def test_a_slow_tail_is_recomputed() -> None:
    runs = [run("kv1", 0, 80), run("kv2", 80, 100, block_s=3 * BLOCK_S)]
    assert fetched(best_option(query(401, {}, runs), worker("p0"), 0.0, 1.0)) == [("kv1", 0, 80)]


def test_a_run_is_taken_as_far_down_its_tiers_as_it_pays() -> None:
    near, slow = BLOCK_S / 10, 3 * BLOCK_S
    for ssd_s, object_s, taken in (
        (slow, slow, [("kv1", 0, 40)]),
        (near, slow, [("kv1", 0, 40), ("kv1", 40, 70)]),
        (near, near, [("kv1", 0, 40), ("kv1", 40, 70), ("kv1", 70, 100)]),
        # What a slow disk costs is not more than what comes after it saves.
        (1.2 * BLOCK_S, near, [("kv1", 0, 40), ("kv1", 40, 70), ("kv1", 70, 100)]),
    ):
        runs = [
            run("kv1", 0, 40),
            run("kv1", 40, 70, block_s=ssd_s, tier=Tier.SSD),
            run("kv1", 70, 100, block_s=object_s, tier=Tier.OBJECT),
        ]
        for node in ("node-p0", "node-kv1"):
            option = best_option(query(401, {}, runs), worker("p0", node), 0.0, 1.0)
            assert fetched(option) == taken
            tiers = [Tier.DRAM, Tier.SSD, Tier.OBJECT][: len(taken)]
            assert [source.tier for source in option.sources] == tiers
            assert list(option.fetch_blocks.items()) == [
                (tier.value, stop - first)
                for tier, (_, first, stop) in zip(tiers, taken, strict=True)
            ]


def test_memory_of_another_node_goes_before_a_slow_disk_of_the_own() -> None:
    runs = [run("kv0", 0, 100, block_s=BLOCK_S / 2, tier=Tier.SSD), run("kv1", 0, 60)]
    option = best_option(query(401, {}, runs), worker("p0", "node-kv0"), 0.0, 1.0)
    assert fetched(option) == [("kv1", 0, 60), ("kv0", 60, 100)]
    fast = [run("kv0", 0, 100, block_s=BLOCK_S / 20, tier=Tier.SSD), run("kv1", 0, 60)]
    option = best_option(query(401, {}, fast), worker("p0", "node-kv0"), 0.0, 1.0)
    assert fetched(option) == [("kv0", 0, 100)]


def test_the_balancing_threshold_is_about_local_memory() -> None:
    runs = [
        run("kv0", 0, 40), run("kv0", 40, 100, block_s=3 * BLOCK_S, tier=Tier.SSD),
        run("kv1", 0, 90),
    ]  # fmt: skip
    for threshold, taken in ((1.0, [("kv0", 0, 40), ("kv1", 40, 90)]), (2.5, [("kv0", 0, 40)])):
        option = best_option(query(401, {}, runs), worker("p0", "node-kv0"), 0.0, threshold)
        assert fetched(option) == taken


def test_of_two_holders_the_idle_one_may_win_with_a_shorter_run() -> None:
    runs = [run("kv1", 0, 100, fixed_s=10.0), run("kv2", 0, 95)]
    option = best_option(query(401, {}, runs), worker("p0"), 0.0, 1.0)
    assert fetched(option)[0] == ("kv2", 0, 95)


def test_the_last_token_is_never_fetched() -> None:
    wanted = query(400, {}, [run("kv1", 0, 100)])
    option = best_option(wanted, worker("p0"), 0.0, 1.0)
    assert fetched(option) == [("kv1", 0, 99)]
    assert best_option(query(400, {"p0": 100}), worker("p0"), 0.0, 1.0).num_new_tokens == 4


def test_a_fully_cached_prompt_fetches_nothing() -> None:
    wanted = query(400, {"p0": 100}, [run("kv1", 0, 100)])
    assert fetched(best_option(wanted, worker("p0"), 0.0, 1.0)) == []


def test_the_balancing_threshold_keeps_small_gains_at_home() -> None:
    wanted = query(401, {"p0": 60}, [run("kv1", 0, 100)])
    assert fetched(best_option(wanted, worker("p0"), 0.0, 2.0)) == []
    assert fetched(best_option(wanted, worker("p0"), 0.0, 1.5)) == [("kv1", 60, 100)]
    nothing_here = query(401, {}, [run("kv1", 0, 100)])
    assert fetched(best_option(nothing_here, worker("p0"), 0.0, 50.0)) == [("kv1", 0, 100)]


def test_local_means_local() -> None:
    runs = [run("kv0", 0, 60), run("kv1", 0, 100)]
    option = local_option(query(401, {}, runs), worker("p0", "node-kv0"), 0.0)
    assert fetched(option) == [("kv0", 0, 60)]


def test_no_way_found_is_slower_than_any_other_that_was_possible() -> None:
    """The choice is a true minimum over all cuts, not only over those that were tried."""
    runs = [run("kv1", 0, 57), run("kv2", 57, 83, tier=Tier.SSD), run("kv0", 0, 31)]
    view, wanted = worker("p0", "node-kv0"), query(401, {"p0": 13}, runs)
    chosen = best_option(wanted, view, 0.0, 1.0)
    for stop in range(13, 84):
        parts = [(r, max(13, r.first), min(stop, r.stop)) for r in runs[:2]]
        fetch_s = sum(r.fetch_s(b - a, local=False) for r, a, b in parts if b > a)
        compute_s = view.cost.prefill_s(401 - 4 * stop, 4 * stop, 0)
        assert chosen.ttft_s <= fetch_s + compute_s + 1e-12


# ------------------------------------------------------------------ policies


def choose(
    policy: str, wanted: Query, workers: Sequence[InstanceView], **config: object
) -> PrefillOption:
    settings = SchedulerConfig(policy=policy, **config)  # type: ignore[arg-type]  # as given
    option = make_policy(settings, SeededIds(0)).choose(wanted, workers)
    assert option is not None
    return option


def test_kvcache_centric_weighs_cache_against_queue() -> None:
    near, far = worker("p0", queue_s=0.1), worker("p1")
    assert choose("kvcache-centric", query(401, {"p0": 100}), [near, far]).view is near
    swamped = worker("p0", queue_s=3.0)
    assert choose("kvcache-centric", query(401, {"p0": 100}), [swamped, far]).view is far


def test_a_hot_prefix_moves_to_an_idle_worker() -> None:
    workers = [worker("p0", queue_s=3.0), worker("p1")]
    wanted = query(401, {"p0": 100}, [run("kv0", 0, 100)])
    option = choose("kvcache-centric", wanted, workers)
    assert option.view is workers[1]
    assert fetched(option) == [("kv0", 0, 100)]


def test_local_cache_aware_never_fetches_from_afar() -> None:
    option = choose("local-cache-aware", query(401, {}, [run("kv1", 0, 100)]), [worker("p0")])
    assert fetched(option) == []


def test_remote_fetches_can_be_switched_off_for_all() -> None:
    wanted = query(401, {}, [run("kv1", 0, 100)])
    for policy in POLICIES:
        assert fetched(choose(policy, wanted, [worker("p0")], fetch_remote=False)) == []


def test_load_balance_ignores_the_cache() -> None:
    workers = [worker("p0", queue_s=0.2), worker("p1", queue_s=0.1)]
    assert choose("load-balance", query(401, {"p0": 100}), workers).view is workers[1]


def test_round_robin_takes_turns_and_survives_changes() -> None:
    policy = make_policy(SchedulerConfig(policy="round-robin"), SeededIds(0))
    workers = [worker(f"p{i}") for i in range(3)]

    def turn(among: Sequence[InstanceView]) -> str:
        option = policy.choose(query(10), among)
        assert option is not None
        return option.view.worker_id

    assert [turn(workers) for _ in range(4)] == ["p0", "p1", "p2", "p0"]
    assert [turn([workers[0], workers[2]]) for _ in range(3)] == ["p2", "p0", "p2"]


def test_random_is_replayed_by_its_seed_and_reaches_all() -> None:
    workers = [worker(f"p{i}") for i in range(3)]
    runs = []
    for _ in range(2):
        policy = make_policy(SchedulerConfig(policy="random"), SeededIds(5))
        options = [policy.choose(query(10), workers) for _ in range(40)]
        runs.append([o.view.worker_id for o in options if o is not None])
    assert runs[0] == runs[1]
    assert set(runs[0]) == {"p0", "p1", "p2"}


@pytest.mark.parametrize("policy", POLICIES)
def test_without_workers_none_is_chosen(policy: str) -> None:
    assert make_policy(SchedulerConfig(policy=policy), SeededIds(0)).choose(query(10), []) is None


def test_equal_workers_are_chosen_by_load_then_name() -> None:
    workers = [worker("p1"), worker("p0")]
    assert choose("kvcache-centric", query(10), workers).view.worker_id == "p0"
    workers[1].assign(Assignment(request_id="x", placed_s=0.0))
    assert choose("kvcache-centric", query(10), workers).view.worker_id == "p1"
