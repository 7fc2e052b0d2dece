"""One final event a request, tokens in order, and workers told what they must know: step by step,
with workers that answer only when told.
"""

import pytest

from mooncake.base import (
    BlockEvents,
    Drain,
    FinishReason,
    LoadReport,
    PeerLost,
    Role,
    Tier,
    Welcome,
    WorkerLoad,
    WorkerRef,
)
from mooncake.base.messages import FinishInfo, GatewayNews
from mooncake.scheduler.admission import MAX_RETRY_S
from mooncake.telemetry.events import Finished, Placed, Refused, WorkerJoined, WorkerLeft
from tests.support.scheduling import (
    GATEWAY,
    House,
    Pair,
    hello,
    keys_of,
    ref,
    request,
    snapshot,
)


@pytest.fixture
def house() -> Pair:
    return Pair()


# ------------------------------------------------------------------- the way


def test_tasks_name_each_other(house: Pair) -> None:
    house.submit(request("r"))
    (decode_task,) = house.tasks(house.d0)
    (prefill_task,) = house.tasks(house.p0)
    assert decode_task.prefill == house.p0
    assert prefill_task.decode == house.d0
    assert decode_task.gateway == prefill_task.gateway == GATEWAY
    assert decode_task.attempt == prefill_task.attempt == 1
    assert decode_task.output_tokens == prefill_task.output_tokens == []


def test_a_request_from_first_token_to_end(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=3))
    house.output(house.p0, "r", 0, [7], num_cached_tokens=12)
    house.output(house.d0, "r", 1, [8])
    house.output(house.d0, "r", 2, [9], FinishReason.LENGTH)
    assert client.tokens == [7, 8, 9]
    assert client.final.reason is FinishReason.LENGTH
    assert (client.final.num_output_tokens, client.final.num_cached_tokens) == (3, 12)
    assert client.final.failure is None
    assert house.aborts(house.d0) == house.aborts(house.p0) == []
    house.close()


def test_the_first_token_may_come_from_both(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=2))
    house.output(house.d0, "r", 0, [7])
    house.output(house.p0, "r", 0, [7])
    house.output(house.d0, "r", 1, [8], FinishReason.LENGTH)
    assert client.tokens == [7, 8]
    house.close()


def test_decode_may_overtake_prefill(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=2))
    house.output(house.d0, "r", 1, [8], FinishReason.LENGTH)
    assert client.tokens == []
    house.output(house.p0, "r", 0, [7])
    assert client.tokens == [7, 8]
    assert client.final.reason is FinishReason.LENGTH
    house.close()


def test_an_end_at_the_first_token_frees_the_reservation(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=1))
    stop = FinishInfo(reason=FinishReason.STOP, stop_token_id=7)
    house.output(house.p0, "r", 0, [7], stop)
    assert client.final.stop_token_id == 7
    assert [(m.request_id, m.attempt) for m in house.aborts(house.d0)] == [("r", 1)]
    assert house.aborts(house.p0) == []
    house.close()


def test_without_prefill_decode_gets_it_all() -> None:
    house = House()
    d0 = house.join("d0", Role.DECODE)
    client = house.submit(request("r", max_tokens=2))
    (task,) = house.tasks(d0)
    assert task.prefill is None
    house.output(d0, "r", 0, [1, 2], FinishReason.LENGTH)
    assert client.tokens == [1, 2]
    house.close()


def test_sources_go_to_who_computes_the_prompt() -> None:
    house = Pair()
    kv0 = house.join("kv0", Role.KVSTORE)
    long = request("r", 400)
    house.gateway.handle(snapshot(kv0, keys_of(long), Tier.DRAM), 0.0)
    house.submit(long)
    assert [s.store for s in house.tasks(house.p0)[0].sources] == [kv0]
    assert house.tasks(house.d0)[0].sources == []


# ------------------------------------------------------------------ refusals


def test_nobody_there_is_503_with_advice() -> None:
    house = House()
    client = house.submit(request())
    assert client.final.reason is FinishReason.REJECTED
    failure = client.final.failure
    assert failure is not None
    assert failure.status == 503
    assert failure.retry_after_s is not None
    house.close()


def test_permits_run_out_and_come_back() -> None:
    house = Pair(max_inflight=1)
    first = house.submit(request("a", max_tokens=1))
    refused = house.submit(request("b"))
    assert refused.final.failure is not None
    assert refused.final.failure.status == 429
    house.output(house.p0, "a", 0, [1], FinishReason.LENGTH)
    assert first.final.reason is FinishReason.LENGTH
    assert not house.submit(request("b")).finals


def test_limits_are_429_and_leave_nothing() -> None:
    house = Pair(ttft_slo_s=0.05)
    failure = house.submit(request("big", 400)).final.failure
    assert failure is not None
    assert failure.status == 429
    assert failure.retry_after_s is not None
    assert 1 <= failure.retry_after_s <= 1.25 * MAX_RETRY_S
    assert [e.reason for e in house.events.events if isinstance(e, Refused)] == ["ttft_limit"]
    house.close()


def test_a_name_in_use_is_refused_and_the_first_goes_on(house: Pair) -> None:
    first = house.submit(request("r", max_tokens=1))
    second = house.submit(request("r"))
    assert second.final.failure is not None
    assert second.final.failure.status == 400
    house.output(house.p0, "r", 0, [1], FinishReason.LENGTH)
    assert first.tokens == [1]
    house.close()


def test_draining_refuses_the_new_and_finishes_the_old(house: Pair) -> None:
    old = house.submit(request("old", max_tokens=1))
    house.gateway.drain(house.now)
    house.gateway.drain(house.now)
    refused = house.submit(request("new")).final.failure
    assert refused is not None
    assert refused.status == 503
    assert not house.gateway.idle
    assert house.gateway.status(house.now).draining
    house.output(house.p0, "old", 0, [1], FinishReason.LENGTH)
    assert old.final.reason is FinishReason.LENGTH
    house.close()


# -------------------------------------------------------------------- aborts


def test_an_abort_ends_at_once_and_frees_both_workers(house: Pair) -> None:
    client = house.submit(request("r"))
    house.gateway.abort("r", house.now)
    house.gateway.abort("r", house.now)
    assert client.final.reason is FinishReason.ABORT
    assert client.final.failure is None
    assert len(house.aborts(house.p0)) == len(house.aborts(house.d0)) == 1
    house.close()


def test_after_the_hand_over_only_decode_is_told(house: Pair) -> None:
    house.submit(request("r"))
    house.output(house.p0, "r", 0, [1])
    house.output(house.d0, "r", 1, [2])
    house.gateway.abort("r", house.now)
    assert house.aborts(house.p0) == []
    assert len(house.aborts(house.d0)) == 1


def test_tokens_on_their_way_after_the_abort_reach_nobody(house: Pair) -> None:
    client = house.submit(request("r"))
    house.gateway.abort("r", house.now)
    house.output(house.p0, "r", 0, [1])
    assert client.tokens == []
    assert len(house.aborts(house.p0)) == 2, "whoever still works on it is told again"
    house.output(house.p0, "r", 1, [], FinishReason.STOP)
    assert len(house.aborts(house.p0)) == 2
    house.close()


def test_a_sink_may_abort_its_own_request(house: Pair) -> None:
    seen: list[object] = []

    def sink(event: object) -> None:
        seen.append(event)
        if len(seen) == 1:
            house.gateway.abort("r", house.now)

    house.gateway.submit(request("r", max_tokens=2), sink, 0.0)
    house.output(house.p0, "r", 0, [1, 2], FinishReason.LENGTH)
    assert [type(event).__name__ for event in seen] == ["TokensEvent", "FinalEvent"]
    house.close()


def test_a_sink_may_submit_the_next_request(house: Pair) -> None:
    clients = []

    def sink(event: object) -> None:
        if type(event).__name__ == "FinalEvent":
            clients.append(house.submit(request("next")))

    house.gateway.submit(request("r", max_tokens=1), sink, 0.0)
    house.output(house.p0, "r", 0, [1], FinishReason.LENGTH)
    assert len(clients) == 1
    assert len(house.tasks(house.p0)) == 2


# ------------------------------------------------------------------- workers


def test_a_repeated_hello_is_answered_again(house: Pair) -> None:
    house.gateway.handle(hello("p0", Role.PREFILL), 1.0)
    assert [m.send_snapshot for m in house.channel.of(Welcome, house.p0.address)] == [True, True]


def test_a_new_epoch_replaces_the_old_one(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=1))
    again = house.join("d0", Role.DECODE, epoch="e1")
    assert [task.attempt for task in house.tasks(again)] == [2]
    assert PeerLost(worker=house.d0) in house.channel.of(PeerLost, house.p0.address)
    house.output(house.p0, "r", 0, [1], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1]
    house.close()


def test_a_late_hello_of_the_dead_changes_nothing(house: Pair) -> None:
    again = house.join("d0", Role.DECODE, epoch="e1")
    house.join("d0", Role.DECODE)
    house.submit(request("r"))
    assert len(house.tasks(again)) == 1
    assert house.channel.of(PeerLost, house.d0.address) == [PeerLost(worker=house.d0)]


def test_a_worker_of_another_layout_is_not_used(
    house: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = house.join("d1", Role.DECODE, layout_fingerprint="layout-2")
    house.join("d1", Role.DECODE, layout_fingerprint="layout-2")
    assert house.channel.of(Welcome, stranger.address) == []
    assert caplog.text.count("d1 is not used") == 1
    assert [worker.id for worker in house.gateway.status(0.0).workers] == ["p0", "d0"]


def test_outputs_of_workers_that_have_not_this_request_are_ignored(house: Pair) -> None:
    d1 = house.join("d1", Role.DECODE)
    client = house.submit(request("r"))
    holder = house.d0 if house.tasks(house.d0) else d1
    other = d1 if holder == house.d0 else house.d0
    house.output(other, "r", 0, [99])
    house.output(WorkerRef(holder.worker_id, "e9", "x"), "r", 0, [98])
    assert client.tokens == []


def test_missed_block_events_are_asked_for_again(house: Pair) -> None:
    house.now = 2.0
    for number in (1, 3):
        event = BlockEvents(worker=house.p0, tier=Tier.HBM, sequence_no=number, stored=[b"k" * 16])
        house.gateway.handle(event, house.now)
    assert len(house.channel.of(Welcome, house.p0.address)) == 2


def test_a_draining_worker_is_told_and_left_alone(house: Pair) -> None:
    p1 = house.join("p1", Role.PREFILL)
    house.gateway.drain_worker("p0")
    house.gateway.drain_worker("unknown")
    assert house.channel.of(Drain, house.p0.address) == [Drain()]
    for index in range(3):
        house.submit(request(f"r{index}"))
    assert len(house.tasks(p1)) == 3
    states = {worker.id: worker.state for worker in house.gateway.status(0.0).workers}
    assert states == {"p0": "draining", "d0": "up", "p1": "up"}


def test_a_pool_that_drains_by_itself_is_shown_so(house: Pair) -> None:
    pool = house.join("kv0", Role.KVSTORE)
    house.report(pool, draining=True)
    states = {worker.id: worker.state for worker in house.gateway.status(0.0).workers}
    assert states == {"p0": "up", "d0": "up", "kv0": "draining"}


def test_messages_for_others_are_ignored(house: Pair) -> None:
    house.gateway.handle(Drain(), 0.0)
    house.gateway.handle(LoadReport(worker=ref("stranger"), load=WorkerLoad()), 0.0)
    house.gateway.check_integrity()


def test_status_adds_up(house: Pair) -> None:
    kv0 = house.join("kv0", Role.KVSTORE, num_blocks=50, block_bytes=10)
    house.report(kv0, num_total_blocks=50, num_free_blocks=30)
    house.report(house.d0, num_total_blocks=1000, num_free_blocks=900, num_context_tokens=64)
    house.submit(request("a"))
    house.submit(request("b"))
    house.output(house.p0, "a", 0, [1])
    status = house.gateway.status(4.0)
    assert status.ready
    assert (status.pool.num_used_blocks, status.pool.used_bytes) == (20, 200)
    assert (status.pool.num_nodes, status.pool.total_bytes) == (1, 500)
    load = status.load
    assert (load.num_inflight, load.num_prefilling, load.num_decoding) == (2, 1, 1)
    assert (load.num_free_blocks, load.num_total_blocks) == (900, 1000)
    worker = status.workers[1]
    assert (worker.id, worker.role, worker.pid) == ("d0", Role.DECODE, 1)
    assert worker.silent_s == 4.0
    assert status.counters["requests_accepted"] == 2


def test_events_tell_the_story(house: Pair) -> None:
    house.submit(request("r", max_tokens=2))
    house.output(house.p0, "r", 0, [1], num_cached_tokens=4)
    house.now = 1.0
    house.output(house.d0, "r", 1, [2], FinishReason.LENGTH)
    story = [e for e in house.events.events if getattr(e, "request_id", "") == "r"]
    kinds = [type(event).__name__ for event in story]
    assert kinds == ["Accepted", "Placed", "FirstToken", "Tokens", "Tokens", "Finished"]
    placed, finished = story[1], story[-1]
    assert isinstance(placed, Placed)
    assert (placed.prefill, placed.decode) == ("p0", "d0")
    assert isinstance(finished, Finished)
    assert (finished.num_cached_tokens, finished.status, finished.at_s) == (4, 200, 1.0)


def test_it_is_ready_when_a_request_has_all_the_workers_it_needs() -> None:
    def says(house: House) -> tuple[bool, list[str]]:
        status = house.gateway.status(house.now)
        return status.ready, status.missing

    alone, both = House(), House(needs_prefill=True)
    assert says(alone) == (False, ["decode"])
    assert says(both) == (False, ["prefill", "decode"])
    for house in (alone, both):
        house.join("d0", Role.DECODE)
    assert says(alone) == (True, []), "decode does whole requests there"
    assert says(both) == (False, ["prefill"])
    both.join("p0", Role.PREFILL)
    assert says(both) == (True, [])
    both.gateway.drain_worker("d0")
    assert says(both) == (False, ["decode"])
    both.join("d1", Role.DECODE)
    assert says(both) == (True, [])
    both.gateway.worker_lost("p0", both.now)
    assert says(both) == (False, ["prefill"])
    assert not both.gateway.status(both.now).draining
    both.gateway.drain(both.now)
    assert both.gateway.status(both.now).gateways[0].state == "draining"


def test_it_says_goodbye_to_workers_and_gateways(house: Pair) -> None:
    other = ref("gateway-7")
    house.gateway.handle(GatewayNews(gateway=other, gateways=[]), house.now)
    status = house.gateway.status(house.now)
    assert [one.id for one in status.gateways] == [GATEWAY.worker_id, other.worker_id]
    house.gateway.say_goodbye()
    for each in (house.p0, house.d0, other):
        assert house.channel.of(PeerLost, each.address) == [PeerLost(worker=GATEWAY)]
    house.gateway.handle(PeerLost(worker=other), house.now)
    assert house.channel.of(PeerLost, house.d0.address)[1:] == [PeerLost(worker=other)]
    assert len(house.gateway.status(house.now).gateways) == 1
    seen = [
        (type(e), e.worker_id)
        for e in house.events.events
        if e.at_s == house.now
        and isinstance(e, WorkerJoined | WorkerLeft)
        and e.role is Role.GATEWAY
    ]
    assert seen == [(WorkerJoined, other.worker_id), (WorkerLeft, other.worker_id)]
