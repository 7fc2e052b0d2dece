"""Device memory by way of pinned host memory: right bytes, fair turns, nothing left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import msgspec
import pytest

from mooncake.base.errors import TransferError
from mooncake.transfer import local
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.regions import AnyRegion
from mooncake.transfer.staging.slots import StagingLimits
from tests.support.clock import ManualClock
from tests.support.transfer.device_pair import LIMITS, WAIT_S, Side, batch, content, until
from tests.support.transfer.driving import WIRED, move, wait_for
from tests.support.transfer.fake_device import UnpinnableMemory
from tests.support.transfer.staging_reference import move_whole

SIZE = 40_000
Open = Callable[..., Side]
PLACES = [("device", "device"), ("device", "host"), ("host", "device")]


@pytest.fixture
def opened() -> Iterator[Open]:
    fabric = InprocFabric()
    sides: list[Side] = []

    def make(name: str, protocols: tuple[str, ...] = ("tcp",), **more: object) -> Side:
        sides.append(Side(name, fabric, protocols, **more))  # type: ignore[arg-type]  # as given
        return sides[-1]

    yield make
    for side in sides:
        side.close()


def region(side: Side, place: str, seed: int) -> AnyRegion:
    return side.device(SIZE, seed) if place == "device" else side.host(SIZE, seed)


def scattered(ours: AnyRegion, theirs: AnyRegion, seed: int) -> list[TransferOp]:
    """Return pieces of odd sizes at odd offsets that never overlap."""
    rng = random.Random(seed)
    ops, here, there = [], rng.randrange(9), rng.randrange(9)
    while True:
        size = rng.choice([1, 3, 7, 100, 1023, 4095, 4096, 4097, 9001])
        if max(here, there) + size > SIZE:
            return ops
        ops.append(TransferOp(ours.region_id, here, theirs.region_id, there, size))
        here += size + rng.randrange(20)
        there += size + rng.randrange(20)


def all_free(*sides: Side) -> bool:
    return all(side.held() == (0, 0, 0) for side in sides)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("places", PLACES, ids="-".join)
@pytest.mark.parametrize("protocol", [*WIRED, "inproc"])
def test_bytes_are_those_of_the_plain_way(
    opened: Open, protocol: str, places: tuple[str, str], op: Op
) -> None:
    us, owner = opened("us", (protocol,)), opened("owner", (protocol,))
    ours, theirs = region(us, places[0], 1), region(owner, places[1], 2)
    copies = Side("reference", InprocFabric(), ("inproc",))
    plain_ours, plain_theirs = copies.device(SIZE, 1), copies.host(SIZE, 2)
    copies.memories[0].is_strict = False
    for seed in range(3):
        ops = scattered(ours, theirs, seed)
        assert move(us.transfer, op, owner.transfer.segment, ops).error is None
        move_whole(op, ops, {ours.region_id: plain_ours}, {theirs.region_id: plain_theirs})
        assert content(ours) == content(plain_ours)
        assert content(theirs) == content(plain_theirs)
    until(
        lambda: all(side.held() == (0, 0, 0) for side in (us, owner) if side.staging_engine.in_use)
    )
    copies.close()


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("places", [("device", "device"), ("host", "device")], ids="-".join)
@pytest.mark.parametrize("protocol", ["inproc", "shm"])
def test_bytes_that_change_on_their_way_to_or_from_a_window_are_found(
    opened: Open, monkeypatch: pytest.MonkeyPatch, protocol: str, places: tuple[str, str], op: Op
) -> None:
    mac = Protection.MAC
    us = opened("us", (protocol,), protection=mac)
    owner = opened("owner", (protocol,), protection=mac)
    ours, theirs = region(us, places[0], 1), region(owner, places[1], 2)
    ops = scattered(ours, theirs, 3)
    assert move(us.transfer, op, owner.transfer.segment, ops).error is None
    source, target = (theirs, ours) if op is Op.READ else (ours, theirs)
    for one in ops:
        here, there = (one.local_offset, one.remote_offset)[:: 1 if op is Op.READ else -1]
        size = one.num_bytes
        assert content(target)[here : here + size] == content(source)[there : there + size]
    copy = local.copy_part

    def spoiling(part: local.CopyPart, gate: threading.Lock, hand: int) -> None:
        def spoil() -> None:
            part.pairs[-1][0][-1] ^= 1

        confirm = part.guard.confirm
        guard = mock.Mock(wraps=part.guard)
        guard.confirm = lambda: (spoil(), confirm())[1]
        copy(msgspec.structs.replace(part, guard=guard), gate, hand)

    monkeypatch.setattr(local, "copy_part", spoiling)
    before = content(target)
    error = move(us.transfer, op, owner.transfer.segment, ops).error
    assert error is not None
    assert "altered between window and peer" in error
    if op is Op.WRITE:
        assert content(target) == before, "the device never saw them"
    until(
        lambda: all(side.held() == (0, 0, 0) for side in (us, owner) if side.staging_engine.in_use)
    )


@pytest.mark.parametrize("protocol", WIRED)
def test_windows_end_no_grant_that_a_lead_has_issued(opened: Open, protocol: str) -> None:
    """A follower hears of its lead's grants only when they end."""
    us, follower, lead = opened("us", (protocol,)), opened("follower", (protocol,)), opened("lead")
    ours, theirs = us.host(SIZE, 1), follower.device(SIZE, 2)
    grants = [lead.transfer.grant() for _ in range(3)]
    ops = [TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)]
    to = follower.transfer.segment
    for grant in grants * 2:
        assert move(us.transfer, Op.WRITE, to, ops, grant=grant).error is None
    assert content(theirs) == content(ours)
    follower.transfer.revoke(grants[1])
    errors = [move(us.transfer, Op.WRITE, to, ops, grant=each).error for each in grants]
    assert [error is None for error in errors] == [True, False, True]


def test_a_batch_may_mix_host_and_devices(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    ours = [us.device(SIZE, 1), us.host(SIZE, 2)]
    theirs = [owner.device(SIZE, 3), owner.host(SIZE, 4)]
    ops = [
        TransferOp(here.region_id, 100 + 5_001 * n, there.region_id, 7_777 + 5_001 * n, 5_001)
        for n, (here, there) in enumerate((h, t) for h in ours for t in theirs)
    ]
    expected = [bytearray(content(each)) for each in theirs]
    for op in ops:
        here = next(each for each in ours if each.region_id == op.local_region)
        at = [each.region_id for each in theirs].index(op.remote_region)
        data = content(here)[op.local_offset :][: op.num_bytes]
        expected[at][op.remote_offset : op.remote_offset + op.num_bytes] = data
    assert move(us.transfer, Op.WRITE, owner.transfer.segment, ops).error is None
    assert [content(each) for each in theirs] == expected


def test_between_host_memories_nothing_is_staged(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    us.device(10), owner.device(10)
    ours, theirs = us.host(SIZE, 1), owner.host(SIZE, 2)
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    assert move(us.transfer, Op.WRITE, owner.transfer.segment, [op]).error is None
    assert content(theirs) == content(ours)
    assert us.transfer.counters()["transfer_stage_bytes"] == 0


def test_a_slice_travels_while_the_next_is_copied(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.device(SIZE, 1), owner.host(SIZE, 2)
    us.memories[0].hold()
    batch_id = us.transfer.submit(
        batch(owner, Op.WRITE, [TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)])
    )
    until(lambda: us.memories[0].num_held == LIMITS.num_slots)
    us.memories[0].release_one()
    first = content(ours)[: LIMITS.slot_bytes]
    until(lambda: content(theirs)[: LIMITS.slot_bytes] == first)
    until(lambda: us.memories[0].num_held == LIMITS.num_slots)  # and the pool is full again
    us.memories[0].release()
    assert wait_for(us.transfer, [batch_id])[batch_id].error is None
    assert content(theirs) == content(ours)


def test_two_batches_take_turns(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.device(SIZE, 1), owner.host(SIZE, 2)
    memory = us.memories[0]
    memory.hold()
    long = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    short = TransferOp(ours.region_id, 5, theirs.region_id, 5, 10)
    first = us.transfer.submit(batch(owner, Op.WRITE, [long]))
    until(lambda: memory.num_held == LIMITS.num_slots)
    second = us.transfer.submit(batch(owner, Op.WRITE, [short]))
    us.check()  # the second has asked when this has run in the loop
    num_released = 0
    ended: list[int] = []
    while second not in ended:
        until(lambda: memory.num_held > 0 or bool(ended))
        num_released += memory.release_one()
        until(lambda: memory.num_held == LIMITS.num_slots or bool(ended), lambda: ended.extend(
            done.batch_id for done in us.transfer.poll()
        ))  # fmt: skip
        assert num_released <= 2 * LIMITS.num_slots + 2, "the short one waits for all of the long"
    assert first not in ended
    memory.release()
    assert wait_for(us.transfer, [first])[first].error is None


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_copy_that_fails_fails_the_batch_and_nothing_stays(
    opened: Open, op: Op, side: str
) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.device(SIZE, 1), owner.device(SIZE, 2)
    memory = (us if side == "ours" else owner).memories[0]
    num_copies = 0

    def fails(_kind: str) -> str | None:
        nonlocal num_copies
        num_copies += 1
        return "the device has fallen off the bus" if num_copies == 3 else None

    memory.fails = fails
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    done = move(us.transfer, op, owner.transfer.segment, [whole])
    assert done.error is not None
    assert "the device has fallen off the bus" in done.error
    until(lambda: all_free(us, owner))
    assert move(us.transfer, op, owner.transfer.segment, [whole]).error is None
    assert content(ours) == content(theirs)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_cancelled_batch_ends_when_its_copies_have(opened: Open, op: Op, side: str) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.device(SIZE, 1), owner.device(SIZE, 2)
    memory = (us if side == "ours" else owner).memories[0]
    memory.hold()
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    batch_id = us.transfer.submit(batch(owner, op, [whole]))
    until(lambda: memory.num_held > 0)
    us.transfer.cancel(batch_id)
    us.check()
    in_hand = side == "ours" or op is Op.WRITE  # a window not granted yet is simply dropped
    if in_hand:
        assert not us.transfer.poll(), "ended while a copy may still touch memory"
    memory.release()
    assert wait_for(us.transfer, [batch_id])[batch_id].error == "cancelled"
    until(lambda: all_free(us, owner))


def test_a_deadline_ends_a_batch_whose_window_never_comes(opened: Open) -> None:
    clock = ManualClock()
    us, owner = opened("us", clock=clock), opened("owner")
    ours, theirs = us.host(SIZE, 1), owner.device(SIZE, 2)
    owner.memories[0].hold()
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    us.transfer.submit(batch(owner, Op.READ, [whole], deadline_s=5.0))
    until(lambda: owner.memories[0].num_held == LIMITS.num_windows_asked)
    clock.advance_to(6.0)
    ended: list[str | None] = []
    until(lambda: bool(ended), lambda: ended.extend(done.error for done in us.transfer.poll()))
    assert ended == ["deadline passed after 6.000 s"]
    assert owner.held()[1] == LIMITS.num_windows_asked, "a copy is under way into them"
    owner.memories[0].release()
    until(lambda: all_free(us, owner))


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_an_owner_that_is_lost_fails_the_batch(opened: Open, op: Op) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.device(SIZE, 1), owner.device(SIZE, 2)
    us.memories[0].hold()
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    batch_id = us.transfer.submit(batch(owner, op, [whole]))
    until(lambda: us.memories[0].num_held > 0)
    owner.close()
    us.memories[0].release()
    assert wait_for(us.transfer, [batch_id])[batch_id].error is not None
    until(lambda: all_free(us))
    again = us.transfer.submit(batch(owner, op, [whole]))
    assert "cannot be reached" in str(wait_for(us.transfer, [again])[again].error)


def test_windows_of_a_lost_client_rest_and_come_back(opened: Open) -> None:
    us, owner = opened("us"), opened("owner", limits=LIMITS)
    ours, theirs = us.device(SIZE, 1), owner.device(SIZE, 2)
    us.memories[0].hold()
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    us.transfer.submit(batch(owner, Op.READ, [whole]))
    until(lambda: us.memories[0].num_held > 0)
    us.close()
    until(lambda: all_free(owner))
    other = opened("other")
    mine = other.device(SIZE, 3)
    op = TransferOp(mine.region_id, 0, theirs.region_id, 0, SIZE)
    assert move(other.transfer, Op.WRITE, owner.transfer.segment, [op]).error is None
    assert content(mine) == content(theirs)


def test_a_silent_owner_is_given_up(opened: Open) -> None:
    limits = StagingLimits(slot_bytes=4096, num_slots=2, fence_s=0.02, connect_s=0.05)
    us, owner = opened("us", limits=limits), opened("owner")
    ours, theirs = us.host(SIZE, 1), owner.device(SIZE, 2)
    owner.memories[0].hold()
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, 4096)
    batch_id = us.transfer.submit(batch(owner, Op.WRITE, [whole]))
    until(lambda: owner.memories[0].num_held == 1)  # it lands, and lands
    us.transfer.cancel(batch_id)
    # The new session is not welcomed before that copy has ended, so its end is unconfirmed.
    assert wait_for(us.transfer, [batch_id])[batch_id].error == "cancelled"
    owner.memories[0].release()
    until(lambda: all_free(owner))
    assert move(us.transfer, Op.WRITE, owner.transfer.segment, [whole]).error is None


def test_a_broken_stream_is_told_when_the_copies_of_the_old_one_have_ended(opened: Open) -> None:
    limits = StagingLimits(slot_bytes=4096, num_slots=2, fence_s=0.02, connect_s=30.0)
    us, owner = opened("us", limits=limits), opened("owner")
    ours, theirs = us.host(SIZE, 1), owner.device(SIZE, 2)
    owner.memories[0].hold()
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, 4096)
    batch_id = us.transfer.submit(batch(owner, Op.WRITE, [whole]))
    until(lambda: owner.memories[0].num_held == 1)
    us.transfer.cancel(batch_id)
    # After the limit of time a second stream asks the owner to end the first.
    until(lambda: owner.num_sessions() == 2)
    assert not us.transfer.poll(), "ended while the owner may still write for it"
    owner.memories[0].release()
    assert wait_for(us.transfer, [batch_id])[batch_id].error == "cancelled"
    assert content(theirs)[:4096] == content(ours)[:4096]


def test_the_owner_refuses_before_a_byte_has_gone(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.host(SIZE, 1), owner.device(SIZE, 2)
    peer = owner.transfer.segment
    beyond = TransferOp(ours.region_id, 0, theirs.region_id, SIZE - 5, 6)
    assert move(us.transfer, Op.WRITE, peer, [beyond]).error == (
        f"owner refused: bytes [{SIZE - 5}, {SIZE + 1}) lie outside region {theirs.region_id} "
        f"(pages) of {SIZE} bytes"
    )
    owner.transfer.unregister(theirs)
    gone = TransferOp(ours.region_id, 0, theirs.region_id, 0, 6)
    assert "is not registered" in str(move(us.transfer, Op.READ, peer, [gone]).error)
    assert us.transfer.counters()["transfer_tcp_bytes"] == 0
    until(lambda: all_free(us, owner))


def test_protocols_do_not_touch_a_device_by_themselves(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.host(100, 1), owner.device(100, 2)
    peer = owner.transfer.segment
    plain = type(peer)(peer.engine_id, {"tcp": peer.endpoints["tcp"]}, peer.host)
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 6)
    assert "lies in memory of fake:0" in str(move(us.transfer, Op.WRITE, plain, [op]).error)
    with pytest.raises(ValueError, match="lies in memory of fake:0"):
        _ = theirs.buffer


def test_unregistering_waits_for_copies_in_hand(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.device(SIZE, 1), owner.host(SIZE, 2)
    us.memories[0].hold()
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    batch_id = us.transfer.submit(batch(owner, Op.WRITE, [whole]))
    until(lambda: us.memories[0].num_held == LIMITS.num_slots)
    gone = threading.Event()

    def unregister() -> None:
        us.transfer.unregister(ours)
        gone.set()

    thread = threading.Thread(target=unregister)
    thread.start()
    until(lambda: not ours.alive)
    assert not gone.is_set(), "the device still reads it"
    us.memories[0].release()
    assert gone.wait(WAIT_S)
    thread.join()
    assert "was unregistered" in str(wait_for(us.transfer, [batch_id])[batch_id].error)
    until(lambda: all_free(us))


def test_strangers_get_no_window(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.host(100, 1), owner.device(100, 2)
    peer = owner.transfer.segment
    other = type(peer)("somebody-else", peer.endpoints, peer.host)
    op = TransferOp(ours.region_id, 0, theirs.region_id, 0, 6)
    assert "is not here" in str(move(us.transfer, Op.WRITE, other, [op]).error)


def test_a_device_that_pins_nothing_is_not_registered(opened: Open) -> None:
    us = opened("us")
    with pytest.raises(TransferError, match="pins no"):
        us.transfer.register_device(UnpinnableMemory(100), "pages")


def test_closing_ends_what_is_under_way(opened: Open) -> None:
    us, owner = opened("us"), opened("owner")
    ours, theirs = us.device(SIZE, 1), owner.device(SIZE, 2)
    us.memories[0].hold()
    whole = TransferOp(ours.region_id, 0, theirs.region_id, 0, SIZE)
    batch_id = us.transfer.submit(batch(owner, Op.WRITE, [whole]))
    until(lambda: us.memories[0].num_held > 0)
    us.memories[0].release()
    us.transfer.close()
    (done,) = us.transfer.poll()
    assert done.batch_id == batch_id
