"""Puts whose blocks follow their question over the data connection, and what becomes of them when
that fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.base import (
    MooncakeError,
    PutEnd,
    PutGranted,
    PutStart,
    SegmentRef,
    TransferError,
    WorkerRef,
)
from mooncake.base.messages import ChainHead
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.client import askable, block_memory
from mooncake.kvstore.client.block_memory import BlockMemory, Ended
from mooncake.kvstore.client.block_writer import BlockWrite, BlockWriter
from mooncake.rpc.codec import decode, encode
from mooncake.transfer.engine import Asked, AskEnded, Brought, Pieces
from tests.support.engine.engine_pair import LAYOUT, PAGES, EnginePair

HERE = WorkerRef("client", "e1", "here")
NODE = WorkerRef("kvstore-0", "e2", "there")
KEYS = [bytes([index]) * 16 for index in range(4)]
BLOCK = LAYOUT.block_bytes
HEAD = ChainHead([b"h" * 16], 1)


class Scene:
    """A writer beside a node that takes blocks behind questions; this test is the node. The first
    put tells the writer so.
    """

    def __init__(self, *, hears: bool = True) -> None:
        pair = self.pair = EnginePair(questions=hears)
        self.writer = BlockWriter(HERE, pair.channel)
        self.memory = BlockMemory.packed(pair.pages, LAYOUT)
        for block in range(4):
            pair.pages.buffer[block * BLOCK : (block + 1) * BLOCK] = bytes([block + 1]) * BLOCK
        self.ended: list[list[bytes] | MooncakeError] = []
        self.filled: list[Sequence[bytes]] = []
        self.transfers: list[int | None] = []
        self.put([0])
        self.grant([])
        self.ended.clear()
        pair.there_inbox.clear()

    def put(self, blocks: Sequence[int], *, answer_by_s: float = 5.0) -> BlockWrite:
        places = self.memory.at([block * BLOCK for block in blocks])

        def offer(peer: SegmentRef, question: bytes, ended: Ended) -> bool:
            number = self.pair.transfers.offer(places, peer, question, answer_by_s, ended)
            self.transfers.append(number)
            return number is not None

        write = BlockWrite(
            store=NODE, keys=[KEYS[block] for block in blocks], timeout_s=9.0,
            answer_by_s=answer_by_s, offer=offer,
            fill=lambda granted, _there, _now: self.filled.append(granted),
            stop=lambda _now: self._stop(),
            ended=lambda answer, _now: self.ended.append(answer),
        )  # fmt: skip
        self.writer.start(write, "tenant", HEAD)
        self.run(0.01)
        return write

    def _stop(self) -> None:
        number = self.transfers[-1]
        assert number is not None
        self.pair.transfers.cancel(number)

    def run(self, seconds: float = 0.6) -> None:
        """Let time pass, enough for a cancelled transfer to end."""
        heap = self.pair.heap
        heap.run_until(heap.now() + seconds)
        self.writer.tick(heap.now())
        heap.run_until(heap.now() + 0.01)

    def grant(self, keys: Sequence[bytes]) -> None:
        """Answer the newest message."""
        start = [m for m in self.pair.there_inbox if isinstance(m, PutStart)][-1]
        message = PutGranted(
            asker=HERE, ticket=start.ticket, store=NODE, keys=list(keys),
            places=self.pair.places(list(range(len(keys)))),
        )  # fmt: skip
        self.writer.on_granted(message, self.pair.heap.now())

    def asked(self) -> tuple[Asked, PutStart]:
        """The newest question."""
        event = [m for m in self.pair.there_inbox if isinstance(m, Asked)][-1]
        message = decode(event.question)
        assert isinstance(message, PutStart)
        return event, message

    def take(self, offsets: list[int | None]) -> Brought:
        event, _ = self.asked()
        self.pair.remote.take(event.number, self.pair.arena, offsets, 0)
        self.run(0.01)
        [brought] = [m for m in self.pair.there_inbox if isinstance(m, Brought)]
        return brought

    def answer(self, keys: Sequence[bytes], *, ticket: int = 0) -> None:
        event, start = self.asked()
        granted = PutGranted(
            asker=HERE, ticket=ticket or start.ticket, store=NODE, keys=list(keys),
            places=self.pair.places([]),
        )  # fmt: skip
        none = Pieces([], BLOCK)
        self.pair.remote.answer(event.number, encode(granted), self.pair.arena, none)
        self.run(0.01)

    @property
    def sent(self) -> list[str]:
        """The kinds of all messages to the node, but for what tells it of questions."""
        kinds = (PutStart, PutEnd)
        return [type(m).__name__ for m in self.pair.there_inbox if isinstance(m, kinds)]


def test_blocks_follow_their_question_and_nothing_else_is_sent() -> None:
    scene = Scene()
    scene.put([0, 1, 2])
    event, start = scene.asked()
    assert (start.keys, start.tenant, start.head) == (KEYS[:3], "tenant", HEAD)
    assert (event.num_pieces, event.num_bytes) == (3, 3 * BLOCK)
    brought = scene.take([BLOCK, None, 0])
    assert brought.sums == [checksum_of(bytes([n + 1]) * BLOCK, LAYOUT) for n in range(3)]
    assert scene.pair.pool_bytes(1) == bytes([1]) * BLOCK
    assert scene.pair.pool_bytes(0) == bytes([3]) * BLOCK
    assert scene.ended == []
    scene.answer([KEYS[0], KEYS[2]])
    assert scene.ended == [[KEYS[0], KEYS[2]]]
    assert scene.sent == []
    assert scene.writer.num_open == 0


def test_layers_that_lie_apart_follow_as_pieces_whose_sums_add_up() -> None:
    scene = Scene()
    memory = BlockMemory.strided(scene.pair.pages, LAYOUT, PAGES.layer_stride)
    scene.memory = memory
    write = BlockWrite(
        store=NODE, keys=KEYS[:2], timeout_s=9.0, answer_by_s=5.0,
        offer=lambda peer, question, ended: scene.pair.transfers.offer(
            memory.at([0, LAYOUT.slice_bytes]), peer, question, 5.0, ended
        ) is not None,
        fill=lambda *_: None, stop=lambda _: None, ended=lambda *_: None,
    )  # fmt: skip
    scene.writer.start(write, "")
    scene.run(0.01)
    event, _ = scene.asked()
    assert event.num_pieces == 2 * LAYOUT.num_layers
    size = LAYOUT.slice_bytes
    sums = scene.take([size * n for n in range(2 * LAYOUT.num_layers)]).sums
    for block in range(2):
        of_block = sums[block * LAYOUT.num_layers : (block + 1) * LAYOUT.num_layers]
        assert sum(of_block) % 2**64 == checksum_of(scene.pair.pool_bytes(block), LAYOUT)


def test_a_node_that_takes_no_such_questions_is_sent_messages() -> None:
    scene = Scene(hears=False)
    scene.put([0])
    assert scene.sent == ["PutStart"]


def test_more_than_may_follow_a_question_goes_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_memory, "MAX_ANSWER_BYTES", 2 * BLOCK)
    scene = Scene()
    scene.put([0, 1])
    assert scene.sent == []
    scene.put([0, 1, 2])
    assert scene.sent == ["PutStart"]


@pytest.mark.parametrize("how", ["refused", "another ticket", "another key", "nonsense"])
def test_a_question_without_a_right_answer_becomes_a_message(how: str) -> None:
    scene = Scene()
    for turn in range(askable.MAX_UNANSWERED + 1):
        write = scene.put([0, 1])
        if turn < askable.MAX_UNANSWERED:
            event, start = scene.asked()
            assert scene.sent == ["PutStart"] * turn
            if how == "refused":
                scene.pair.remote.refuse(event.number, "no")
            elif how == "nonsense":
                none = Pieces([], BLOCK)
                scene.pair.remote.answer(event.number, b"?", scene.pair.arena, none)
            else:
                scene.answer(
                    KEYS[3:] if how == "another key" else [], ticket=99 * (how[8:] == "ticket")
                )
            scene.run(0.05)
            assert write.ticket != start.ticket, "a ticket serves once"
        assert scene.sent == ["PutStart"] * (turn + 1), "after some turns it is not asked at all"
        newest = [m for m in scene.pair.there_inbox if isinstance(m, PutStart)][-1]
        assert (newest.keys, newest.tenant, newest.head) == (KEYS[:2], "tenant", HEAD)
    assert scene.ended == []
    scene.grant(KEYS[:2])
    assert scene.filled == [KEYS[:2]]


def test_a_node_that_does_not_answer_is_given_up_in_the_time_of_one_put() -> None:
    scene = Scene()
    scene.put([0], answer_by_s=scene.pair.heap.now() + 2.0)
    scene.run(2.5)
    scene.run()
    [error] = scene.ended
    assert isinstance(error, TransferError)
    assert "does not answer" in error.message
    assert scene.writer.num_open == 0
    assert scene.pair.heap.now() < 4.0


def test_a_lost_node_ends_a_put_without_a_message() -> None:
    scene = Scene()
    scene.put([0])
    scene.writer.on_peer_lost(NODE, scene.pair.heap.now())
    assert scene.ended == [], "bytes may be on their way"
    scene.run()
    assert [type(each) for each in scene.ended] == [TransferError]
    assert scene.sent == []
    assert scene.writer.num_open == 0
    scene.put([0])
    assert scene.sent == ["PutStart"], "another boot is not asked before it has granted something"


def test_a_grant_by_a_message_changes_nothing_while_blocks_follow_their_question() -> None:
    """A node repeats what is open for long."""
    scene = Scene()
    write = scene.put([0])
    message = PutGranted(
        asker=HERE, ticket=write.ticket, store=NODE, keys=KEYS[:1], places=scene.pair.places([0])
    )
    scene.writer.on_granted(message, scene.pair.heap.now())
    scene.writer.on_refused(write.ticket, TransferError("no"), scene.pair.heap.now())
    assert (scene.filled, scene.ended, scene.sent) == ([], [], [])
    scene.take([0])
    scene.answer(KEYS[:1])
    assert scene.ended == [KEYS[:1]]
    assert [type(m) for m in scene.pair.there_inbox if isinstance(m, AskEnded)] == [AskEnded]
