"""What the RDMA backend promises, over NICs that fail on demand: every machine runs these."""

from __future__ import annotations

import functools
import random
import select
from collections.abc import Iterator

import pytest

from mooncake.base import TransferError
from mooncake.transfer.engine import Op, TransferBatch, TransferDone, TransferOp
from mooncake.transfer.rdma.nic import Outcome, WorkRequest
from tests.support.transfer.driving import move, wait_for
from tests.support.transfer.fake_nics import Copied, FakeFabric, FakeNic
from tests.support.transfer.rdma_engines import (
    KIB,
    MIB,
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


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_bytes_arrive_by_all_nics_and_nothing_else_changes(
    opened: Open, fabric: FakeFabric, op: Op
) -> None:
    us, owner, ours, theirs = pair_of(opened, 4 * MIB)
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    rng = random.Random(3)
    expected = bytearray(target.buffer)
    ops, at = [], 1
    while at < 3 * MIB:
        size = rng.choice([1, 7, 100, 4096, 65537, 300_000])
        here, there = (at, at + 5) if op is Op.WRITE else (at + 5, at)
        ops.append(TransferOp(ours.region_id, here, theirs.region_id, there, size))
        begin, goal = (here, there) if op is Op.WRITE else (there, here)
        expected[goal : goal + size] = source.buffer[begin : begin + size]
        at += size + rng.randrange(1, 50)
    go = functools.partial(move, us.transfer, op, owner.transfer.segment, ops)
    assert go().error is None
    assert target.buffer == expected
    until(lambda: {copied.nic for copied in fabric.copied} == {"us-0", "us-1"}, go)
    assert target.buffer == expected
    assert us.rdma.num_endpoints == owner.rdma.num_served_pairs


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_path_that_breaks_loses_nothing_and_is_tried_again(
    opened: Open, fabric: FakeFabric, op: Op
) -> None:
    us, owner, ours, theirs = pair_of(opened, 8 * MIB)
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    broken = 0

    def fails(nic: FakeNic, request: WorkRequest) -> Outcome | None:
        nonlocal broken
        if nic.address.name == "us-1" and broken < 3:
            broken += 1
            return Outcome.LINK
        return None

    fabric.fails = fails
    go = functools.partial(move, us.transfer, op, owner.transfer.segment, whole(ours, theirs))
    assert go().error is None
    assert target.buffer == source.buffer
    until(lambda: broken == 3 and "us-1" in {copied.nic for copied in fabric.copied}, go)
    links = {link.nic: link for link in us.rdma.stats.snapshot()}
    assert links["us-1"].num_failures == 3
    assert links["us-1"].num_retries >= 1


def test_a_write_goes_again_only_when_the_owner_closed_its_end(
    opened: Open, fabric: FakeFabric
) -> None:
    us, owner, ours, theirs = pair_of(opened, 64 * KIB)
    fabric.hold()
    batch = TransferBatch(op=Op.WRITE, peer=owner.transfer.segment, ops=whole(ours, theirs))
    batch_id = us.transfer.submit(batch)
    until(lambda: fabric.num_held > 0, lambda: select.select([], [], [], 0.001))
    ((nic, served),) = fabric.held_at()
    next(each for each in us.nics if each.address.name == nic).set_link(False)
    until(lambda: served in fabric.order, lambda: select.select([], [], [], 0.001))
    fabric.release()
    assert wait_for(us.transfer, [batch_id])[batch_id].error is None
    assert theirs.buffer == ours.buffer
    first = next(index for index, it in enumerate(fabric.order) if isinstance(it, Copied))
    assert served in fabric.order[:first], "it went again while late packets could still land"
    assert {copied.nic for copied in fabric.copied}.isdisjoint({nic})


def test_a_link_that_is_down_is_left_alone_until_it_is_back(
    opened: Open, fabric: FakeFabric
) -> None:
    us, owner, ours, theirs = pair_of(opened, 4 * MIB)
    go = functools.partial(move, us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs))
    us.nics[0].set_link(False)
    until(lambda: not us.rdma.is_up("us-0"), go)
    fabric.copied.clear()
    assert go().error is None
    assert {copied.nic for copied in fabric.copied} == {"us-1"}
    us.nics[0].set_link(True)
    until(lambda: "us-0" in {copied.nic for copied in fabric.copied}, go)


@pytest.mark.parametrize("tcp", [False, True])
def test_without_any_link_it_goes_another_way_or_fails(
    opened: Open, fabric: FakeFabric, tcp: bool
) -> None:
    us, owner = opened("us", tcp=tcp), opened("owner", tcp=tcp)
    ours, theirs = filled(us, MIB, 1), filled(owner, MIB, 2)
    go = functools.partial(move, us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs))
    for nic in us.nics:
        nic.set_link(False)
    until(lambda: not any(us.rdma.is_up(nic.address.name) for nic in us.nics), go)
    ended = go()
    if tcp:
        assert ended.error is None
        assert ours.buffer == theirs.buffer
    else:
        assert ended.error is not None
        assert "owner" in ended.error
    for nic in us.nics:
        nic.set_link(True)
    until(lambda: bool(fabric.copied), go)
    assert go().error is None


def test_keys_found_stale_are_asked_for_again(opened: Open, fabric: FakeFabric) -> None:
    us, owner, ours, theirs = pair_of(opened, MIB)
    go = functools.partial(move, us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs))
    refusals = iter([Outcome.REFUSED] * 2)
    fabric.fails = lambda nic, request: next(refusals, None)
    assert go().error is None
    assert ours.buffer == theirs.buffer
    fabric.fails = lambda nic, request: Outcome.REFUSED
    ended = go()
    assert ended.error is not None
    assert "owner refused" in ended.error
    fabric.fails = lambda nic, request: None
    assert go().error is None, "a refusal is not held against the path"


def test_memory_that_a_nic_refuses_is_registered_nowhere_and_the_rest_goes_on(
    opened: Open, fabric: FakeFabric
) -> None:
    us, owner, ours, theirs = pair_of(opened, MIB)
    before = dict(fabric.keys)
    us.nics[1].refuses_registrations = True  # the limit of locked memory, or of the device
    with pytest.raises(TransferError, match="us-1 registers nothing"):
        us.transfer.register(memoryview(bytearray(MIB)), "more")
    assert fabric.keys == before, "the other NIC has forgotten it too"
    go = functools.partial(move, us.transfer, Op.READ, owner.transfer.segment)
    assert go(whole(ours, theirs)).error is None
    us.nics[1].refuses_registrations = False
    assert filled(us, MIB, 5).num_bytes == MIB


def test_memory_withdrawn_by_either_side_is_not_reached(opened: Open, fabric: FakeFabric) -> None:
    us, owner, ours, theirs = pair_of(opened, MIB)
    other = filled(owner, MIB, 4)
    go = functools.partial(move, us.transfer, Op.READ, owner.transfer.segment)
    assert go(whole(ours, theirs)).error is None
    owner.transfer.unregister(theirs)
    before = bytes(ours.buffer)
    ended = go(whole(ours, theirs))
    assert ended.error is not None
    assert f"region {theirs.region_id}" in ended.error
    assert ours.buffer == before
    past = [TransferOp(ours.region_id, 0, other.region_id, 1, MIB)]
    assert "lie outside region" in (go(past).error or "")
    assert go(whole(ours, other)).error is None
    assert ours.buffer == other.buffer


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_stopped_batch_ends_and_leaves_memory_alone(
    opened: Open, fabric: FakeFabric, how: str
) -> None:
    us, owner, ours, theirs = pair_of(opened, MIB)
    assert move(us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs)).error is None
    fabric.hold()
    ours.buffer[:] = bytes(MIB)
    deadline_s = 0.05 if how == "deadline" else None
    batch_id = us.transfer.submit(
        TransferBatch(
            op=Op.READ, peer=owner.transfer.segment, ops=whole(ours, theirs), deadline_s=deadline_s
        )
    )
    until(lambda: fabric.num_held > 0, lambda: select.select([], [], [], 0.001))
    if how == "cancel":
        us.transfer.cancel(batch_id)
    ended = wait_for(us.transfer, [batch_id])[batch_id]
    assert ended.error is not None
    assert how in ended.error
    fabric.release()
    assert ours.buffer == bytes(MIB), "a late packet reached the memory of a batch that had ended"
    assert move(us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs)).error is None
    assert ours.buffer == theirs.buffer


def test_more_peers_than_endpoints_take_turns(opened: Open, fabric: FakeFabric) -> None:
    us = opened("us", max_endpoints=2)
    ours = filled(us, MIB, 1)
    owners = [opened(f"owner{index}") for index in range(6)]
    theirs = [filled(owner, MIB, 2) for owner in owners]
    ids = [
        us.transfer.submit(
            TransferBatch(op=Op.WRITE, peer=owner.transfer.segment, ops=whole(ours, region))
        )
        for _ in range(3)
        for owner, region in zip(owners, theirs, strict=True)
    ]
    ended = wait_for(us.transfer, ids)
    assert [done.error for done in ended.values()] == [None] * len(ids)
    assert all(region.buffer == ours.buffer for region in theirs)
    assert us.rdma.num_endpoints <= 2


def test_an_owner_that_ends_fails_what_is_under_way(opened: Open, fabric: FakeFabric) -> None:
    us, owner, ours, theirs = pair_of(opened, MIB)
    assert move(us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs)).error is None
    fabric.hold()
    batch = TransferBatch(op=Op.WRITE, peer=owner.transfer.segment, ops=whole(ours, theirs))
    batch_id = us.transfer.submit(batch)
    until(lambda: fabric.num_held > 0, lambda: select.select([], [], [], 0.001))
    owner.transfer.close()
    fabric.release()
    ended: TransferDone = wait_for(us.transfer, [batch_id])[batch_id]
    assert ended.error is not None
    assert "owner" in ended.error


def test_a_nic_that_takes_nothing_is_gone_around(opened: Open, fabric: FakeFabric) -> None:
    us, owner, ours, theirs = pair_of(opened, 4 * MIB)
    us.nics[0].refuses_posts = True
    us.nics[1].refuses_pairs = True
    go = functools.partial(move, us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs))
    ended = go()
    assert ended.error is not None
    us.nics[1].refuses_pairs = False
    until(lambda: go().error is None, lambda: None)
    assert ours.buffer == theirs.buffer
    assert {copied.nic for copied in fabric.copied} == {"us-1"}
