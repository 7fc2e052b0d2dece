"""A node that is brought blocks behind a question over the data connection: it grants memory, makes
what came whole readable, and takes the memory back when the question ends before that.
"""

from __future__ import annotations

import pytest

from mooncake.base import PeerLost, PinBlocks, PutEnd, PutGranted, PutStart, WorkerRef
from mooncake.base.messages import Drain
from mooncake.base.pool_messages import RemoveBlocks
from mooncake.base.rights import Sender, tenant_key
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.rpc.codec import encode
from mooncake.transfer.engine import Asked, AskEnded, Brought
from tests.support.kvstore.node_world import BLOCK, LAYOUT, NodeWorld, content, key, keys, worker
from tests.support.kvstore.senders import CHANNEL_KEY, CLIENT, HERE, WORKERS, client_of

WRITER, READER = worker("prefill-0"), worker("decode-0")


def bytes_of(block: bytes) -> bytes:
    return b"".join(content(block, layer) for layer in range(LAYOUT.num_layers))


class World(NodeWorld):
    """A node that is brought blocks."""

    num_asked = 0

    def offer(
        self,
        wanted: list[bytes],
        writer: WorkerRef = WRITER,
        sender: Sender = WORKERS,
        *,
        ticket: int | None = None,
        per_block: int = 1,
        num_bytes: int | None = None,
        tenant: str = "",
    ) -> int:
        """Begin to bring a run; return the number of the question."""
        self.num_asked += 1
        ticket = self.ticket() if ticket is None else ticket
        question = PutStart(writer=writer, ticket=ticket, keys=wanted, tenant=tenant)
        event = Asked(
            number=self.num_asked, question=encode(question), sender=sender, whence=HERE,
            num_pieces=len(wanted) * per_block,
            num_bytes=len(wanted) * BLOCK if num_bytes is None else num_bytes,
        )  # fmt: skip
        assert not any(isinstance(m, PutGranted) for _, m in self.handle(event)), "one answer"
        return self.num_asked

    def bring(self, number: int, run: list[bytes], sums: list[int] | None = None) -> None:
        """All bytes have come."""
        offsets, _ = self.transfer.taken[number]
        count = len(offsets) // len(run)
        for place, offset in enumerate(offsets):
            if offset is not None:
                size, block = BLOCK // count, run[place // count]
                start = place % count * size
                part = bytes_of(block)[start : start + size]
                self.transfer.regions[0].buffer[offset : offset + size] = part
        self.handle(Brought(number=number, sums=sums or [0] * len(offsets)))

    def written(self, number: int) -> list[bytes]:
        granted, offsets = self.transfer.answers[number]
        assert isinstance(granted, PutGranted)
        assert offsets == granted.places.offsets == [], "nothing follows, nothing is left to write"
        return granted.keys

    def over(self, number: int) -> None:
        self.handle(AskEnded(number=number))

    def stored(self, run: list[bytes], writer: WorkerRef = WRITER, **how: object) -> list[bytes]:
        """Bring a run and end the question; return the keys that were written."""
        number = self.offer(run, writer, **how)  # type: ignore[arg-type]
        self.bring(number, run)
        self.over(number)
        return self.written(number)


@pytest.mark.parametrize("per_block", [1, 2])
def test_blocks_that_came_whole_are_readable_and_are_answered(per_block: int) -> None:
    world = World()
    run = keys(1, 2)
    number = world.offer(run, per_block=per_block)
    assert world.inventory == set(), "not before they are whole"
    assert world.node.num_open == 1
    sums = [checksum_of(bytes_of(block), LAYOUT) for block in run]
    given = [
        each for total in sums for each in (total - 5 * (per_block - 1), *[5] * (per_block - 1))
    ]
    world.bring(number, run, [each % 2**64 for each in given])
    assert world.written(number) == run
    assert world.inventory == set(run)
    assert world.node.num_open == 0
    world.over(number)
    pinned = world.pin(READER, run)
    assert pinned.checksums == sums
    for block, offset in zip(run, pinned.places.offsets, strict=True):
        assert world.holds(pinned.places, offset, block)
    assert world.node.counters["bytes_put"] == 2 * BLOCK


def test_a_sum_that_is_not_known_is_left_to_the_node() -> None:
    world = World()
    world.stored(keys(1))
    assert world.pin(READER, keys(1)).checksums == []


def test_what_is_here_already_is_dropped_as_it_comes() -> None:
    world = World()
    world.put(WRITER, keys(2))
    number = world.offer(keys(1, 2, 3, 1))
    offsets, grant = world.transfer.taken[number]
    assert [offset is None for offset in offsets] == [False, True, False, True]
    assert grant
    world.bring(number, keys(1, 2, 3, 1))
    assert world.written(number) == keys(1, 3)
    again = world.offer(keys(1, 2))
    assert world.transfer.taken[again] == ([None, None], 0)
    world.bring(again, keys(1, 2))
    assert world.written(again) == []
    assert world.node.num_open == 0


def test_what_has_no_room_is_dropped_as_it_comes() -> None:
    world = World(num_blocks=2)
    held = world.start(WRITER, keys(8))
    assert world.stored(keys(1, 2)) == keys(1)
    world.end(WRITER, held, written=[], dropped=held.keys)


def test_memory_returns_when_the_connection_ends_before_all_bytes_came() -> None:
    world = World(num_blocks=2)
    number = world.offer(keys(1, 2))
    grant = world.transfer.taken[number][1]
    world.over(number)
    assert world.node.num_open == 0
    assert world.transfer.grants.permit(grant).withdrawn is not None
    assert world.stored(keys(3, 4)) == keys(3, 4), "at once: nothing writes to it any more"
    world.handle(Brought(number=number, sums=[0, 0]))
    assert number not in world.transfer.answers


def test_a_writer_that_is_lost_meanwhile_is_refused_and_its_memory_rests() -> None:
    world = World(num_blocks=2)
    number = world.offer(keys(1, 2))
    world.handle(PeerLost(worker=WRITER))
    assert world.transfer.grants.permit(world.transfer.taken[number][1]).withdrawn is not None
    world.handle(Brought(number=number, sums=[0, 0]))
    assert "taken back" in world.transfer.refusals[number]
    world.over(number)
    assert world.inventory == set()
    assert world.stored(keys(3), READER) == [], "until its fence is passed"
    world.tick(60.0)
    assert world.stored(keys(3), READER) == keys(3)


def test_blocks_given_up_by_a_message_are_not_written() -> None:
    world = World()
    number = world.offer(keys(1, 2), ticket=70)
    world.handle(PutEnd(writer=WRITER, ticket=70, dropped=keys(1)))
    world.bring(number, keys(1, 2))
    assert world.written(number) == keys(2)
    other = world.offer(keys(3), ticket=71)
    world.handle(PutEnd(writer=WRITER, ticket=71, dropped=keys(3)))
    world.bring(other, keys(3))
    assert "taken back" in world.transfer.refusals[other]
    assert world.inventory == set(keys(2))


def test_a_ticket_serves_once_whichever_way_it_comes() -> None:
    world = World()
    number = world.offer(keys(1), ticket=50)
    assert world.transfer.refusals[world.offer(keys(2), ticket=50)] == "the ticket 50 is open"
    world.bring(number, keys(1))
    world.over(number)
    again = world.offer(keys(2), ticket=50)
    world.bring(again, keys(2))
    assert world.written(again) == []
    assert world.answer(
        PutStart(writer=WRITER, ticket=50, keys=keys(3)), PutGranted
    ).keys == []  # fmt: skip


def test_bytes_that_are_no_blocks_and_other_messages_are_refused() -> None:
    world = World()
    for number in (
        world.offer(keys(1), num_bytes=BLOCK - 1),
        world.offer(keys(1, 2), num_bytes=BLOCK),
        world.offer([], num_bytes=BLOCK),
    ):
        assert world.transfer.refusals[number]
        assert number not in world.transfer.taken
    start = PutStart(writer=WRITER, ticket=90, keys=keys(1))
    pin = PinBlocks(reader=WRITER, ticket=91, keys=keys(1))
    for number, (message, num_pieces) in enumerate(((start, 0), (pin, 1)), 900):
        world.handle(Asked(
            number=number, question=encode(message), sender=WORKERS, whence=HERE,
            num_pieces=num_pieces, num_bytes=num_pieces * BLOCK,
        ))  # fmt: skip
        assert "is no question" in world.transfer.refusals[number]
    assert world.node.num_open == 0


def test_a_client_is_refused_what_its_messages_are_refused() -> None:
    world = World()
    mine, theirs = tenant_key(key(1), "me"), tenant_key(key(1), "you")
    sender = client_of("me")
    for number in (
        world.offer([theirs], CLIENT, sender, tenant="me"),
        world.offer([mine], CLIENT, sender, tenant="you"),
        world.offer([mine], WRITER, sender, tenant="me"),
    ):
        assert world.transfer.refusals[number]
        assert number not in world.transfer.taken
    assert world.node.counters["messages_refused"] == 3
    assert world.stored([mine], CLIENT, sender=sender, tenant="me") == [mine]


def test_a_client_is_lent_the_memory_as_long_as_it_is_written() -> None:
    world = World()
    number = world.offer(keys(1), CLIENT, client_of(None))
    [offset] = world.transfer.taken[number][0]
    assert offset is not None
    assert world.transfer.lent[CHANNEL_KEY, offset, True] == 1
    world.bring(number, keys(1))
    assert not +world.transfer.lent


def test_what_a_client_leaves_open_is_taken_back_in_time() -> None:
    world = World(num_blocks=2, put_timeout_s=5.0)
    number = world.offer(keys(1), CLIENT, client_of(None))
    world.tick(6.0)
    assert world.node.num_open == 0
    assert world.transfer.grants.permit(world.transfer.taken[number][1]).withdrawn is not None
    world.handle(Brought(number=number, sums=[0]))
    assert "taken back" in world.transfer.refusals[number]
    world.over(number)


def test_puts_and_offers_share_the_limits_of_a_client_and_the_quota_of_a_tenant() -> None:
    world = World(max_tickets_per_client=2)
    sender = client_of(None)
    first = world.offer(keys(1), CLIENT, sender)
    assert world.start(CLIENT, keys(2)).keys == keys(2)
    assert world.stored(keys(3), CLIENT, sender=sender) == []
    world.bring(first, keys(1))
    world.over(first)
    assert world.stored(keys(3), CLIENT, sender=sender) == keys(3)
    small = World(num_blocks=8, tenant_quota_bytes={"t": 2 * BLOCK})
    assert small.stored(keys(1, 2, 3), tenant="t") == keys(1, 2)


def test_a_removal_in_the_middle_of_a_put_comes_before_it_as_with_messages() -> None:
    world = World()
    number = world.offer(keys(1))
    world.handle(RemoveBlocks(asker=CLIENT, ticket=1, keys=keys(1)))
    by_message = world.start(WRITER, keys(2))
    world.handle(RemoveBlocks(asker=CLIENT, ticket=2, keys=keys(2)))
    world.bring(number, keys(1))
    world.end(WRITER, by_message)
    assert world.inventory == set(keys(1, 2)), "both puts ended after the removals"


def test_a_node_that_drains_takes_nothing() -> None:
    world = World()
    world.handle(Drain())
    assert world.stored(keys(5)) == []
