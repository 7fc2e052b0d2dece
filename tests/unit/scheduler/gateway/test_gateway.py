"""One final event a request, tokens in order, and workers told what they must know: step by step,
with workers that answer only when told.
"""

import msgspec
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
from mooncake.base.block_events.kv_events import AllBlocksCleared, KvEvent
from mooncake.base.messages import OWN_RELEASE, AskCluster, ClusterTold, GatewayNews, Release
from mooncake.base.messages import Refused as RefusedMessage
from mooncake.base.request import CacheHits, CacheMisses, CacheUse, FinishInfo
from mooncake.decode.task import DecodeJob
from mooncake.scheduler import membership_table
from mooncake.scheduler.placement.admission import MAX_RETRY_S
from mooncake.scheduler.placement.block_feed import BlockFeed
from mooncake.telemetry.events import (
    Finished,
    FirstToken,
    Placed,
    Refused,
    WorkerJoined,
    WorkerLeft,
)
from tests.support.scheduler.scheduling import (
    GATEWAY,
    Pair,
    SchedulerHarness,
    hello,
    keys_of,
    ref,
    request,
    snapshot,
)
from tests.support.serve.plain_settings import LAYOUT


@pytest.fixture
def harness() -> Pair:
    return Pair()


# ------------------------------------------------------------------- the way


def test_tasks_name_each_other(harness: Pair) -> None:
    harness.submit(request("r"))
    (decode_task,) = harness.tasks(harness.d0)
    (prefill_task,) = harness.tasks(harness.p0)
    assert decode_task.prefill == harness.p0
    assert prefill_task.decode == harness.d0
    assert decode_task.gateway == prefill_task.gateway == GATEWAY
    assert decode_task.attempt == prefill_task.attempt == 1
    assert decode_task.output_tokens == prefill_task.output_tokens == []


def test_a_request_from_first_token_to_end(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=3))
    harness.output(harness.p0, "r", 0, [7], num_cached_tokens=12)
    harness.output(harness.d0, "r", 1, [8])
    harness.output(harness.d0, "r", 2, [9], FinishReason.LENGTH)
    assert client.tokens == [7, 8, 9]
    assert client.final.reason is FinishReason.LENGTH
    assert (client.final.num_output_tokens, client.final.num_cached_tokens) == (3, 12)
    assert client.final.failure is None
    assert harness.aborts(harness.d0) == harness.aborts(harness.p0) == []
    harness.close()


def test_the_first_token_may_come_from_both(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=2))
    harness.output(harness.d0, "r", 0, [7])
    harness.output(harness.p0, "r", 0, [7])
    harness.output(harness.d0, "r", 1, [8], FinishReason.LENGTH)
    assert client.tokens == [7, 8]
    harness.close()


def test_decode_may_overtake_prefill(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=2))
    harness.output(harness.d0, "r", 1, [8], FinishReason.LENGTH)
    assert client.tokens == []
    harness.output(harness.p0, "r", 0, [7])
    assert client.tokens == [7, 8]
    assert client.final.reason is FinishReason.LENGTH
    harness.close()


def test_an_end_at_the_first_token_frees_the_reservation(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=1))
    stop = FinishInfo(reason=FinishReason.STOP, stop_token_id=7)
    harness.output(harness.p0, "r", 0, [7], stop)
    assert client.final.stop_token_id == 7
    assert [(m.request_id, m.attempt) for m in harness.aborts(harness.d0)] == [("r", 1)]
    assert harness.aborts(harness.p0) == []
    harness.close()


def test_without_prefill_decode_gets_it_all() -> None:
    harness = SchedulerHarness()
    d0 = harness.join("d0", Role.DECODE)
    client = harness.submit(request("r", max_tokens=2))
    (task,) = harness.tasks(d0)
    assert task.prefill is None
    harness.output(d0, "r", 0, [1, 2], FinishReason.LENGTH)
    assert client.tokens == [1, 2]
    harness.close()


def test_sources_are_for_the_worker_that_computes_the_prompt() -> None:
    harness = Pair()
    kv0 = harness.join("kv0", Role.KVSTORE)
    long = request("r", 400)
    harness.gateway.handle(snapshot(kv0, keys_of(long), Tier.DRAM), 0.0)
    harness.submit(long)
    (task,) = harness.tasks(harness.d0)
    assert harness.tasks(harness.p0) == [task]
    assert [source.store for source in task.sources] == [kv0]
    for prefill, wanted in ((task.prefill, []), (None, task.sources)):
        job = DecodeJob(1, msgspec.structs.replace(task, prefill=prefill), LAYOUT)
        assert job.sources == wanted, "decode reads them where no prefill worker does"


# ------------------------------------------------------------------ refusals


def test_a_cluster_without_workers_is_503_with_advice() -> None:
    harness = SchedulerHarness()
    client = harness.submit(request())
    assert client.final.reason is FinishReason.REJECTED
    failure = client.final.failure
    assert failure is not None
    assert failure.status == 503
    assert failure.retry_after_s is not None
    harness.close()


def test_permits_run_out_and_come_back() -> None:
    harness = Pair(max_inflight=1)
    first = harness.submit(request("a", max_tokens=1))
    refused = harness.submit(request("b"))
    assert refused.final.failure is not None
    assert refused.final.failure.status == 429
    harness.output(harness.p0, "a", 0, [1], FinishReason.LENGTH)
    assert first.final.reason is FinishReason.LENGTH
    assert not harness.submit(request("b")).finals


def test_limits_are_429_and_leave_nothing() -> None:
    harness = Pair(ttft_slo_s=0.05)
    failure = harness.submit(request("big", 400)).final.failure
    assert failure is not None
    assert failure.status == 429
    assert failure.retry_after_s is not None
    assert 1 <= failure.retry_after_s <= 1.25 * MAX_RETRY_S
    assert [e.reason for e in harness.events.events if isinstance(e, Refused)] == ["ttft_limit"]
    harness.close()


def test_a_name_in_use_is_refused_and_the_first_goes_on(harness: Pair) -> None:
    first = harness.submit(request("r", max_tokens=1))
    second = harness.submit(request("r"))
    assert second.final.failure is not None
    assert second.final.failure.status == 400
    harness.output(harness.p0, "r", 0, [1], FinishReason.LENGTH)
    assert first.tokens == [1]
    harness.close()


def test_draining_refuses_the_new_and_finishes_the_old(harness: Pair) -> None:
    old = harness.submit(request("old", max_tokens=1))
    harness.gateway.drain(harness.now)
    harness.gateway.drain(harness.now)
    refused = harness.submit(request("new")).final.failure
    assert refused is not None
    assert refused.status == 503
    assert not harness.gateway.idle
    assert harness.gateway.status(harness.now).draining
    harness.output(harness.p0, "old", 0, [1], FinishReason.LENGTH)
    assert old.final.reason is FinishReason.LENGTH
    harness.close()


# -------------------------------------------------------------------- aborts


def test_an_abort_ends_at_once_and_frees_both_workers(harness: Pair) -> None:
    client = harness.submit(request("r"))
    harness.gateway.abort("r", harness.now)
    harness.gateway.abort("r", harness.now)
    assert client.final.reason is FinishReason.ABORT
    assert client.final.failure is None
    assert len(harness.aborts(harness.p0)) == len(harness.aborts(harness.d0)) == 1
    harness.close()


def test_after_the_hand_over_only_decode_is_told(harness: Pair) -> None:
    harness.submit(request("r"))
    harness.output(harness.p0, "r", 0, [1])
    harness.output(harness.d0, "r", 1, [2])
    harness.gateway.abort("r", harness.now)
    assert harness.aborts(harness.p0) == []
    assert len(harness.aborts(harness.d0)) == 1


def test_tokens_on_their_way_after_the_abort_reach_no_client(harness: Pair) -> None:
    client = harness.submit(request("r"))
    harness.gateway.abort("r", harness.now)
    harness.output(harness.p0, "r", 0, [1])
    assert client.tokens == []
    assert len(harness.aborts(harness.p0)) == 2, "whoever still works on it is told again"
    harness.output(harness.p0, "r", 1, [], FinishReason.STOP)
    assert len(harness.aborts(harness.p0)) == 2
    harness.close()


def test_a_sink_may_abort_its_own_request(harness: Pair) -> None:
    seen: list[object] = []

    def sink(event: object) -> None:
        seen.append(event)
        if len(seen) == 1:
            harness.gateway.abort("r", harness.now)

    harness.gateway.submit(request("r", max_tokens=2), sink, 0.0)
    harness.output(harness.p0, "r", 0, [1, 2], FinishReason.LENGTH)
    assert [type(event).__name__ for event in seen] == ["RequestOutput", "FinalEvent"]
    harness.close()


def test_a_sink_may_submit_the_next_request(harness: Pair) -> None:
    clients = []

    def sink(event: object) -> None:
        if type(event).__name__ == "FinalEvent":
            clients.append(harness.submit(request("next")))

    harness.gateway.submit(request("r", max_tokens=1), sink, 0.0)
    harness.output(harness.p0, "r", 0, [1], FinishReason.LENGTH)
    assert len(clients) == 1
    assert len(harness.tasks(harness.p0)) == 2


# ------------------------------------------------------------------- workers


def test_a_repeated_hello_is_answered_again(harness: Pair) -> None:
    harness.gateway.handle(hello("p0", Role.PREFILL), 1.0)
    assert [m.send_snapshot for m in harness.channel.of(Welcome, harness.p0.address)] == [
        True,
        True,
    ]


def test_a_new_epoch_replaces_the_old_one(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=1))
    again = harness.join("d0", Role.DECODE, epoch="e1")
    assert [task.attempt for task in harness.tasks(again)] == [2]
    assert PeerLost(worker=harness.d0) in harness.channel.of(PeerLost, harness.p0.address)
    harness.output(harness.p0, "r", 0, [1], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [1]
    harness.close()


def test_a_late_hello_of_the_dead_changes_nothing(harness: Pair) -> None:
    again = harness.join("d0", Role.DECODE, epoch="e1")
    harness.join("d0", Role.DECODE)
    harness.submit(request("r"))
    assert len(harness.tasks(again)) == 1
    assert harness.channel.of(PeerLost, harness.d0.address) == [
        PeerLost(worker=harness.d0, replaced=True)
    ]


def test_a_worker_of_another_layout_is_not_used(
    harness: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = harness.join("d1", Role.DECODE, layout_fingerprint="layout-2")
    harness.join("d1", Role.DECODE, layout_fingerprint="layout-2")
    assert harness.channel.of(Welcome, stranger.address) == []
    assert caplog.text.count("d1 is not used") == 1
    assert [worker.id for worker in harness.gateway.status(0.0).workers] == ["p0", "d0"]


def test_workers_that_move_kv_by_anything_but_what_is_required_are_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = SchedulerHarness(require_transport="rdma")
    for name, transports in (("d1", ["shm", "rdma", "tcp"]), ("d2", []), ("d3", ["rdma"])):
        harness.join(name, Role.DECODE, transports=transports)
    assert [worker.id for worker in harness.gateway.status(0.0).workers] == ["d3"]
    assert "d1 is not used: it moves KV by shm, rdma, tcp, and this cluster by rdma alone" in (
        caplog.text
    )


def test_a_worker_that_shares_its_experts_keeps_its_role(harness: Pair) -> None:
    shares = harness.join("d1", Role.DECODE, expert_group="d1 and another")
    assert not harness.gateway.change_role("d1", Role.PREFILL, 0.0)
    assert harness.channel.of(Drain, shares.address) == []
    assert harness.gateway.change_role("d0", Role.PREFILL, 0.0)
    assert harness.channel.of(Drain, harness.d0.address)


def test_a_worker_of_a_release_that_speaks_no_common_version_is_told_so(
    harness: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    later = Release("9.0", OWN_RELEASE.version + 2, OWN_RELEASE.version + 1)
    newcomer = msgspec.structs.replace(hello("d1", Role.DECODE), release=later)
    harness.gateway.handle(newcomer, 0.0)
    [refused] = harness.channel.of(RefusedMessage, newcomer.worker.address)
    assert (refused.asker, refused.message) == (newcomer.worker, "WorkerHello")
    for told in (refused.reason, caplog.text):
        assert str(later) in told
        assert str(OWN_RELEASE) in told
    assert "one release at a time" in refused.reason
    harness.submit(request("r"))
    assert harness.tasks(harness.d0)


def test_releases_meet_in_one_cluster_only_where_each_speaks_with_all(harness: Pair) -> None:
    now = OWN_RELEASE.version
    for name, release, is_used in (
        ("d1", Release("next", now + 1, now), True),
        ("d2", Release("former", now - 1, now - 1), False),
        ("d3", Release("former, patched", now, now - 1), True),
    ):
        newcomer = msgspec.structs.replace(hello(name, Role.DECODE), release=release)
        harness.gateway.handle(newcomer, 0.0)
        refused = harness.channel.of(RefusedMessage, newcomer.worker.address)
        assert (not refused) is is_used, name


def test_outputs_of_workers_that_have_not_this_request_are_ignored(harness: Pair) -> None:
    d1 = harness.join("d1", Role.DECODE)
    client = harness.submit(request("r"))
    holder = harness.d0 if harness.tasks(harness.d0) else d1
    other = d1 if holder == harness.d0 else harness.d0
    harness.output(other, "r", 0, [99])
    harness.output(WorkerRef(holder.worker_id, "e9", "x"), "r", 0, [98])
    assert client.tokens == []


def test_missed_block_events_are_asked_for_again(harness: Pair) -> None:
    harness.now = 2.0
    for number in (1, 3):
        event = BlockEvents(
            worker=harness.p0, tier=Tier.HBM, sequence_no=number, stored=[b"k" * 16]
        )
        harness.gateway.handle(event, harness.now)
    assert len(harness.channel.of(Welcome, harness.p0.address)) == 2


def test_a_draining_worker_is_left_alone(harness: Pair) -> None:
    p1 = harness.join("p1", Role.PREFILL)
    harness.report(harness.p0, draining=True)
    for index in range(3):
        harness.submit(request(f"r{index}"))
    assert len(harness.tasks(p1)) == 3
    states = {worker.id: worker.state for worker in harness.gateway.status(0.0).workers}
    assert states == {"p0": "draining", "d0": "up", "p1": "up"}


@pytest.mark.parametrize("has_clients", [True, False])
def test_the_last_worker_of_a_role_stays_for_clients_only(
    harness: Pair, *, has_clients: bool
) -> None:
    harness.gateway._has_clients = has_clients

    def relieved() -> bool:
        harness.report(harness.d0, draining=True)
        return harness.channel.of(Welcome, harness.d0.address)[-1].relieved

    assert relieved() is not has_clients
    harness.join("d1", Role.DECODE)
    assert relieved()


def test_a_pool_that_drains_by_itself_is_shown_so(harness: Pair) -> None:
    pool = harness.join("kv0", Role.KVSTORE)
    harness.report(pool, draining=True)
    states = {worker.id: worker.state for worker in harness.gateway.status(0.0).workers}
    assert states == {"p0": "up", "d0": "up", "kv0": "draining"}


def test_who_wants_to_join_is_told_once_there_is_something_to_tell(harness: Pair) -> None:
    asker = ref("joining")
    for facts in (b"", b"facts"):
        harness.gateway.facts = facts
        harness.gateway.handle(AskCluster(asker=asker, ticket=7), harness.now)
    told = [message for to, message in harness.channel.sent if to == asker.address]
    members = [
        (Role.PREFILL, "node-p0"),
        (Role.DECODE, "node-d0"),
        (Role.GATEWAY, GATEWAY.worker_id),
    ]
    assert told == [
        ClusterTold(
            asker=asker, ticket=7, facts=b"facts", members=members, engines=[ref("p0"), ref("d0")]
        )
    ]


def test_messages_for_others_are_ignored(harness: Pair) -> None:
    harness.gateway.handle(Drain(), 0.0)
    harness.gateway.handle(LoadReport(worker=ref("stranger"), load=WorkerLoad()), 0.0)
    harness.gateway.check_integrity()


def test_status_adds_up(harness: Pair) -> None:
    kv0 = harness.join("kv0", Role.KVSTORE, num_blocks=50, block_bytes=10)
    harness.report(kv0, num_total_blocks=50, num_free_blocks=30)
    harness.report(harness.d0, num_total_blocks=1000, num_free_blocks=900, num_context_tokens=64)
    harness.submit(request("a"))
    harness.submit(request("b"))
    harness.output(harness.p0, "a", 0, [1])
    status = harness.gateway.status(4.0)
    assert status.ready
    assert (status.pool.num_used_blocks, status.pool.used_bytes) == (20, 200)
    assert (status.pool.num_nodes, status.pool.total_bytes) == (1, 500)
    load = status.load
    assert (load.num_inflight, load.num_prefilling, load.num_decoding) == (2, 1, 1)
    assert (load.num_free_blocks, load.num_total_blocks) == (900, 1000)
    assert [one.address for one in status.gateways] == ["gateway-address"], "not the key"
    worker = status.workers[1]
    assert (worker.id, worker.role, worker.pid) == ("d0", Role.DECODE, 1)
    assert worker.silent_s == 4.0
    assert status.counters["requests_accepted"] == 2


def test_events_tell_the_story(harness: Pair) -> None:
    harness.submit(request("r", max_tokens=2))
    harness.output(harness.p0, "r", 0, [1], num_cached_tokens=4)
    harness.now = 1.0
    harness.output(harness.d0, "r", 1, [2], FinishReason.LENGTH)
    story = [e for e in harness.events.events if getattr(e, "request_id", "") == "r"]
    kinds = [type(event).__name__ for event in story]
    assert kinds == ["Accepted", "Placed", "FirstToken", "Tokens", "Tokens", "Finished"]
    placed, finished = story[1], story[-1]
    assert isinstance(placed, Placed)
    assert (placed.prefill, placed.decode) == ("p0", "d0")
    assert isinstance(finished, Finished)
    assert (finished.num_cached_tokens, finished.status, finished.at_s) == (4, 200, 1.0)


def test_the_end_says_why_tokens_of_the_prompt_were_computed(harness: Pair) -> None:
    client = harness.submit(request("r", 17, max_tokens=1))
    harness.output(
        harness.p0, "r", 0, [1], FinishReason.LENGTH, num_cached_tokens=8,
        fetched=CacheHits(peer=1),
    )  # fmt: skip
    assert client.final.cache == CacheUse(
        hits=CacheHits(hbm=4, peer=4), misses=CacheMisses(not_seen=8)
    )
    [first] = [event for event in harness.events.events if isinstance(event, FirstToken)]
    assert first.cache == client.final.cache


def test_a_prompt_computed_for_its_log_probabilities_has_no_misses(harness: Pair) -> None:
    client = harness.submit(request("r", 17, max_tokens=1, num_prompt_logprobs=0))
    harness.output(harness.p0, "r", 0, [1], FinishReason.LENGTH, num_cached_tokens=0)
    assert client.final.cache is None


def test_it_is_ready_when_a_request_has_all_the_workers_it_needs() -> None:
    def says(harness: SchedulerHarness) -> tuple[bool, list[str]]:
        status = harness.gateway.status(harness.now)
        found = harness.gateway.ready, harness.gateway.missing
        assert found == (status.ready, status.missing)
        return found

    alone, both = SchedulerHarness(), SchedulerHarness(needs_prefill=True)
    assert says(alone) == (False, ["decode"])
    assert says(both) == (False, ["prefill", "decode"])
    for harness in (alone, both):
        d0 = harness.join("d0", Role.DECODE)
    assert says(alone) == (True, []), "decode does whole requests there"
    assert says(both) == (False, ["prefill"])
    both.join("p0", Role.PREFILL)
    assert says(both) == (True, [])
    both.report(d0, draining=True)
    assert says(both) == (True, []), "it serves until another one can"
    both.gateway.worker_lost("p0", both.now)
    assert says(both) == (False, ["prefill"])
    assert not both.gateway.status(both.now).draining
    both.join("p1", Role.PREFILL)
    both.gateway.drain(both.now)
    assert says(both) == (False, [])
    assert both.gateway.status(both.now).gateways[0].state == "draining"


def test_it_says_goodbye_to_workers_and_gateways(harness: Pair) -> None:
    other = ref("gateway-7")
    news = GatewayNews(gateway=other, gateways=[], release=OWN_RELEASE)
    harness.gateway.handle(news, harness.now)
    status = harness.gateway.status(harness.now)
    assert [one.id for one in status.gateways] == [GATEWAY.worker_id, other.worker_id]
    harness.gateway.say_goodbye()
    for each in (harness.p0, harness.d0, other):
        assert harness.channel.of(PeerLost, each.address) == [PeerLost(worker=GATEWAY)]
    harness.gateway.handle(PeerLost(worker=other), harness.now)
    assert harness.channel.of(PeerLost, harness.d0.address)[1:] == [PeerLost(worker=other)]
    assert len(harness.gateway.status(harness.now).gateways) == 1
    seen = [
        (type(e), e.worker_id)
        for e in harness.events.events
        if e.at_s == harness.now
        and isinstance(e, WorkerJoined | WorkerLeft)
        and e.role is Role.GATEWAY
    ]
    assert seen == [(WorkerJoined, other.worker_id), (WorkerLeft, other.worker_id)]


def test_subscribers_to_blocks_forget_the_gateway_before_this_one(harness: Pair) -> None:
    """Before they hear of any block."""
    published: list[KvEvent] = []
    harness.gateway.publish_blocks(published.extend)
    assert published == [AllBlocksCleared()]


def test_a_pool_client_s_inventory_has_no_block_checked_again(
    harness: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds none, and may say so as often as it likes."""
    checked: list[None] = []
    monkeypatch.setattr(BlockFeed, "doubt_all", lambda _: checked.append(None))
    harness.gateway.publish_blocks(lambda _: None)
    for worker, num in ((harness.join("client-1", Role.CLIENT), 0), (harness.p0, 1)):
        whole = BlockEvents(worker=worker, tier=Tier.HBM, sequence_no=9, snapshot=True)
        harness.gateway.handle(whole, harness.now)
        assert len(checked) == num


def test_members_have_a_bound_and_silent_clients_give_way(
    harness: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of clients that only say hello keeps no worker out; engines are never given up."""
    monkeypatch.setattr(membership_table, "MAX_MEMBERS", 5)
    ids = [f"client-{number}" for number in range(3)]
    for client_id in ids:
        harness.join(client_id, Role.CLIENT)
        harness.now += 0.1
    harness.report(ref(ids[0]))
    assert harness.channel.of(Welcome, harness.join("p1", Role.PREFILL).address)
    lost = harness.channel.of(PeerLost, harness.p0.address)
    assert [told.worker.worker_id for told in lost] == [ids[1]]
    harness.report(ref(ids[2]))
    harness.join("p2", Role.PREFILL)
    (refused,) = harness.channel.of(RefusedMessage, ref("p2", "e0").address)
    assert "5 workers and clients" in refused.reason
