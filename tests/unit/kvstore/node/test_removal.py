"""A block removed from a node: no boot of it finds it again, and who reads it reads on."""

from __future__ import annotations

import pytest

from mooncake.base import PeerLost, PinBlocks, PinGranted, Tier, WorkerRef
from mooncake.base.messages import Refused, Replicate
from mooncake.base.pool_messages import (
    BlockCopy,
    BlocksDescribed,
    BlocksFound,
    BlocksRemoved,
    DescribeBlocks,
    FindBlocks,
    LastingPin,
    PinsSet,
    RemoveBlocks,
    SetPins,
    TakenOver,
)
from mooncake.kvstore.node import removal
from mooncake.kvstore.node.inquiries import MAX_CLIENT_LIFTS
from mooncake.kvstore.storage.tombstones import COPY_S, MAX_REMEMBERED, Tombstones
from mooncake.sim.world.disk import SimDiskConfig, SimMedium
from tests.support.kvstore.node_world import BLOCK, NodeWorld, key, keys, worker

WRITER, READER, OTHER = worker("prefill-0"), worker("decode-0"), worker("kv-1")
CLIENT = WorkerRef("client-aa", "e1", "tcp://10.0.0.7:1#aa")


def world_of(num_blocks: int = 2, num_disks: int = 1, **settings: int) -> NodeWorld:
    """A node whose disks take everything, at once."""
    world = NodeWorld(
        num_blocks, media=[SimMedium() for _ in range(num_disks)], ssd_min_uses=1,
        ssd_write_at=0.0, high_watermark=1.0, **settings,
    )  # fmt: skip
    if num_disks:
        world.tick(1.0)
    return world


def put(world: NodeWorld, *numbers: int) -> None:
    assert world.put(WRITER, keys(*numbers)) == keys(*numbers)
    world.tick(world.now + 1)


def ask_remove(world: NodeWorld, *numbers: int) -> int:
    ticket = world.ticket()
    world.handle(RemoveBlocks(asker=READER, ticket=ticket, keys=keys(*numbers)))
    return ticket


def answers(world: NodeWorld, ticket: int) -> list[tuple[list[bool], list[bool]]]:
    return [
        (sent.removed, sent.left) for _, sent in world.channel.sent
        if isinstance(sent, BlocksRemoved) and sent.ticket == ticket
    ]  # fmt: skip


def find(world: NodeWorld, *numbers: int) -> list[Tier | None]:
    message = FindBlocks(asker=READER, ticket=3, keys=keys(*numbers))
    return world.answer(message, BlocksFound).tiers


def test_a_reader_keeps_its_bytes_until_it_has_read_them() -> None:
    world = world_of(num_blocks=3, num_disks=0)
    put(world, 1)
    first, second = world.pin(READER, keys(1)), world.pin(OTHER, keys(1))
    assert answers(world, ask_remove(world, 1)) == [([True], [False])]
    assert find(world, 1) == [None]
    assert world.pin(OTHER, keys(1)).num_blocks == 0
    assert world.inventory == set()
    world.unpin(OTHER, second)
    put(world, 2, 3)
    assert world.put(WRITER, keys(4)) == keys(4), "by evicting, not where it is read"
    assert world.holds(first.places, first.places.offsets[0], key(1))
    assert world.start(WRITER, keys(1)).keys == [], "not while the old one is there"
    world.unpin(READER, first)
    put(world, 1)
    assert find(world, 1) == [Tier.DRAM]


def test_a_lost_reader_holds_nothing() -> None:
    world = world_of(num_blocks=1, num_disks=0)
    put(world, 1)
    world.pin(READER, keys(1))
    ask_remove(world, 1)
    assert world.load().num_free_blocks == 0
    world.handle(PeerLost(worker=READER))
    assert world.load().num_free_blocks == 1


def test_a_hard_pin_protects_a_block_and_a_soft_one_does_not() -> None:
    world = world_of(num_blocks=4)
    put(world, 1, 2)
    for number, how in ((1, LastingPin.HARD), (2, LastingPin.SOFT)):
        wish = SetPins(asker=READER, ticket=world.ticket(), keys=keys(number), pin=how)
        assert world.answer(wish, PinsSet).done == [True]
    ticket = ask_remove(world, 1, 2, 9)
    world.tick(world.now + 1)
    assert answers(world, ticket) == [([False, True, False], [True, False, False])]
    assert find(world, 1, 2) == [Tier.DRAM, None]


def test_the_answer_comes_when_no_boot_will_find_the_block() -> None:
    """Killed at any moment: what was answered for is not found again."""
    outcomes = set()
    for moment in range(30):
        world = world_of()
        put(world, 1)
        put(world, 2, 3)
        assert find(world, 1) == [Tier.SSD]
        ticket = ask_remove(world, 1)
        assert find(world, 1) == [None]
        world.tick(world.now + moment * 1e-5)
        is_over = bool(answers(world, ticket))
        world.boot()
        world.tick(world.now + 1)
        assert not (is_over and key(1) in world.on_ssd)
        outcomes.add((is_over, key(1) in world.on_ssd))
    assert outcomes == {(False, True), (True, False)}


def test_a_block_on_its_way_up_is_gone_for_waiting_readers_too() -> None:
    world = world_of()
    put(world, 1)
    put(world, 2, 3)
    world.handle(PinBlocks(reader=READER, ticket=99, keys=keys(1)))
    ticket = ask_remove(world, 1)
    assert answers(world, ticket) == []
    assert find(world, 1) == [None]
    world.tick(world.now + 1)
    [granted] = [s for _, s in world.channel.sent if isinstance(s, PinGranted) and s.ticket == 99]
    assert granted.num_blocks == 0
    assert answers(world, ticket) == [([True], [False])]
    world.boot()
    world.tick(world.now + 1)
    assert find(world, 1) == [None]


def test_a_block_on_its_way_down_is_not_found_there() -> None:
    world = world_of()
    world.put(WRITER, keys(1))
    assert find(world, 1) == [Tier.DRAM]
    ticket = ask_remove(world, 1)
    assert answers(world, ticket) == []
    world.tick(world.now + 1)
    assert answers(world, ticket) == [([True], [False])]
    assert world.media[0].slots == {}
    assert world.load().num_free_blocks == 2


def test_a_block_that_a_disk_cannot_erase_is_left() -> None:
    world = world_of()
    put(world, 1)
    put(world, 2, 3)
    world.media[0].refuses_writes = True
    ticket = ask_remove(world, 1)
    world.tick(world.now + 1)
    assert answers(world, ticket) == [([False], [True])]


def test_a_disk_that_is_not_scanned_yet_is_waited_for() -> None:
    world = world_of()
    put(world, 1)
    world.boot()
    ticket = ask_remove(world, 1)
    world.tick(world.now + SimDiskConfig().scan_s / 2)
    assert answers(world, ticket) == []
    world.tick(world.now + 1)
    assert answers(world, ticket) == [([True], [False])]
    assert world.on_ssd == set()
    world.boot()
    world.tick(world.now + 1)
    assert find(world, 1) == [None]


def test_what_two_disks_hold_is_removed_from_both() -> None:
    world = world_of(num_disks=2)
    put(world, 1)
    [full] = [medium for medium in world.media if medium.slots]
    [other] = [medium for medium in world.media if not medium.slots]
    other.slots[5] = full.slots[0]
    world.boot()
    world.tick(world.now + 1)
    assert sum(len(medium.slots) for medium in world.media) == 1
    ticket = ask_remove(world, 1)
    world.tick(world.now + 1)
    assert answers(world, ticket) == [([True], [False])]
    assert not full.slots
    assert not other.slots


def order_copy(world: NodeWorld, *numbers: int) -> int:
    """Have the node pull blocks from another one; return how many it asked that one for."""
    before = len(world.channel.sent)
    world.handle(Replicate(source=OTHER, keys=keys(*numbers), asker=READER, ticket=world.ticket()))
    sent = [message for _, message in world.channel.sent[before:]]
    return sum(len(message.keys) for message in sent if isinstance(message, PinBlocks))


def test_no_copy_is_made_of_what_is_being_removed_from_all_nodes() -> None:
    world = world_of(num_blocks=4, num_disks=0)
    ticket = ask_remove(world, 1)
    assert answers(world, ticket) == [([False], [False])]
    assert order_copy(world, 1, 2) == 1
    world.tick(world.now + COPY_S)
    assert order_copy(world, 1) == 1, "it was put again since"
    assert not [s for _, s in world.channel.sent if isinstance(s, TakenOver) and key(1) in s.keys]


@pytest.mark.parametrize("bound", ["MAX_REMOVALS", "MAX_REMOVED_KEYS"])
def test_removals_of_one_client_leave_room_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(removal, bound, 8)
    world = NodeWorld(2, media=[SimMedium()])  # not scanned yet: any block may lie there
    for number in range(4):
        asker = OTHER if number == 3 else CLIENT
        ticket = world.ticket()
        world.handle(RemoveBlocks(asker=asker, ticket=ticket, keys=keys(number)))
    (told,) = [sent for _, sent in world.channel.sent if isinstance(sent, Refused)]
    assert told.asker == CLIENT


def test_what_is_removed_is_remembered_up_to_a_bound() -> None:
    removed = Tombstones()
    for number in range(MAX_REMEMBERED + 1):
        removed.add(key(number), READER, 1.0)
    assert key(0) not in removed
    assert key(1) in removed
    assert removed.is_fresh(key(1), 1.0 + COPY_S / 2)
    assert not removed.is_fresh(key(1), 1.0 + COPY_S)
    removed.add(key(1), READER, 50.0)
    removed.add(key(MAX_REMEMBERED + 1), READER, 50.0)
    assert key(1) in removed
    assert key(2) not in removed
    for number in range(MAX_REMEMBERED + 2, 2 * MAX_REMEMBERED):
        removed.add(key(number), CLIENT, 60.0)
    assert key(1) in removed, "a client that removes much hides no removal of others"


def describe(world: NodeWorld, number: int) -> list[BlockCopy]:
    message = DescribeBlocks(asker=READER, ticket=4, keys=keys(number))
    [copies] = world.answer(message, BlocksDescribed).copies
    return copies


def test_what_a_node_has_of_a_block() -> None:
    world = world_of(num_blocks=4)
    put(world, 1)
    pinned = world.pin(READER, keys(1))
    wish = SetPins(asker=READER, ticket=5, keys=keys(1), pin=LastingPin.HARD)
    assert world.answer(wish, PinsSet).done == [True]
    on_ssd = BlockCopy(Tier.SSD, BLOCK)
    assert describe(world, 1) == [BlockCopy(Tier.DRAM, BLOCK, LastingPin.HARD, 1), on_ssd]
    world.unpin(READER, pinned)
    assert describe(world, 1) == [BlockCopy(Tier.DRAM, BLOCK, LastingPin.HARD), on_ssd]
    assert describe(world, 7) == []
    world.boot()
    world.tick(world.now + 1)
    assert describe(world, 1) == [on_ssd]


@pytest.mark.parametrize("number", [1, 5])
def test_blocks_on_ssd_come_up_to_be_pinned(number: int) -> None:
    """However many, as far as there is room for hard pins."""
    world = world_of(num_blocks=10)
    run = range(100, 100 + number)
    put(world, *run)
    world.boot()
    world.tick(world.now + 1)
    wish = SetPins(asker=READER, ticket=77, keys=keys(*run, 9), pin=LastingPin.HARD)
    assert world.answer(wish, PinsSet).done == [False] * (number + 1)
    lifting = SetPins(asker=READER, ticket=78, keys=keys(*run, 9), pin=LastingPin.HARD, lift=True)
    world.handle(lifting)
    world.tick(world.now + 1)
    [answer] = [s for _, s in world.channel.sent if isinstance(s, PinsSet) and s.ticket == 78]
    assert answer.done == [True] * number + [False]
    assert find(world, *run) == [Tier.DRAM] * number


def test_few_orders_of_one_client_wait_for_blocks_from_ssd() -> None:
    world = world_of(num_blocks=4)
    run = range(100, 102)
    put(world, *run)
    world.boot()
    world.tick(world.now + 1)
    other = WorkerRef("client-bb", "e1", "tcp://10.0.0.7:1#bb")
    waiting = {CLIENT: range(1000, 1020), other: range(2000, 2020)}
    for asker, tickets in waiting.items():
        for ticket in tickets:
            wish = SetPins(
                asker=asker, ticket=ticket, keys=keys(*run), pin=LastingPin.SOFT, lift=True
            )
            world.handle(wish)

    def done() -> dict[int, list[bool]]:
        return {s.ticket: s.done for _, s in world.channel.sent if isinstance(s, PinsSet)}

    more = [ticket for tickets in waiting.values() for ticket in tickets[MAX_CLIENT_LIFTS:]]
    assert done() == {ticket: [False, False] for ticket in more}
    world.tick(world.now + 1)
    assert sum(each == [True, True] for each in done().values()) == 2 * MAX_CLIENT_LIFTS
    world.node.check_integrity()


@pytest.mark.parametrize("bound", ["MAX_REMOVALS", "MAX_REMOVED_KEYS"])
def test_removals_that_wait_for_a_disk_have_a_bound(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(removal, bound, 2)
    world = NodeWorld(2, media=[SimMedium()])  # not scanned yet: any block may lie there
    first = [ask_remove(world, number) for number in (1, 2)]
    refused = ask_remove(world, 3)
    assert [answers(world, ticket) for ticket in (*first, refused)] == [[], [], []]
    (told,) = [sent for _, sent in world.channel.sent if isinstance(sent, Refused)]
    assert told.ticket == refused
    assert "2 removals wait" in told.reason
    world.tick(1.0)
    assert all(answers(world, ticket) for ticket in first)
    assert answers(world, ask_remove(world, 3))


def test_of_many_blocks_that_go_each_is_looked_at_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk erases them one after the other. The others are not looked at each time."""
    run = range(100, 300)
    world = world_of(num_blocks=len(run), ssd_blocks=len(run))
    put(world, *run)
    assert world.on_ssd == set(keys(*run))
    tiering = world.node.blocks.tiering
    is_fading, asked = tiering.is_fading, list[bytes]()

    def ask(key: bytes) -> bool:
        asked.append(key)
        return is_fading(key)

    monkeypatch.setattr(tiering, "is_fading", ask)
    monkeypatch.setattr(world.node, "check_integrity", lambda: None)  # it looks at all
    tickets = [ask_remove(world, *run[at : at + 50]) for at in range(0, len(run), 50)]
    world.tick(world.now + 1)
    assert [answers(world, ticket) for ticket in tickets] == [[([True] * 50, [False] * 50)]] * 4
    assert set(asked) == set(keys(*run))
    assert len(asked) <= 3 * len(run)


def test_two_requests_for_one_block_are_both_answered() -> None:
    world = world_of()
    put(world, 1)
    tickets = [ask_remove(world, 1, 1), ask_remove(world, 1, 5)]
    assert [answers(world, ticket) for ticket in tickets] == [[], []]
    world.tick(world.now + 1)
    assert answers(world, tickets[0]) == [([True, True], [False, False])]
    assert answers(world, tickets[1]) == [([False, False], [False, False])]
