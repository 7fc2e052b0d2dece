"""Membership: welcomes, heartbeats, fenced epochs."""

import logging

import msgspec
import pytest

from mooncake.base import Drain, PeerLost, Role, Welcome, WorkerRef
from mooncake.base.messages import Release
from mooncake.scheduler.membership_table import MAX_FENCED, MembershipTable
from tests.support.scheduler.scheduling import GATEWAY, Inbox, hello, ref

P0 = hello("p0", Role.PREFILL, node_id="n0")
D0 = hello("d0", Role.DECODE, node_id="n1")
KV0 = hello("kv0", Role.KVSTORE, node_id="n0")


@pytest.fixture
def channel() -> Inbox:
    return Inbox()


@pytest.fixture
def membership(channel: Inbox) -> MembershipTable:
    return MembershipTable(GATEWAY, channel, heartbeat_timeout_s=10.0)


def last_pool(channel: Inbox, worker: WorkerRef) -> WorkerRef | None:
    welcome: Welcome = channel.of(Welcome, worker.address)[-1]
    return welcome.kvstore


def test_a_newcomer_is_welcomed_and_asked_for_its_blocks(
    membership: MembershipTable, channel: Inbox
) -> None:
    membership.join(P0, 0.0)
    assert channel.sent == [
        (P0.worker.address, Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True))
    ]
    assert membership.is_live(P0.worker)
    assert not membership.is_live(ref("p0", "e1"))


def test_a_pool_is_made_known_on_its_own_node_only(
    membership: MembershipTable, channel: Inbox
) -> None:
    for worker in (P0, D0, KV0):
        membership.join(worker, 0.0)
    assert last_pool(channel, P0.worker) == KV0.worker
    assert last_pool(channel, D0.worker) is None
    assert last_pool(channel, KV0.worker) is None
    assert not channel.of(Welcome, P0.worker.address)[-1].send_snapshot
    membership.remove("kv0", 1.0)
    assert last_pool(channel, P0.worker) is None


def test_a_worker_that_joins_after_its_pool_learns_of_it_at_once(
    membership: MembershipTable, channel: Inbox
) -> None:
    membership.join(KV0, 0.0)
    membership.join(P0, 0.0)
    assert last_pool(channel, P0.worker) == KV0.worker


def test_a_loss_is_told_to_all_others(membership: MembershipTable, channel: Inbox) -> None:
    for worker in (P0, D0, KV0):
        membership.join(worker, 0.0)
    removed = membership.remove("p0", 1.0)
    assert removed is not None
    assert removed.hello == P0
    told = [to for to, message in channel.sent if message == PeerLost(worker=P0.worker)]
    assert told == [D0.worker.address, KV0.worker.address]
    assert membership.remove("p0", 1.0) is None
    membership.check_integrity()


def test_silence_is_noticed_once_it_is_too_long(membership: MembershipTable) -> None:
    membership.join(P0, 0.0)
    membership.join(D0, 0.0)
    silent = []
    for second in range(1, 12):
        membership.note_alive(D0.worker, float(second))
        silent.append(membership.silent_workers(float(second)))
    assert silent == [[]] * 10 + [["p0"]]


def test_a_pause_of_the_gateway_itself_is_no_silence_of_workers(
    membership: MembershipTable, caplog: pytest.LogCaptureFixture
) -> None:
    membership.join(P0, 0.0)
    assert membership.silent_workers(1.0) == []
    with caplog.at_level(logging.WARNING):
        assert membership.silent_workers(61.0) == []
    assert "stood still" in caplog.text
    assert membership.silent_workers(65.0) == []
    assert membership.silent_workers(69.0) == []
    assert membership.silent_workers(72.0) == ["p0"]


def test_the_dead_that_speak_are_told_that_they_are_dead(
    membership: MembershipTable, channel: Inbox
) -> None:
    membership.join(P0, 0.0)
    membership.remove("p0", 1.0)
    channel.sent.clear()
    assert not membership.note_alive(P0.worker, 2.0)
    assert not membership.note_alive(P0.worker, 2.5)
    assert channel.sent == [(P0.worker.address, PeerLost(worker=P0.worker))]
    assert not membership.note_alive(P0.worker, 3.1)
    assert len(channel.sent) == 2
    assert membership.is_fenced(P0.worker)


def test_clients_that_come_and_go_make_no_lost_worker_be_forgotten(
    membership: MembershipTable,
) -> None:
    membership.join(P0, 0.0)
    membership.remove("p0", 1.0)
    for epoch in range(2 * MAX_FENCED):
        membership.fence(WorkerRef("client-aa", f"e{epoch}", "tcp://10.0.0.7:1#aa"))
    assert membership.is_fenced(P0.worker)


@pytest.mark.parametrize(("role", "is_kept_out"), [(Role.CLIENT, False), (Role.DECODE, True)])
def test_a_client_of_an_old_release_keeps_no_worker_out(
    membership: MembershipTable, role: Role, is_kept_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, own, new = Release("old", 6, 6), Release("own", 7, 6), Release("new", 8, 7)
    monkeypatch.setattr("mooncake.scheduler.membership_table.OWN_RELEASE", own)
    member = msgspec.structs.replace(hello("old", role), release=old)
    assert membership.foreign(member) is None
    membership.join(member, 0.0)
    assert bool(membership.foreign(msgspec.structs.replace(P0, release=new))) == is_kept_out


def test_strangers_are_not_heard(membership: MembershipTable, channel: Inbox) -> None:
    assert not membership.note_alive(P0.worker, 0.0)
    assert channel.sent == []


def test_snapshots_are_asked_for_at_most_every_second(
    membership: MembershipTable, channel: Inbox
) -> None:
    membership.join(P0, 0.0)
    channel.sent.clear()
    for now in (0.5, 1.2, 1.5, 2.3):
        membership.request_snapshot(P0.worker, now)
    assert [m.send_snapshot for m in channel.of(Welcome)] == [True, True]


def test_a_refusal_is_logged_once(
    membership: MembershipTable, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        membership.refuse(P0.worker, "its layout is another")
    assert caplog.text.count("its layout is another") == 1


def test_a_broadcast_reaches_the_living(membership: MembershipTable, channel: Inbox) -> None:
    membership.join(P0, 0.0)
    membership.join(D0, 0.0)
    membership.remove("d0", 0.0)
    membership.broadcast(Drain())
    assert [to for to, message in channel.sent if message == Drain()] == [P0.worker.address]


def test_a_table_without_workers_needs_no_timer(membership: MembershipTable) -> None:
    assert membership.next_check_s(5.0) is None
    membership.join(P0, 5.0)
    wake = membership.next_check_s(5.0)
    assert wake is not None
    assert 5.0 < wake < 15.0
