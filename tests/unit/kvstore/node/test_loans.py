"""A node lends pool clients what they are granted and pin, until it may be used for others."""

from __future__ import annotations

import random
from collections import Counter

from mooncake.base import PeerLost, PutEnd, WorkerRef
from mooncake.base.messages import PutStart
from mooncake.base.pool_messages import RemoveBlocks
from tests.support.kvstore.node_world import NodeWorld

KEYS = [bytes([n]) * 16 for n in range(6)]
WORKER = WorkerRef("decode-0", "e1", "tcp://10.0.0.8:1")


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
