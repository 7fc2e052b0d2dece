"""A node that is asked for blocks over the data connection: it pins them, has them sent behind the
answer, and unpins them when the question has ended.
"""

from __future__ import annotations

import msgspec
import pytest

from mooncake.base import (
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Tier,
    Unpin,
    WorkerRef,
)
from mooncake.base.pool_messages import (
    AnyMessage,
    AskPool,
    BlocksFound,
    DescribeBlocks,
    FindBlocks,
    PoolState,
)
from mooncake.base.rights import MAX_NAME_CHARS, CredentialRole, Sender, tenant_key
from mooncake.kvstore.node.long_work import PIECE_KEYS
from mooncake.rpc.codec import encode
from mooncake.sim.world.disk import SimMedium
from mooncake.transfer.engine import (
    MAX_ANSWER_BYTES,
    MAX_ANSWER_PIECES,
    MAX_QUESTION_BYTES,
    Asked,
    AskEnded,
    AskerLeft,
)
from tests.support.kvstore.node_world import BLOCK, NodeWorld, key, keys, worker
from tests.support.kvstore.senders import CHANNEL_KEY, CLIENT, HERE, WORKERS, client_of

WRITER, READER = worker("prefill-0"), worker("decode-0")


class World(NodeWorld):
    """A node that is asked."""

    num_asked = 0

    def ask(
        self,
        wanted: list[bytes],
        reader: WorkerRef = READER,
        sender: Sender = WORKERS,
        ticket: int | None = None,
    ) -> int:
        """Ask for a run; return the number of the question."""
        ticket = self.ticket() if ticket is None else ticket
        return self.bring(encode(PinBlocks(reader=reader, ticket=ticket, keys=wanted)), sender)

    def bring(
        self,
        question: bytes,
        sender: Sender = WORKERS,
        piece_bytes: int = BLOCK,
        asker: int = 1,
    ) -> int:
        self.num_asked += 1
        event = Asked(
            number=self.num_asked, question=question, piece_bytes=piece_bytes, sender=sender,
            whence=HERE, asker=asker,
        )  # fmt: skip
        assert not any(isinstance(m, PinGranted) for _, m in self.handle(event)), "one answer"
        return self.num_asked

    def told(self, number: int) -> tuple[PinGranted, list[int]]:
        granted, offsets = self.transfer.answers[number]
        assert isinstance(granted, PinGranted)
        return granted, offsets

    def over(self, number: int) -> None:
        self.handle(AskEnded(number=number))


def test_blocks_are_pinned_until_the_question_has_ended() -> None:
    world = World(num_blocks=3)
    world.put(WRITER, keys(1, 2))
    number = world.ask(keys(1, 2, 3))
    granted, offsets = world.told(number)
    assert (granted.num_blocks, granted.more, granted.asker) == (2, True, READER)
    assert offsets == granted.places.offsets
    for block, offset in zip(keys(1, 2), offsets, strict=True):
        assert world.holds(granted.places, offset, block)
    assert world.node.num_open == 1
    assert len(world.put(WRITER, keys(4, 5, 6))) == 1, "they are not evicted meanwhile"
    world.over(number)
    assert world.node.num_open == 0
    assert world.put(WRITER, keys(7, 8)) == keys(7, 8)


def test_a_block_that_is_not_there_may_be_asked_for_by_a_message() -> None:
    """Which counts as a miss, and not the question."""
    world = World()
    number = world.ask(keys(1))
    granted, offsets = world.told(number)
    assert (granted.num_blocks, granted.more, offsets) == (0, True, [])
    assert world.node.counters["blocks_missed"] == 0
    assert world.node.num_open == 0
    world.over(number)
    world.over(number)
    assert world.node.num_open == 0


def test_blocks_on_a_disk_are_asked_for_by_a_message() -> None:
    world = World(num_blocks=4, media=[SimMedium()], ssd_write_at=0.0, ssd_min_uses=1)
    world.put(WRITER, keys(1, 2))
    world.tick(1.0)
    assert world.on_ssd == {key(1), key(2)}
    world.boot()
    world.tick(2.0)
    assert world.on_ssd == {key(1), key(2)}
    granted, _ = world.told(world.ask(keys(1, 2)))
    assert (granted.num_blocks, granted.more) == (0, True)
    assert world.node.counters["blocks_missed"] == 0
    pinned = world.pin_soon(READER, keys(1))
    assert pinned.num_blocks == 1
    granted, _ = world.told(world.ask(keys(1, 2)))
    assert (granted.num_blocks, granted.more) == (1, True)


def test_no_more_is_sent_than_one_answer_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.kvstore.node.sessions.MAX_ANSWER_BYTES", 2 * BLOCK + 1)
    assert MAX_ANSWER_BYTES > BLOCK
    world = World()
    world.put(WRITER, keys(1, 2, 3))
    granted, offsets = world.told(world.ask(keys(1, 2, 3)))
    assert (granted.num_blocks, granted.more, len(offsets)) == (2, True, 2)


def test_a_client_is_lent_the_blocks_as_long_as_they_are_sent() -> None:
    world = World()
    world.put(WRITER, keys(1))
    number = world.ask(keys(1), CLIENT, client_of(None))
    [offset] = world.told(number)[1]
    assert world.transfer.lent[CHANNEL_KEY, offset, False] == 1
    world.over(number)
    assert not +world.transfer.lent


def test_a_client_is_refused_what_its_messages_are_refused() -> None:
    world = World()
    mine, theirs = tenant_key(key(1), "me"), tenant_key(key(1), "you")
    world.put(WRITER, [mine, theirs])
    sender = client_of("me")
    assert world.told(world.ask([mine], CLIENT, sender))[0].num_blocks == 1
    for number in (
        world.ask([theirs], CLIENT, sender),
        world.ask([mine], READER, sender),
        world.bring(encode(DescribeBlocks(asker=CLIENT, ticket=9, keys=[mine])), sender),
        world.bring(encode(FindBlocks(asker=CLIENT, ticket=9, keys=[mine]))),
        world.bring(b"no message of any kind that I know", sender),
        world.bring(encode(PinBlocks(reader=CLIENT, ticket=9, keys=[]))[:-3], sender),
    ):
        assert number not in world.transfer.answers
        assert world.transfer.refusals[number]
    operator = Sender(
        name="o", roles=frozenset((CredentialRole.OPERATOR,)), tenant=None, channel_key=CHANNEL_KEY
    )
    assert "may not send PinBlocks" in world.transfer.refusals[world.ask([mine], CLIENT, operator)]
    assert world.node.num_open == 1


def test_a_question_beyond_a_credential_is_counted_and_written_down_as_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[tuple[str, object, object]] = []
    monkeypatch.setattr(
        "mooncake.kvstore.node.questions.audit",
        lambda event, **facts: lines.append((event, facts["who"], facts["whence"])),
    )
    world = World()
    world.ask([tenant_key(key(1), "you")], CLIENT, client_of("me"))
    assert lines == [("message_refused", "c", HERE)]
    state = world.answer(AskPool(asker=READER, ticket=5), PoolState)
    assert state.load.counters["messages_refused"] == 1
    world.ask(keys(1), ticket=50)
    world.ask(keys(1), ticket=50)
    assert len(lines) == 1


def test_a_ticket_serves_once_whichever_way_it_comes() -> None:
    world = World()
    world.put(WRITER, keys(1))
    number = world.ask(keys(1), ticket=50)
    again = world.ask(keys(1), ticket=50)
    assert world.transfer.refusals[again] == "the ticket 50 is open"
    world.over(again)
    assert world.node.num_open == 1, "the first one is still being sent"
    world.over(number)
    assert world.told(world.ask(keys(1), ticket=50))[0].num_blocks == 0
    world.handle(PinBlocks(reader=READER, ticket=51, keys=keys(1)))
    assert world.transfer.refusals[world.ask(keys(1), ticket=51)]
    assert world.node.num_open == 1


@pytest.mark.parametrize("ends", [PeerLost(worker=READER), Unpin(reader=READER, ticket=60)])
def test_what_ends_a_pin_ends_one_that_is_being_sent(ends: msgspec.Struct) -> None:
    world = World()
    world.put(WRITER, keys(1))
    number = world.ask(keys(1), ticket=60)
    world.handle(ends)
    assert world.node.num_open == 0
    world.over(number)
    assert world.node.num_open == 0
    assert world.told(world.ask(keys(1), ticket=60))[0].num_blocks == 0


def test_pins_and_questions_share_the_limits_of_a_client() -> None:
    world = World(max_tickets_per_client=2)
    world.put(WRITER, keys(1))
    sender = client_of(None)
    first = world.ask(keys(1), CLIENT, sender)
    assert world.pin(CLIENT, keys(1)).num_blocks == 1
    assert world.told(world.ask(keys(1), CLIENT, sender))[0].num_blocks == 0
    world.over(first)
    assert world.told(world.ask(keys(1), CLIENT, sender))[0].num_blocks == 1


def test_hits_are_counted_and_used_blocks_stay_longest() -> None:
    world = World(num_blocks=3)
    for number in (1, 2, 3):
        world.put(WRITER, keys(number))
    world.over(world.ask(keys(1)))
    assert (world.node.counters["blocks_hit"], world.node.counters["pins"]) == (1, 1)
    world.put(WRITER, keys(4))
    assert key(1) in world.inventory


HERE_ALONE = WorkerRef(CLIENT.worker_id, "e1", f"#{CHANNEL_KEY}")
"""A client that listens nowhere: answers go back on its data connection."""


class Telling(World):
    """A node that such a client asks in place of sending messages."""

    def tell(self, message: AnyMessage, asker: int = 1) -> object:
        """Return the answer, which comes on the data connection and nowhere else."""
        number = self.bring(encode(message), client_of(None), piece_bytes=0, asker=asker)
        assert not any(address.startswith("#") for address, _ in self.channel.sent)
        answer, offsets = self.transfer.answers[number]
        assert offsets == []
        self.over(number)
        return answer


def test_a_client_without_an_address_puts_finds_and_pins() -> None:
    world, me = Telling(), HERE_ALONE
    granted = world.tell(PutStart(writer=me, ticket=1, keys=keys(1, 2)))
    assert isinstance(granted, PutGranted)
    assert granted.keys == keys(1, 2)
    assert world.tell(FindBlocks(asker=me, ticket=2, keys=keys(1))) == BlocksFound(
        asker=me, ticket=2, store=granted.store, tiers=[None]
    )
    assert world.tell(PutEnd(writer=me, ticket=1, written=keys(1), dropped=keys(2))) is None
    found = world.tell(FindBlocks(asker=me, ticket=3, keys=keys(1, 2)))
    assert isinstance(found, BlocksFound)
    assert found.tiers == [Tier.DRAM, None]
    for asker in (1, 2):  # the first connection may hang, with the answer
        pinned = world.tell(PinBlocks(reader=me, ticket=4, keys=keys(1)), asker)
        assert isinstance(pinned, PinGranted)
        assert (pinned.num_blocks, world.node.num_open) == (1, 1)
    assert world.transfer.lent[CHANNEL_KEY, pinned.places.offsets[0], False] == 1
    assert world.tell(Unpin(reader=me, ticket=4)) is None
    assert world.node.num_open == 0
    assert not +world.transfer.lent


def test_a_grant_that_is_repeated_to_nobody_is_dropped() -> None:
    world = Telling()
    world.tell(PutStart(writer=HERE_ALONE, ticket=1, keys=keys(1)))
    for second in range(1, 30):
        world.tick(float(second))
    assert world.node.num_open == 1
    assert not any(isinstance(message, PutGranted) for _, message in world.channel.sent)
    world.handle(PeerLost(worker=HERE_ALONE))
    assert world.node.num_open == 0


def test_what_a_client_without_an_address_has_ends_with_its_last_connection() -> None:
    """Memory that it may still have written to rests. It may go on by another connection."""
    world, me = Telling(num_blocks=4), HERE_ALONE
    world.put(WRITER, keys(1))
    other = WorkerRef(me.worker_id, "e2", me.address)
    world.tell(PinBlocks(reader=me, ticket=1, keys=keys(1)), asker=7)
    world.tell(PutStart(writer=me, ticket=2, keys=keys(2)), asker=8)
    world.tell(PutStart(writer=other, ticket=1, keys=keys(3)), asker=7)
    world.handle(AskerLeft(asker=7))
    assert world.node.num_open == 2, "one ended with its only connection"
    world.handle(AskerLeft(asker=9))
    assert world.node.num_open == 2
    world.handle(AskerLeft(asker=8))
    assert world.node.num_open == 0
    assert not +world.transfer.lent
    counters = world.node.counters
    assert (counters["pins_reclaimed"], counters["grants_reclaimed"]) == (1, 2)
    assert counters["blocks_quarantined"] == 2
    for message in (
        PutStart(writer=me, ticket=2, keys=keys(2)),
        PinBlocks(reader=me, ticket=1, keys=keys(1)),
    ):
        answer = world.tell(message, asker=10)
        assert isinstance(answer, PutGranted | PinGranted)
        assert not answer.places.offsets, "these tickets are over"
    assert world.tell(PutEnd(writer=me, ticket=2, written=keys(2)), asker=10) is None
    assert not world.node.stores(key(2))
    granted = world.tell(PutStart(writer=me, ticket=3, keys=keys(2)), asker=10)
    assert isinstance(granted, PutGranted)
    assert granted.keys == keys(2)


def test_a_pin_that_waits_for_a_disk_ends_with_its_connection() -> None:
    world = Telling(num_blocks=4, media=[SimMedium()], ssd_write_at=0.0, ssd_min_uses=1)
    world.put(WRITER, keys(1))
    world.tick(1.0)
    world.boot()
    world.tick(2.0)
    pin = PinBlocks(reader=HERE_ALONE, ticket=1, keys=keys(1))
    number = world.bring(encode(pin), client_of(None), piece_bytes=0)
    assert world.node.num_open == 1
    world.over(number)
    world.handle(AskerLeft(asker=1))
    assert world.node.num_open == 0
    world.tick(3.0)
    assert world.node.num_open == 0


def test_a_client_with_an_address_outlives_its_data_connections() -> None:
    """It tells gateways that it lives, and they tell the node when it does not."""
    world = Telling(num_blocks=4)
    world.tell(PutStart(writer=CLIENT, ticket=2, keys=keys(2)), asker=7)
    world.handle(AskerLeft(asker=7))
    assert world.node.num_open == 1


def test_a_question_waits_for_a_disk_and_its_pin_ends_with_its_connection() -> None:
    world = Telling(num_blocks=4, media=[SimMedium()], ssd_write_at=0.0, ssd_min_uses=1)
    world.put(WRITER, keys(1, 2))
    world.tick(1.0)
    world.boot()
    world.tick(2.0)
    sender = client_of(None)
    pin = [PinBlocks(reader=HERE_ALONE, ticket=ticket, keys=keys(ticket)) for ticket in (1, 2)]
    waiting, leaving = [world.bring(encode(each), sender, piece_bytes=0) for each in pin]
    again = world.bring(encode(pin[0]), sender, piece_bytes=0)
    assert world.transfer.refusals[again] == "the ticket 1 is open"
    assert not world.transfer.answers
    assert world.node.num_open == 2
    world.over(leaving)
    assert world.node.num_open == 1
    world.tick(3.0)
    assert world.told(waiting)[0].num_blocks == 1
    assert leaving not in world.transfer.answers


def test_a_question_names_no_more_blocks_than_an_answer_holds() -> None:
    world, sender = Telling(), client_of(None)
    asked = PutStart(writer=HERE_ALONE, ticket=1, keys=keys(*range(MAX_ANSWER_PIECES + 1)))
    number = world.bring(encode(asked), sender, piece_bytes=0)
    assert "names 1025 blocks, more than 1024" in world.transfer.refusals[number]
    answer = world.tell(PutStart(writer=HERE_ALONE, ticket=2, keys=asked.keys[1:]))
    assert isinstance(answer, PutGranted)
    assert len(encode(answer)) < MAX_QUESTION_BYTES
    longest = PinGranted(
        asker=HERE_ALONE, ticket=2**63, store=answer.store, num_blocks=MAX_ANSWER_PIECES,
        places=msgspec.structs.replace(
            answer.places, offsets=[2**63] * MAX_ANSWER_PIECES, grant=2**63
        ),
        checksums=[2**64 - 1] * MAX_ANSWER_PIECES,
    )  # fmt: skip
    assert len(encode(longest)) < MAX_QUESTION_BYTES - MAX_NAME_CHARS


def test_no_question_is_long_work() -> None:
    """A node refuses long work by a message of the control channel, where no asker would see it."""
    assert MAX_ANSWER_PIECES <= PIECE_KEYS
