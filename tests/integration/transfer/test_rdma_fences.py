"""What a fence of a grant means where NICs write, over NICs of memory copies: every machine runs
these. `test_fences.py` has them with real verbs and real processes.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from functools import partial

import pytest

from mooncake.base.errors import TransferError
from mooncake.transfer.engine import Op, TransferBatch
from mooncake.transfer.grants import Fence
from mooncake.transfer.rdma import owner as rdma_owner
from tests.support.transfer.driving import move, wait_for
from tests.support.transfer.fake_nics import FakeFabric, FakePair
from tests.support.transfer.rdma_engines import (
    KIB,
    Engine,
    Open,
    engines_on,
    filled,
    pair_of,
    until,
    whole,
)


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric()


@pytest.fixture
def opened(fabric: FakeFabric) -> Iterator[Open]:
    with engines_on(fabric) as opened:
        yield opened


def turn() -> None:
    select.select([], [], [], 0.001)


def is_closed(owner: Engine, grant: int) -> bool:
    return owner.transfer.fence(grant) is Fence.CLOSED


def closes(owner: Engine, grant: int) -> None:
    """Wait until the owner's fence is closed."""
    owner.transfer.revoke(grant)
    until(partial(is_closed, owner, grant), turn)


def test_what_is_under_way_by_a_fenced_grant_lands_nowhere(
    opened: Open, fabric: FakeFabric
) -> None:
    us, owner, ours, theirs = pair_of(opened, 64 * KIB)
    other = opened("other")
    from_other, to_other = filled(other, KIB, 5), filled(owner, KIB, 6)
    before, grant, good = bytes(theirs.buffer), owner.transfer.grant(), owner.transfer.grant()
    segment = owner.transfer.segment
    assert (
        move(other.transfer, Op.WRITE, segment, whole(from_other, to_other), grant=good).error
        is None
    )
    served_other = owner.rdma.num_served_pairs
    fabric.hold()
    batch = TransferBatch(op=Op.WRITE, peer=segment, ops=whole(ours, theirs), grant=grant)
    batch_id = us.transfer.submit(batch)
    until(lambda: fabric.num_held > 0, turn)
    served = {number for _, number in fabric.held_at()}
    assert owner.rdma.num_served_pairs > served_other
    owner.transfer.revoke(grant)
    assert owner.transfer.fence(grant) is Fence.OPEN
    closes(owner, grant)
    assert served.isdisjoint(fabric.pairs), "an owner's end is left"
    fabric.release()
    error = wait_for(us.transfer, [batch_id])[batch_id].error
    assert f"owner refused: grant {grant} was revoked" in (error or "")
    assert theirs.buffer == before
    assert owner.rdma.num_served_pairs >= served_other, "pairs of another peer were destroyed"
    assert to_other.buffer == from_other.buffer


def test_what_else_the_writer_does_goes_on_after_its_grant_is_fenced(opened: Open) -> None:
    us, owner, ours, theirs = pair_of(opened, 64 * KIB)
    owner.transfer.guard(theirs)
    segment, ops = owner.transfer.segment, whole(ours, theirs)
    first, second = owner.transfer.grant(), owner.transfer.grant()
    for grant in (first, second):
        assert move(us.transfer, Op.WRITE, segment, ops, grant=grant).error is None
    closes(owner, first)
    refused = move(us.transfer, Op.WRITE, segment, ops, grant=first).error
    assert f"grant {first} was revoked" in (refused or "")
    assert move(us.transfer, Op.WRITE, segment, ops, grant=second).error is None
    assert move(us.transfer, Op.READ, segment, ops).error is None
    assert "by grants only" in (move(us.transfer, Op.WRITE, segment, ops).error or "")


def test_a_grant_that_nobody_wrote_by_costs_no_path(opened: Open) -> None:
    us, owner, ours, theirs = pair_of(opened, KIB)
    assert move(us.transfer, Op.WRITE, owner.transfer.segment, whole(ours, theirs)).error is None
    grant, num_pairs = owner.transfer.grant(), owner.rdma.num_served_pairs
    owner.transfer.revoke(grant)
    assert owner.transfer.fence(grant) is Fence.CLOSED
    assert owner.rdma.num_served_pairs == num_pairs > 0


def destroy_none(owner: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the owner's NICs say that they destroy no queue pair."""
    close = FakePair.close

    def refuse(pair: FakePair) -> None:
        close(pair)
        if pair.nic in owner.nics:
            raise TransferError("the queue pair is busy")

    monkeypatch.setattr(FakePair, "close", refuse)


def test_a_queue_pair_that_the_nic_does_not_destroy_leaves_the_fence_unknown(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, owner, ours, theirs = pair_of(opened, KIB, num_nics=1)
    grant, segment = owner.transfer.grant(), owner.transfer.segment
    assert move(us.transfer, Op.WRITE, segment, whole(ours, theirs), grant=grant).error is None
    destroy_none(owner, monkeypatch)
    owner.transfer.revoke(grant)
    until(lambda: owner.transfer.fence(grant) is Fence.UNKNOWN, turn)
    monkeypatch.undo()
    later = owner.transfer.grant()
    owner.transfer.revoke(later)
    assert owner.transfer.fence(later) is Fence.CLOSED


def test_a_queue_pair_that_is_left_may_carry_what_its_session_asks_for_later(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, owner, ours, theirs = pair_of(opened, KIB, num_nics=1)
    segment, ops = owner.transfer.segment, whole(ours, theirs)
    first, second = owner.transfer.grant(), owner.transfer.grant()
    assert move(us.transfer, Op.WRITE, segment, ops, grant=first).error is None
    destroy_none(owner, monkeypatch)
    [session] = owner.rdma._owner.listener.sessions
    session.loop.post(lambda: session.lose(owner.nics[0].address.name))
    until(lambda: owner.rdma.num_served_pairs == 0, turn)
    monkeypatch.undo()
    assert move(us.transfer, Op.WRITE, segment, ops, grant=second).error is None
    assert owner.rdma._owner.listener.sessions == [session]
    owner.transfer.revoke(second)
    until(lambda: owner.transfer.fence(second) is not Fence.OPEN, turn)
    assert owner.transfer.fence(second) is Fence.UNKNOWN


def test_grants_of_long_ago_are_fenced_with_all_before_the_last_that_was_forgotten(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma_owner, "MAX_GRANTS", 4)
    us, owner, ours, theirs = pair_of(opened, KIB, num_nics=1)
    grants = [owner.transfer.grant() for _ in range(8)]
    for grant in grants:
        ops = whole(ours, theirs)
        assert move(us.transfer, Op.WRITE, owner.transfer.segment, ops, grant=grant).error is None
    [session] = owner.rdma._owner.listener.sessions
    assert len(session._grants) == 4
    owner.transfer.revoke(grants[0])
    assert owner.transfer.fence(grants[0]) is Fence.OPEN
    closes(owner, grants[0])


@pytest.mark.parametrize("max_grants", [4096, 2])
def test_what_a_healthy_writer_has_under_way_arrives_though_its_session_is_closed(
    opened: Open, fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, max_grants: int
) -> None:
    """For a grant that it wrote by before, or, as a writer of many grants, may have written by.
    It connects again by itself: writes and reads end well, however often that happens.
    """
    monkeypatch.setattr(rdma_owner, "MAX_GRANTS", max_grants)
    us, owner, ours, theirs = pair_of(opened, 64 * KIB)
    into = filled(us, 64 * KIB, 3)
    owner.transfer.guard(theirs)
    segment, ops = owner.transfer.segment, whole(ours, theirs)
    foreign = owner.transfer.grant()  # nobody writes by it
    for _ in range(3):
        ended, good = owner.transfer.grant(), owner.transfer.grant()
        for grant in (ended, good, owner.transfer.grant()):
            assert move(us.transfer, Op.WRITE, segment, ops, grant=grant).error is None
        theirs.buffer[:] = bytes(64 * KIB)
        [before] = owner.rdma._owner.listener.sessions
        fabric.hold()
        write = TransferBatch(op=Op.WRITE, peer=segment, ops=ops, grant=good)
        read = TransferBatch(op=Op.READ, peer=segment, ops=whole(into, theirs))
        under_way = [us.transfer.submit(batch) for batch in (write, read)]
        until(lambda: fabric.num_held > 1, turn)
        fenced = ended if max_grants > 2 else foreign
        owner.transfer.revoke(fenced)
        assert owner.transfer.fence(fenced) is Fence.OPEN, "the session is closed for it"
        until(partial(is_closed, owner, fenced), turn)
        fabric.release()
        done = wait_for(us.transfer, under_way)
        assert [done[each].error for each in under_way] == [None, None]
        assert theirs.buffer == ours.buffer
        [after] = owner.rdma._owner.listener.sessions
        assert after is not before
        foreign = owner.transfer.grant()
