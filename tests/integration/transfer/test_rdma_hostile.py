"""NICs that fail at bad moments: no batch hangs, no path is lost for good, no loop spins."""

from __future__ import annotations

import errno
import functools
import itertools
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from mooncake.base.errors import TransferError
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.net.io_loop import Timer
from mooncake.transfer.rdma.nic import Outcome, WorkRequest
from tests.support.transfer.driving import WAIT_S, move, wait_for
from tests.support.transfer.fake_nics import FakeFabric, FakeNic, FakePair, FakeRegistration
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


@pytest.mark.parametrize("num_owners", [1, 3])
def test_a_peer_makes_no_room_for_itself_at_its_own_cost(
    opened: Open, fabric: FakeFabric, num_owners: int
) -> None:
    us = opened("us", max_endpoints=1)
    ours = filled(us, 4 * MIB, 1)
    owners = [opened(f"owner{index}") for index in range(num_owners)]
    theirs = [filled(owner, 4 * MIB, 2) for owner in owners]
    for _ in range(3):
        ids = [
            us.transfer.submit(
                TransferBatch(op=Op.WRITE, peer=owner.transfer.segment, ops=whole(ours, region))
            )
            for owner, region in zip(owners, theirs, strict=True)
        ]
        assert {done.error for done in wait_for(us.transfer, ids).values()} == {None}
    assert all(region.buffer == ours.buffer for region in theirs)


def test_a_session_that_waits_for_room_does_not_keep_the_loop_busy(
    opened: Open, fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = opened("us", num_nics=1, max_endpoints=1)
    ours = filled(us, MIB, 1)
    owners = [opened(f"owner{index}", num_nics=1) for index in range(2)]
    theirs = [filled(owner, MIB, 2) for owner in owners]
    fabric.hold()
    batches = [
        TransferBatch(op=Op.WRITE, peer=owner.transfer.segment, ops=whole(ours, region))
        for owner, region in zip(owners, theirs, strict=True)
    ]
    ids = [us.transfer.submit(batches[0])]
    until(lambda: fabric.num_held > 0, lambda: select.select([], [], [], 0.001))
    ids.append(us.transfer.submit(batches[1]))
    until(lambda: bool(us.rdma._short_of_room), lambda: select.select([], [], [], 0.001))
    timers: list[float] = []
    arm = us.loop.call_later

    def call_later(seconds: float, action: Callable[[], None]) -> Timer:
        timers.append(seconds)
        return arm(seconds, action)

    monkeypatch.setattr(us.loop, "call_later", call_later)
    for _ in range(50):
        turned = threading.Event()
        us.loop.post(turned.set)
        assert turned.wait(WAIT_S)
    assert len(timers) < 10
    fabric.release()
    assert {done.error for done in wait_for(us.transfer, ids).values()} == {None}


def test_a_path_whose_trial_was_cut_short_is_tried_again(
    opened: Open, fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path breaks, and while it is opened again so does the control session."""
    us, owner = opened("us", num_nics=1), opened("owner", num_nics=1)
    ours, theirs = filled(us, MIB, 1), filled(owner, MIB, 2)
    failures = iter([Outcome.LINK])
    fabric.fails = lambda nic, request: next(failures, None)
    new_pair, num_asked = owner.nics[0].new_pair, itertools.count(1)

    def hang_up_at_the_second() -> FakePair:
        if next(num_asked) != 2:
            return new_pair()
        for session in list(owner.rdma._owner.listener.sessions):
            session.close()
        raise TransferError("nobody hears this")

    monkeypatch.setattr(owner.nics[0], "new_pair", hang_up_at_the_second)
    go = functools.partial(move, us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs))
    assert go().error is None
    assert next(num_asked) > 3
    assert ours.buffer == theirs.buffer


def test_a_path_retired_before_it_was_used_is_tried_again(opened: Open, fabric: FakeFabric) -> None:
    us = opened("us", num_nics=1, max_endpoints=1)
    owners = [opened(f"owner{index}", num_nics=1) for index in range(2)]
    ours, theirs = filled(us, MIB, 1), [filled(owner, MIB, 2) for owner in owners]
    go = [
        functools.partial(move, us.transfer, Op.READ, owner.transfer.segment, whole(ours, region))
        for owner, region in zip(owners, theirs, strict=True)
    ]
    assert go[0]().error is None
    (peer,) = us.rdma.peers.all()
    ((path, endpoint),) = peer.paths.endpoints.items()
    peer.paths.breaker(path).failed(0.0)
    peer.paths.breaker(path).tried()
    assert endpoint.may_retire
    assert go[1]().error is None
    assert go[0]().error is None
    assert ours.buffer == theirs[0].buffer


def test_work_that_never_ends_leaves_turns_to_others(opened: Open, fabric: FakeFabric) -> None:
    us, owner = opened("us", num_nics=1), opened("owner", num_nics=1)
    size, count = 4 * KIB, 4000
    ours, theirs = filled(us, size * count, 1), filled(owner, size * count, 2)
    ops = [
        TransferOp(ours.region_id, index * size, theirs.region_id, (count - 1 - index) * size, size)
        for index in range(count)
    ]
    done_by_then: list[int] = []

    def fails(nic: FakeNic, request: WorkRequest) -> None:
        if len(fabric.copied) == 200:
            us.loop.post(lambda: done_by_then.append(len(fabric.copied)))

    fabric.fails = fails
    assert move(us.transfer, Op.READ, owner.transfer.segment, ops).error is None
    assert len(fabric.copied) == count
    assert done_by_then, "a call posted early has not been run yet"
    assert done_by_then[0] < count


def test_numbers_of_endpoints_come_round(opened: Open, fabric: FakeFabric) -> None:
    us = opened("us", num_nics=1)
    us.rdma._serials = itertools.count(2**24 - 2)
    ours = filled(us, MIB, 1)
    for index in range(4):
        owner = opened(f"owner{index}", num_nics=1)
        theirs = filled(owner, MIB, index)
        ended = move(us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs))
        assert ended.error is None
        assert ours.buffer == theirs.buffer
        assert all(copied.request.in_host for copied in fabric.copied)
    us.rdma._serials = itertools.count(2**24 - 2)  # once round, all are in use
    owner = opened("last", num_nics=1)
    theirs = filled(owner, MIB, 9)
    ended = move(us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs))
    assert ended.error is None
    assert us.rdma.num_endpoints == 5


@pytest.mark.parametrize("whose", ["ours", "theirs"])
@pytest.mark.parametrize("heard_of", [True, False])
def test_a_device_that_fails_is_gone_around_and_opened_again(
    opened: Open, fabric: FakeFabric, whose: str, heard_of: bool
) -> None:
    us, owner, ours, theirs = pair_of(opened, 4 * MIB)
    side = us if whose == "ours" else owner
    nic = side.nics[0]
    go = functools.partial(move, us.transfer, Op.WRITE, owner.transfer.segment)
    until(
        lambda: {copied.nic for copied in fabric.copied} == {"us-0", "us-1"},
        lambda: go(whole(ours, theirs)),
    )
    nic.refuses_reopening = True
    nic.fail(heard_of=heard_of)
    until(lambda: side.rdma.memory.is_lost(nic.address.name), lambda: go(whole(ours, theirs)))
    fabric.copied.clear()
    assert go(whole(ours, theirs)).error is None
    assert {copied.nic for copied in fabric.copied} == {"us-1"}
    new_ours, new_theirs = filled(us, MIB, 3), filled(owner, MIB, 4)
    assert go(whole(new_ours, new_theirs)).error is None, "made while a NIC was missing"
    assert new_theirs.buffer == new_ours.buffer
    fabric.copied.clear()
    nic.refuses_reopening = False
    for here, there in [(ours, theirs), (new_ours, new_theirs)]:
        fabric.copied.clear()
        until(
            lambda: "us-0" in {copied.nic for copied in fabric.copied},
            lambda here=here, there=there: go(whole(here, there)),
        )
        assert go(whole(here, there)).error is None
        assert there.buffer == here.buffer


def test_a_device_that_fails_in_mid_batch_costs_no_batch(opened: Open, fabric: FakeFabric) -> None:
    us, owner, ours, theirs = pair_of(opened, 8 * MIB)
    batch = TransferBatch(op=Op.READ, peer=owner.transfer.segment, ops=whole(ours, theirs))
    # A path that is still being opened gets no slices: batches go until one lies on both NICs.
    for _ in range(1_000):
        ours.buffer[:] = bytes(8 * MIB)
        fabric.hold()
        batch_id = us.transfer.submit(batch)
        until(fabric.held_at, lambda: select.select([], [], [], 0.001))
        select.select([], [], [], 0.01)
        if {nic for nic, _ in fabric.held_at()} == {"us-0", "us-1"}:
            break
        fabric.release()
        assert wait_for(us.transfer, [batch_id])[batch_id].error is None
    else:
        pytest.fail("no batch was spread over both NICs")
    us.nics[1].refuses_reopening = True
    us.nics[1].fail(heard_of=True)
    until(lambda: us.rdma.memory.is_lost("us-1"), lambda: select.select([], [], [], 0.001))
    fabric.release()
    assert wait_for(us.transfer, [batch_id])[batch_id].error is None
    assert ours.buffer == theirs.buffer


def test_no_more_pairs_than_a_nic_can_hear_fail(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNic, "max_pairs", 3)
    us = opened("us")
    ours = filled(us, MIB, 1)
    owners = [opened(f"owner{index}") for index in range(5)]
    theirs = [filled(owner, MIB, 2) for owner in owners]
    for owner, region in zip(owners, theirs, strict=True):
        ended = move(us.transfer, Op.WRITE, owner.transfer.segment, whole(ours, region))
        assert ended.error is None
        assert us.rdma.num_endpoints <= 3


def test_memory_is_let_go_by_all_nics_though_one_refuses(
    opened: Open, fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = opened("us")
    region = filled(us, MIB, 1)
    kept = us.transfer._regions.get(region.region_id)
    assert kept is not None
    close, num_closed = FakeRegistration.close, itertools.count()

    def refuse_first(registration: FakeRegistration) -> None:
        close(registration)
        if next(num_closed) == 0:
            raise TransferError("busy")

    monkeypatch.setattr(FakeRegistration, "close", refuse_first)
    with pytest.raises(TransferError, match="busy"):
        us.transfer.unregister(region)
    assert not fabric.keys
    assert (kept.alive, kept.fd) == (False, None), "peers could still map it"


def test_without_a_descriptor_for_its_control_stream_a_batch_fails(
    opened: Open, fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, owner, ours, theirs = pair_of(opened, MIB)

    def no_socket(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    go = functools.partial(move, us.transfer, Op.READ, owner.transfer.segment, whole(ours, theirs))
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", no_socket)
        assert "Too many open files" in (go().error or "")
    until(lambda: go().error is None, lambda: None)
    assert ours.buffer == theirs.buffer


def test_a_link_that_is_down_is_looked_at_once_in_a_while_however_much_is_said_of_it(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = opened("us", num_nics=1)
    (nic,) = us.nics
    nic.set_link(False)
    until(lambda: not us.rdma.is_up("us-0"), lambda: select.select([], [], [], 0.001))
    pending = us.loop._timers
    told = threading.Semaphore(0)
    monkeypatch.setattr(nic, "take_events", lambda: (FakeNic.take_events(nic), told.release()))
    for _ in range(20):
        nic.set_link(False)
        assert told.acquire(timeout=WAIT_S)
    turned = threading.Event()
    us.loop.post(turned.set)
    assert turned.wait(WAIT_S)
    assert len(pending) < 5
    nic.set_link(True)
    until(lambda: us.rdma.is_up("us-0"), lambda: select.select([], [], [], 0.001))
