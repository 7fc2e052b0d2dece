"""Placements from facts: caches, queues, room, limits; and books that come out even."""

from typing import Any

import pytest
from msgspec.structs import replace

from mooncake.base import (
    BlockEvents,
    CostSample,
    LoadReport,
    Role,
    SeededIds,
    Tier,
    WorkerHello,
    WorkerLoad,
)
from mooncake.engine.cost import StepCostModel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.admission import Placement, Rejection
from mooncake.scheduler.placement.conductor import HELD_STEPS, Conductor
from mooncake.scheduler.placement.views import REST_S
from tests.support.engine.fake_runner import small_layout
from tests.support.scheduler.scheduling import (
    BLOCK_TOKENS,
    FINGERPRINT,
    conductor,
    hello,
    keys_of,
    ref,
    request,
    snapshot,
)

P0, P1 = hello("p0", Role.PREFILL), hello("p1", Role.PREFILL)
D0, D1 = hello("d0", Role.DECODE), hello("d1", Role.DECODE)
KV0 = hello("kv0", Role.KVSTORE, node_id="node-p0")
KV1 = hello("kv1", Role.KVSTORE, node_id="node-d0")


def place(made: Conductor, generate: Any, now: float = 0.0, **changes: Any) -> Placement:
    result = made.place(generate, keys_of(generate), changes.pop("num_output", 0), now, **changes)
    assert isinstance(result, Placement), result
    return result


def refused(made: Conductor, generate: Any) -> Rejection:
    result = made.place(generate, keys_of(generate), 0, 0.0)
    assert isinstance(result, Rejection)
    made.check_integrity(set())
    return result


def test_nothing_is_placed_on_a_worker_that_holds_experts_alone() -> None:
    made = conductor([P0, D0])
    experts = hello("x0", Role.EXPERTS, num_blocks=0, profile=[])
    assert made.on_hello(experts) is None
    assert made.view("x0") is not None, "it is shown"
    for seed in range(4):
        placed = place(made, request(f"r{seed}", 16 * (1 + seed)))
        assert (placed.prefill, placed.decode) == (P0.worker, D0.worker)
    made.on_lost("x0")
    assert made.view("x0") is None
    refused(conductor([P0, experts]), request())


def test_other_weights_are_taken_once_the_workers_of_the_old_ones_have_left() -> None:
    given = small_layout(block_tokens=BLOCK_TOKENS, fingerprint=FINGERPRINT)
    made = Conductor(SchedulerConfig(), SeededIds(0), layout=given)
    old, new = hello("d0", Role.DECODE), hello("d1", Role.DECODE, layout_fingerprint="new")
    assert made.on_hello(old) is None
    made.use_fingerprint("new")
    assert made.on_hello(new) is not None, "old and new are never members together"
    made.on_lost("d0")
    assert made.on_hello(old) is not None
    assert made.on_hello(new) is None


def test_a_cluster_without_decode_workers_is_503() -> None:
    assert refused(conductor([]), request()).status == 503
    assert refused(conductor([P0]), request()).reason == "no_decode_worker"


def test_without_prefill_workers_the_decode_worker_does_it_all() -> None:
    placement = place(conductor([D0]), request())
    assert placement.prefill is None
    assert placement.decode == D0.worker


def test_policies_choose_among_workers_that_do_it_all() -> None:
    workers = [hello(f"d{number}", Role.DECODE) for number in range(3)]
    long = request("long", 401)
    chosen = {}
    for policy in ("round-robin", "load-balance", "kvcache-centric"):
        made = conductor(workers, policy=policy)
        made.on_blocks(snapshot(workers[1].worker, keys_of(long)))
        requests = [replace(long, request_id=f"r{turn}") for turn in range(3)]
        chosen[policy] = [place(made, each).decode.worker_id for each in requests]
    assert chosen["round-robin"] == ["d0", "d1", "d2"]
    assert sorted(chosen["load-balance"]) == ["d0", "d1", "d2"]
    assert chosen["kvcache-centric"] == ["d1", "d1", "d1"]


def test_prompts_go_to_prefill_and_on_to_decode() -> None:
    placement = place(conductor([D0, P0]), request())
    assert (placement.prefill, placement.decode) == (P0.worker, D0.worker)
    assert placement.predicted_ttft_s == pytest.approx(0.016, rel=0.1)
    assert placement.num_cached_tokens == 0


def test_a_first_token_that_is_held_is_predicted_with_the_second() -> None:
    at_once = place(conductor([D0, P0]), request())
    held = place(conductor([D0, P0], tbt_slo_s=1.0), request())
    late_s = HELD_STEPS * held.predicted_tbt_s
    assert held.predicted_ttft_s == pytest.approx(at_once.predicted_ttft_s + late_s)
    own = place(conductor([D0, P0]), request(tbt_slo_s=1.0))
    assert own.predicted_ttft_s == held.predicted_ttft_s
    whole = [place(conductor([D0], **limit), request()) for limit in ({}, {"tbt_slo_s": 1.0})]
    assert whole[0].predicted_ttft_s == whole[1].predicted_ttft_s, "it comes from decode"


def test_a_prompt_behind_another_waits_for_the_rest_of_its_step() -> None:
    predicted = []
    for seconds in (0.0, 0.3, 9.0):
        made = conductor([D0, P0])
        first = place(made, request("a", 1000), 5.0)
        predicted.append(place(made, request("b", 16), 5.0 + seconds).predicted_ttft_s)
    assert predicted[0] == pytest.approx(first.predicted_ttft_s + 0.016, rel=0.1)
    assert predicted[0] - predicted[1] == pytest.approx(0.3)
    assert predicted[2] == pytest.approx(0.016, rel=0.1), "it should be there any moment"


def test_streams_of_a_decode_worker_count_in_the_first_token_of_whole_requests() -> None:
    made = conductor([D0])
    alone_s = place(made, request("a", 200)).predicted_ttft_s
    made.on_prefilled(request("a", 200), 1.0)
    beside_s = place(made, request("b", 200), 1.0).predicted_ttft_s
    assert beside_s > alone_s + StepCostModel(D0.profile).streams_s(1, 200) / 2


def test_a_cached_prefix_attracts() -> None:
    made = conductor([P0, P1, D0])
    long = request("long", 400)
    made.on_blocks(snapshot(P1.worker, keys_of(long)))
    placement = place(made, long)
    assert placement.prefill == P1.worker
    assert placement.num_cached_tokens == 396


def test_a_prefix_in_a_pool_is_fetched() -> None:
    made = conductor([P0, D0, KV1], remote_bytes_per_s=1e9)
    long = request("long", 401)
    made.on_blocks(snapshot(KV1.worker, keys_of(long)[:60], Tier.DRAM))
    placement = place(made, long)
    (source,) = placement.sources
    assert (source.store, source.first, source.stop) == (KV1.worker, 0, 60)
    assert placement.num_fetch_blocks == 60


def test_the_other_replicas_of_a_prefix_are_named_best_first() -> None:
    pools = [hello(f"pool-{n}", Role.KVSTORE) for n in range(4)]
    made = conductor([P0, D0, *pools], remote_bytes_per_s=1e9)
    long = request("long", 401)
    for pool, count in zip(pools, (60, 90, 80, 20), strict=True):
        made.on_blocks(snapshot(pool.worker, keys_of(long)[:count], Tier.DRAM))
    (source,) = place(made, long).sources
    assert (source.store, source.stop) == (pools[1].worker, 90)
    assert source.others == [pools[2].worker, pools[0].worker]
    made.release("long")
    made.check_integrity(set())


def test_whole_requests_fetch_too() -> None:
    made = conductor([D0, KV0])
    long = request("long", 401)
    made.on_blocks(snapshot(KV0.worker, keys_of(long), Tier.DRAM))
    assert place(made, long).num_fetch_blocks == 100


def test_a_prompt_and_its_answer_are_gathered_from_two_pools() -> None:
    made = conductor([P0, D0, KV0, KV1])
    turn = request("turn", 401)
    keys = keys_of(turn)
    made.on_blocks(snapshot(KV0.worker, keys[:50], Tier.DRAM))
    made.on_blocks(snapshot(KV1.worker, keys[50:90], Tier.DRAM))
    assert [(s.store.worker_id, s.first, s.stop) for s in place(made, turn).sources] == [
        ("kv0", 0, 50),
        ("kv1", 50, 90),
    ]


def test_siblings_of_a_burst_follow_the_first_one() -> None:
    made = conductor([P0, P1, D0])
    prompt = list(range(2000))
    first = place(made, request("a", prompt_tokens=prompt))
    second = place(made, request("b", prompt_tokens=[*prompt, 7]))
    other = place(made, request("c", 64))
    assert second.prefill == first.prefill
    assert second.num_cached_tokens == 2000
    assert other.prefill != first.prefill
    for name in ("a", "b", "c"):
        made.release(name)
    made.check_integrity(set())


def test_queues_spread_what_has_nothing_in_common() -> None:
    made = conductor([P0, P1, D0])
    used = [place(made, request(f"r{i}", 200)).prefill for i in range(4)]
    assert used.count(P0.worker) == used.count(P1.worker) == 2


def test_decode_load_is_spread_by_tokens() -> None:
    batch = [CostSample(b, c, b, 1e-3 * b + 1e-5 * c) for b in (1, 8) for c in (0, 10_000)]
    made = conductor([P0, *(hello(n, Role.DECODE, profile=batch) for n in ("d0", "d1"))])
    used = [place(made, request("long", 1000)).decode.worker_id]
    used += [place(made, request(f"r{i}", 100)).decode.worker_id for i in range(4)]
    assert used == ["d0", "d1", "d1", "d1", "d1"]


def test_the_next_turn_returns_to_the_decode_worker_that_has_its_blocks() -> None:
    made = conductor([P0, D0, D1], remote_bytes_per_s=1e4)
    turn = request("turn", 400)
    made.on_blocks(snapshot(D1.worker, keys_of(turn)))
    assert place(made, turn).decode == D1.worker


def test_draining_workers_get_nothing_new() -> None:
    made = conductor([P0, P1, D0, D1])
    made.on_draining("p0")
    made.on_draining("d0")
    placement = place(made, request())
    assert (placement.prefill, placement.decode) == (P1.worker, D1.worker)


def test_excluded_workers_are_a_last_resort() -> None:
    made = conductor([P0, P1, D0])
    placement = place(made, request(), exclude={"p0", "d0"})
    assert (placement.prefill, placement.decode) == (P1.worker, D0.worker)


def test_limits_refuse_new_requests_but_not_resumed_ones() -> None:
    made = conductor([P0, D0], ttft_slo_s=0.1)
    big = request("big", 400)
    rejection = refused(made, big)
    assert (rejection.status, rejection.reason) == (429, "ttft_limit")
    place(made, big, exclude=set())
    made.release("big")
    made.check_integrity(set())


def test_the_queue_counts_against_the_limit_and_gives_way_again() -> None:
    made = conductor([P0, D0], ttft_slo_s=0.5)
    place(made, request("a", 400))
    assert isinstance(made.place(request("b", 200), [], 0, 0.0), Rejection)
    made.on_prefilled(request("a"), 0.0)
    place(made, request("b", 200))


def test_the_gap_limit_refuses() -> None:
    rejection = refused(conductor([P0, D0], tbt_slo_s=1e-5), request())
    assert (rejection.status, rejection.reason) == (429, "tbt_limit")


def test_full_decode_workers_refuse_only_under_a_gap_limit() -> None:
    full = LoadReport(
        worker=D0.worker, load=WorkerLoad(num_running=5, num_free_blocks=0, num_total_blocks=1000)
    )
    limited, unlimited = conductor([P0, D0], tbt_slo_s=10.0), conductor([P0, D0])
    for made in (limited, unlimited):
        made.on_load(full, 1.0)
    assert refused(limited, request()).reason == "decode_full"
    place(unlimited, request())


def test_what_fits_nowhere_is_a_clients_error() -> None:
    small_decode = conductor([P0, hello("d0", Role.DECODE, num_blocks=10)])
    small_prefill = conductor([hello("p0", Role.PREFILL, num_blocks=10), D0])
    small_whole = conductor([hello("d0", Role.DECODE, num_blocks=10)])
    for made in (small_decode, small_prefill, small_whole):
        assert refused(made, request("r", 10 * BLOCK_TOKENS + 1)).status == 400
    place(small_prefill, request("r", 10 * BLOCK_TOKENS))


def test_short_prompts_run_whole_on_decode_where_allowed_and_faster() -> None:
    made = conductor([P0, D0], whole_on_decode_max_tokens=32)
    place(made, request("queued", 500))
    assert place(made, request("short", 20)).prefill is None
    assert place(made, request("long", 33)).prefill == P0.worker
    off = conductor([P0, D0])
    place(off, request("queued", 500))
    assert place(off, request("short", 20)).prefill == P0.worker


def test_a_short_prompt_does_not_delay_a_batch_beyond_its_limit() -> None:
    made = conductor([P0, D0], whole_on_decode_max_tokens=32, tbt_slo_s=0.01)
    place(made, request("queued", 500))
    assert place(made, request("short", 20)).prefill == P0.worker


def test_a_resumed_request_counts_its_output() -> None:
    made = conductor([P0, D0])
    placement = place(made, request("r", 100), num_output=300, exclude=set())
    assert placement.predicted_ttft_s == pytest.approx(0.4, rel=0.1)


def test_output_lengths_are_learned() -> None:
    made = conductor([P0, hello("d0", Role.DECODE, num_blocks=100), D1], expected_output_tokens=400)
    assert place(made, request("a", 40, 1000)).decode == D1.worker
    made.release("a", 4)
    for index in range(30):
        place(made, request(f"r{index}", 40, 1000))
        made.release(f"r{index}", 4)
    assert place(made, request("b", 40, 1000)).decode.worker_id == "d0"


# --------------------------------------------------------------------- facts


def test_another_layout_is_refused_with_a_reason() -> None:
    made = conductor([P0])
    reason = made.on_hello(hello("d0", Role.DECODE, layout_fingerprint="layout-2"))
    assert reason is not None
    assert "layout-2" in reason
    assert "same model" in reason
    assert made.on_hello(hello("d0", Role.DECODE, block_tokens=8)) is not None
    assert made.view("d0") is None


def test_when_all_have_gone_another_layout_may_come() -> None:
    made = conductor([P0])
    made.on_lost("p0")
    assert made.layout is None
    assert made.on_hello(hello("d0", Role.DECODE, layout_fingerprint="layout-2")) is None


def test_a_layout_that_the_cluster_has_is_not_set_by_who_comes_first() -> None:
    """A pool node with other blocks is refused, and the engines that come later are not."""
    layout = small_layout(block_tokens=BLOCK_TOKENS, fingerprint=FINGERPRINT)
    made = Conductor(SchedulerConfig(), SeededIds(0), layout=layout)
    reason = made.on_hello(hello("k0", Role.KVSTORE, block_tokens=2 * BLOCK_TOKENS))
    assert reason is not None
    assert f"({2 * BLOCK_TOKENS} tokens a block) is not the cluster's {FINGERPRINT} (" in reason
    for worker in (P0, D0):
        assert made.on_hello(worker) is None
        made.on_lost(worker.worker.worker_id)
    assert made.layout is not None, "also while nobody is there"
    assert made.on_hello(hello("k0", Role.KVSTORE, block_tokens=2 * BLOCK_TOKENS)) is not None


def test_a_repeated_hello_keeps_the_bookings() -> None:
    made = conductor([P0, D0])
    place(made, request("a"))
    assert made.on_hello(P0) is None
    made.check_integrity({"a"})


def test_a_lost_worker_is_used_no_more() -> None:
    made = conductor([P0, P1, D0])
    long = request("long", 400)
    made.on_blocks(snapshot(P1.worker, keys_of(long)))
    made.on_lost("p1")
    made.on_lost("p1")
    placement = place(made, long)
    assert placement.prefill == P0.worker
    assert placement.num_cached_tokens == 0


def test_a_pool_that_is_lost_is_not_named_as_source() -> None:
    made = conductor([P0, D0, KV1])
    long = request("long", 401)
    made.on_blocks(snapshot(KV1.worker, keys_of(long), Tier.DRAM))
    made.on_lost("kv1")
    assert place(made, long).sources == ()


def test_a_release_after_the_loss_leaves_nothing() -> None:
    made = conductor([P0, D0])
    place(made, request("a", 400))
    made.on_lost("p0")
    assert made.on_hello(hello("p0", Role.PREFILL, epoch="e1")) is None
    made.release("a")
    made.release("a")
    made.check_integrity(set())
    view = made.view("p0")
    assert view is not None
    assert view.queued_s() == 0


def test_missed_events_are_noticed_until_a_snapshot_comes() -> None:
    made = conductor([P0])
    events = [
        BlockEvents(
            worker=P0.worker, tier=Tier.HBM, sequence_no=number, stored=[bytes([number] * 16)]
        )
        for number in (1, 3)
    ]
    made.on_blocks(events[0])
    assert not made.needs_snapshot("p0")
    made.on_blocks(events[1])
    assert made.needs_snapshot("p0")
    made.on_blocks(BlockEvents(worker=P0.worker, tier=Tier.HBM, sequence_no=4, snapshot=True))
    assert not made.needs_snapshot("p0")
    assert not made.needs_snapshot("unknown")


def test_reports_of_strangers_and_old_epochs_are_ignored() -> None:
    made = conductor([P0, D0])
    load = WorkerLoad(num_queued_tokens=10**6)
    for worker in (ref("p0", "e9"), ref("p7")):
        made.on_load(LoadReport(worker=worker, load=load), 1.0)
        made.on_blocks(snapshot(worker, [b"k" * 16]))
    view = made.view("p0")
    assert view is not None
    assert view.queued_s() == 0
    assert made.num_indexed_blocks == 0


def test_measured_steps_refine_the_model() -> None:
    made = conductor([P0, D0])
    slow = [CostSample(256, 0, 1, 2.56)] * 60
    for now in range(6):
        made.on_load(LoadReport(worker=P0.worker, load=WorkerLoad(), samples=slow), float(now))
    view = made.view("p0")
    assert view is not None
    assert view.cost.error_ratio is not None
    assert view.cost.prefill_s(256, 0, 0) > 1.5


@pytest.mark.parametrize("worker", [P0, D0])
def test_a_worker_that_was_slow_is_tried_again_after_a_rest(worker: WorkerHello) -> None:
    """All requests were refused from then on, so that no step could show that it is fast again."""
    made = conductor([D0, P0], ttft_slo_s=1.0, tbt_slo_s=0.1)
    load = WorkerLoad(num_free_blocks=1000, num_total_blocks=1000)
    usual = CostSample(64, 0, 1, 0.064) if worker is P0 else CostSample(4, 0, 4, 0.004).of_streams()
    slow = replace(usual, seconds=50 * usual.seconds)
    for number, sample in enumerate([usual] * 15 + [slow] * 4):
        report = LoadReport(worker=worker.worker, load=load, samples=[sample] * 4)
        made.on_load(report, 0.1 * number)
    asked = request("a", 64)
    assert refused(made, asked).reason == ("ttft_limit" if worker is P0 else "tbt_limit")
    made.on_load(LoadReport(worker=worker.worker, load=load), 2.0 + REST_S)
    place(made, asked, 2.0 + REST_S)
