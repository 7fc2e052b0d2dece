"""A node lends pool clients what they are granted and pin, until it may be used for others."""

from __future__ import annotations

import random
from collections import Counter

from mooncake.base import PeerLost, PinBlocks, PutEnd, PutGranted, Unpin, WorkerRef
from mooncake.base.messages import ChainHead, PutStart
from mooncake.base.pool_messages import RemoveBlocks
from mooncake.kvstore.config import LEAST_CLIENT_BLOCKS, KvStoreConfig
from mooncake.kvstore.node.peers import MAX_REMEMBERED, Peers
from mooncake.sim.world.disk import SimMedium
from mooncake.transfer.grants import FIRST_LOOK_S, Fence
from tests.support.kvstore.node_world import CountedKey, NodeWorld, key

KEYS = [bytes([n]) * 16 for n in range(6)]
WORKER = WorkerRef("decode-0", "e1", "tcp://10.0.0.8:1")
LOST = WorkerRef("decode-1", "e1", "tcp://10.0.0.9:1")


def client(name: str, epoch: str = "e1") -> WorkerRef:
    return WorkerRef(f"client-{name}", epoch, f"tcp://10.0.0.7:1#{name}")


A, B = client("aa"), client("bb")


def test_a_put_is_lent_to_its_writer_until_each_block_has_ended() -> None:
    world = NodeWorld()
    grant = world.start(A, KEYS[:3])
    first, second, third = grant.places.offsets
    assert world.transfer.lent == Counter({("aa", at, True): 1 for at in (first, second, third)})
    world.end(A, grant, written=[KEYS[0], KEYS[0]])
    assert world.transfer.lent == Counter({("aa", at, True): 1 for at in (second, third)})
    world.end(A, grant, written=[KEYS[1]], dropped=[KEYS[1], KEYS[2], KEYS[2], KEYS[5]])
    assert not world.transfer.lent


def test_an_end_of_many_blocks_compares_few() -> None:
    """A client may name 32,768 blocks, half of them as dropped: the node does nothing else until
    it has read them.
    """
    number = 400
    world, wanted = NodeWorld(num_blocks=2 * number), [CountedKey(key(n)) for n in range(number)]
    grant = world.start(A, list(wanted))
    CountedKey.num_compared = 0
    world.end(A, grant, written=wanted[::2], dropped=wanted)
    assert CountedKey.num_compared < 20 * number
    assert world.node.counters["blocks_put"] == world.node.counters["blocks_dropped"] == number / 2


def test_a_checksum_that_none_can_be_is_not_remembered() -> None:
    """It fits no record of a disk: the blocks that are written with it would be lost."""
    world = NodeWorld()
    for blocks, checksums in ((KEYS[:1], [-1]), (KEYS[1:2], [5])):
        grant = world.start(A, blocks)
        world.handle(PutEnd(writer=A, ticket=grant.ticket, written=blocks, checksums=checksums))
    assert world.pin(A, KEYS[:2]).checksums == [0, 5]


def test_a_pin_is_lent_to_its_reader_as_often_as_it_pins() -> None:
    world = NodeWorld()
    world.put(WORKER, KEYS[:2])
    assert not world.transfer.lent, "workers need no loan"
    pins = [world.pin(A, KEYS[:2]), world.pin(A, KEYS[:1]), world.pin(B, KEYS[:1])]
    first, second = pins[0].places.offsets
    lent = Counter({("aa", first, False): 2, ("aa", second, False): 1, ("bb", first, False): 1})
    assert world.transfer.lent == lent
    world.handle(RemoveBlocks(asker=B, ticket=99, keys=KEYS[:2]))
    assert world.transfer.lent == lent, "readers finish what they read"
    for reader, pinned in zip((A, A, B), pins, strict=True):
        world.unpin(reader, pinned)
        world.unpin(reader, pinned)
    assert not world.transfer.lent


def test_what_a_lost_client_had_is_taken_back_at_once() -> None:
    world = NodeWorld()
    world.put(WORKER, KEYS[:1])
    world.pin(A, KEYS[:1])
    world.start(A, KEYS[1:3])
    kept = world.pin(B, KEYS[:1])
    world.handle(PeerLost(worker=A))
    assert world.transfer.lent == Counter({("bb", kept.places.offsets[0], False): 1})


def test_a_put_that_a_client_never_ends_gives_its_memory_back() -> None:
    """It lives and is heard, so nobody declares it lost; a worker's put is left alone."""
    world = NodeWorld(num_blocks=3, put_timeout_s=60.0)
    grant, workers = world.start(A, KEYS[:2]), world.start(WORKER, KEYS[2:3])
    world.tick(59.0)
    assert world.start(B, KEYS[3:5]).keys == []
    wake = world.tick(59.5)
    assert wake is not None
    assert wake <= 60.0
    world.tick(60.0)
    assert world.transfer.grants.permit(grant.places.grant).withdrawn, "it can write no more"
    assert not world.transfer.lent
    world.tick(60.0 + FIRST_LOOK_S)
    assert world.start(B, KEYS[3:5]).keys == KEYS[3:5]
    world.end(A, grant, written=KEYS[:2])
    assert world.inventory == set(), "what it says of that put counts no more"
    world.end(WORKER, workers)
    assert world.inventory == {KEYS[2]}
    assert world.node.counters["puts_overdue"] == 2
    assert world.node.counters["grants_reclaimed"] == 1


def test_memory_of_an_overdue_put_rests_while_its_client_may_still_write() -> None:
    world = NodeWorld(num_blocks=1, put_timeout_s=60.0, quarantine_s=30.0)
    world.transfer.usual_fence = Fence.UNKNOWN
    world.start(A, KEYS[:1])
    world.tick(60.0)
    assert world.start(B, KEYS[1:2]).keys == []
    world.tick(60.0 + FIRST_LOOK_S)
    assert world.start(B, KEYS[1:2]).keys == []
    world.tick(90.0)
    assert world.start(B, KEYS[1:2]).keys == KEYS[1:2]


def test_clients_of_one_credential_have_so_many_tickets_together() -> None:
    world = NodeWorld(max_tickets_per_client=2)
    world.put(WORKER, KEYS[:1])
    same = WorkerRef("client-aa-2", "e9", "tcp://10.0.0.7:2#aa")
    pinned = world.pin(A, KEYS[:1])
    world.start(same, KEYS[1:2])
    third = WorkerRef("client-aa-3", "e1", "tcp://10.0.0.7:3#aa")
    assert world.pin(third, KEYS[:1]).num_blocks == 0
    assert world.start(third, KEYS[2:3]).keys == []
    assert world.pin(B, KEYS[:1]).num_blocks == 1, "of another credential"
    world.unpin(A, pinned)
    assert world.pin(third, KEYS[:1]).num_blocks == 1


def test_a_client_that_ends_many_tickets_makes_none_of_others_be_forgotten() -> None:
    """An ended ticket is never opened again, also by a message that comes late."""
    peers = Peers(KvStoreConfig(), Counter())
    peers.remember_ended(WORKER, "put", 1)
    peers.remember_ended(B, "put", 1)
    peers.lose(LOST)
    for ticket in range(2 * MAX_REMEMBERED):
        peers.remember_ended(A, "pin", ticket)
        peers.lose(client("aa", f"e{ticket}"))
    for peer, ticket in ((WORKER, 1), (B, 1), (LOST, 2)):
        assert not peers.may_open(peer, "put", ticket, 1)
    assert peers.may_open(WORKER, "put", 2, 1)


def test_clients_of_one_credential_hold_so_much_memory_together() -> None:
    """By what they were granted and did not end, and by what they have pinned."""
    most = LEAST_CLIENT_BLOCKS
    world = NodeWorld(num_blocks=3 * most, client_share=0.1, max_tickets_per_client=1000)
    stored, wanted = ([key(n + at) for n in range(most)] for at in (0, 100))
    world.put(WORKER, stored)
    other = WorkerRef("client-aa-2", "e2", "tcp://10.0.0.7:2#aa")
    pinned = world.pin(A, stored[:10])
    grant = world.start(other, wanted)
    assert grant.keys == wanted[: most - 10]
    assert world.pin(other, stored[:1]).num_blocks == 0
    assert world.pin(A, stored[:1]).num_blocks == 0
    assert world.start(B, wanted[10:]).keys == wanted[10:], "of another credential"
    world.unpin(A, pinned)
    assert world.pin(A, stored).num_blocks == 10
    world.handle(PeerLost(worker=other))
    assert world.pin(A, stored).num_blocks == most - 10


def test_random_messages_of_clients_leave_no_loan_behind() -> None:
    chance = random.Random(7)
    world = NodeWorld(num_blocks=4)
    for step in range(3000):
        peer = chance.choice((A, B, client("aa", f"e{step // 500}")))
        keys = [chance.choice(KEYS) for _ in range(chance.randint(1, 3))]
        ticket = chance.randint(1, 6)
        match chance.randint(0, 4):
            case 0:
                world.handle(PutStart(writer=peer, ticket=ticket, keys=keys))
            case 1:
                world.handle(PutEnd(writer=peer, ticket=ticket, written=keys, dropped=keys[:1]))
            case 2:
                world.handle(PutEnd(writer=peer, ticket=ticket, dropped=KEYS))
            case 3:
                world.pin(peer, keys) if chance.random() < 0.5 else None
            case 4 if chance.random() < 0.1:
                world.handle(PeerLost(worker=peer))
                world.tick(world.now + 100.0)
    for state in list(world.node._peers.states.values()):
        world.handle(PeerLost(worker=state.ref))
    assert not world.transfer.lent


def test_what_open_puts_and_waiting_pins_of_one_credential_name_has_a_bound() -> None:
    """A pin that waits for a disk takes no memory of the pool, and still keeps its names."""
    world = NodeWorld(
        num_blocks=4, media=[SimMedium()], ssd_write_at=0.0, ssd_min_uses=1, max_keys_per_client=10
    )
    world.tick(1.0)
    world.put(WORKER, [key(1)])
    world.tick(2.0)
    world.boot()  # the block is on the disk alone
    world.tick(2.1)
    other = WorkerRef("client-aa-2", "e2", "tcp://10.0.0.7:2#aa")
    named = [key(n) for n in range(1, 8)]
    first, head = world.ticket(), ChainHead(keys=named[3:])
    world.handle(PinBlocks(reader=A, ticket=first, keys=named))
    assert world.node.num_open == 1, "it waits"
    assert world.pin(other, named).num_blocks == 0, "with those of the first there are too many"
    start = PutStart(writer=other, ticket=world.ticket(), keys=KEYS[:1], tenant="", head=head)
    assert world.answer(start, PutGranted).keys == [], "those before the blocks count"
    assert world.start(other, KEYS[:1]).keys == KEYS[:1]
    assert world.pin_soon(B, named).num_blocks == 1, "of another credential"
    world.handle(Unpin(reader=A, ticket=first))
    assert world.pin_soon(other, named).num_blocks == 1
