"""What `BlockReader` does beyond what the tests of fetches and of pool clients see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.base import PinBlocks, PinGranted, TransferError, Unpin, WorkerRef
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.client import block_memory, block_reader
from mooncake.kvstore.client.block_memory import BlockMemory
from mooncake.kvstore.client.block_reader import BlockReader, ReadResult
from mooncake.rpc.codec import decode, encode
from mooncake.transfer.engine import Asked, Pieces
from tests.support.engine.engine_pair import LAYOUT, EnginePair

HERE = WorkerRef("client", "e1", "here")
STORE = WorkerRef("", "", "there")
"""Known by its address only."""
NODE = WorkerRef("kvstore-0", "e2", "there")
KEYS = [bytes([index]) * 16 for index in range(4)]


class Scene:
    """One read of four blocks, each of which holds its number."""

    def __init__(self, answer_by_s: float = float("inf")) -> None:
        pair = self.pair = EnginePair()
        self.reader = BlockReader(HERE, pair.channel, pair.transfers, verify=True)
        self.memory = BlockMemory.packed(pair.pages, LAYOUT)
        self.blocks = [pair.fill_pool(block, block) for block in range(4)]
        self.ended: list[ReadResult] = []
        places = self.memory.at([block * LAYOUT.block_bytes for block in range(4)])
        self.reader.start(
            STORE, KEYS, places, 5.0, lambda result, _now: self.ended.append(result),
            answer_by_s=answer_by_s,
        )  # fmt: skip

    def grant(
        self,
        ticket: int,
        blocks: Sequence[int],
        *,
        more: bool = False,
        from_ssd: int = 0,
        from_object: int = 0,
    ) -> None:
        checksums = [checksum_of(self.blocks[block], LAYOUT) for block in blocks]
        message = PinGranted(
            asker=HERE, ticket=ticket, store=NODE, num_blocks=len(blocks),
            places=self.pair.places(list(blocks)), checksums=checksums, more=more,
            num_from_ssd=from_ssd, num_from_object=from_object,
        )  # fmt: skip
        self.reader.on_granted(message, self.pair.heap.now())
        self.run()

    def run(self) -> None:
        self.pair.run()
        while self.reader.tick(self.pair.heap.now()) == self.pair.heap.now():
            pass
        self.pair.run()

    @property
    def unpinned(self) -> list[int]:
        return [m.ticket for m in self.pair.there_inbox if isinstance(m, Unpin)]


def test_a_result_has_the_checksums_of_all_pieces_and_what_moved() -> None:
    scene = Scene()
    scene.grant(1, [0, 1, 2], more=True, from_ssd=1, from_object=2)
    scene.grant(2, [3], from_ssd=1)
    [result] = scene.ended
    assert (result.num_from_ssd, result.num_from_object) == (2, 2)
    assert result.checksums == [checksum_of(block, LAYOUT) for block in scene.blocks]
    assert (result.num_blocks, result.error) == (4, None)
    assert result.carried.num_bytes == 4 * LAYOUT.block_bytes
    assert result.carried.seconds > 0
    assert scene.unpinned == [1, 2]


def test_a_later_piece_names_the_blocks_before_it() -> None:
    scene = Scene()
    scene.grant(1, [0, 1], more=True)
    [_, pin] = [m for m in scene.pair.there_inbox if isinstance(m, PinBlocks)]
    assert (pin.keys, pin.head.keys, pin.head.num_counted) == (KEYS[2:], KEYS[:2], 2)


def test_only_the_first_answer_is_waited_for_less_long() -> None:
    scene = Scene(answer_by_s=1.0)
    assert scene.reader.tick(0.0) == 1.0
    scene.grant(1, [0], more=True)
    assert scene.reader.tick(2.0) == 5.0
    scene.reader.tick(5.0)
    assert [(result.num_blocks, type(result.error)) for result in scene.ended] == [
        (1, TransferError)
    ]


def test_a_device_that_fails_while_blocks_are_verified_ends_the_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    checksum = BlockMemory.checksum

    def failing(memory: BlockMemory, offset: int) -> int:
        if offset:
            raise TransferError("the device is gone")
        return checksum(memory, offset)

    monkeypatch.setattr(BlockMemory, "checksum", failing)
    scene.grant(1, [0, 1, 2, 3])
    [result] = scene.ended
    assert (result.num_blocks, str(result.error)) == (1, "the device is gone")
    assert scene.unpinned == [1]
    assert scene.reader.num_open == 0


def test_a_node_known_by_its_address_is_lost_in_any_boot() -> None:
    scene = Scene()
    scene.reader.on_peer_lost(WorkerRef("kvstore-1", "e3", "elsewhere"), 0.0)
    assert scene.ended == []
    scene.reader.on_peer_lost(NODE, 0.0)
    assert [result.num_blocks for result in scene.ended] == [0]


def test_a_node_that_is_lost_after_the_bytes_came_changes_nothing() -> None:
    scene = Scene()
    message = PinGranted(
        asker=HERE, ticket=1, store=NODE, num_blocks=1, places=scene.pair.places([0]),
        checksums=[checksum_of(scene.blocks[0], LAYOUT)],
    )  # fmt: skip
    scene.reader.on_granted(message, 0.0)
    scene.pair.run()
    scene.reader.on_peer_lost(NODE, scene.pair.heap.now())
    scene.run()
    assert [result.num_blocks for result in scene.ended] == [1]


# ---------------------------------------------------------------- questions


class Asking:
    """A reader beside a node that takes questions; this test is the node. The first read tells the
    reader so.
    """

    def __init__(self, *, hears: bool = True) -> None:
        pair = self.pair = EnginePair(questions=hears)
        self.reader = BlockReader(HERE, pair.channel, pair.transfers, verify=True)
        self.memory = BlockMemory.packed(pair.pages, LAYOUT)
        self.blocks = [pair.fill_pool(block, block) for block in range(4)]
        self.ended: list[ReadResult] = []
        self.read([0])
        pin = self.pin()
        message = PinGranted(
            asker=HERE, ticket=pin.ticket, store=NODE, num_blocks=1, places=pair.places([0]),
        )  # fmt: skip
        self.reader.on_granted(message, 0.0)
        self.run()
        self.ended.clear()
        pair.there_inbox.clear()

    def read(self, blocks: Sequence[int], **limits: float) -> int:
        places = self.memory.at([block * LAYOUT.block_bytes for block in blocks])
        number = self.reader.start(
            STORE, [KEYS[block] for block in blocks], places, limits.pop("deadline_s", 5.0),
            lambda result, _now: self.ended.append(result), **limits,
        )  # fmt: skip
        self.pair.heap.run_until(self.pair.heap.now() + 0.01)
        return number

    def run(self, seconds: float = 0.6) -> None:
        """Let time pass, enough for a cancelled transfer to end."""
        heap = self.pair.heap
        heap.run_until(heap.now() + seconds)
        while self.reader.tick(heap.now()) == heap.now():
            pass
        heap.run_until(heap.now() + 0.01)
        self.reader.check_integrity()

    def pin(self) -> PinBlocks:
        """The newest pin that came by a message."""
        return [m for m in self.pair.there_inbox if isinstance(m, PinBlocks)][-1]

    def asked(self) -> tuple[int, PinBlocks]:
        """The newest question, with its number."""
        event = [m for m in self.pair.there_inbox if isinstance(m, Asked)][-1]
        message = decode(event.question)
        assert isinstance(message, PinBlocks)
        return event.number, message

    def answer(self, blocks: Sequence[int], *, ticket: int = 0, claimed: int = 0) -> None:
        number, pin = self.asked()
        granted = PinGranted(
            asker=HERE, ticket=ticket or pin.ticket, store=NODE,
            num_blocks=claimed or len(blocks), places=self.pair.places(list(blocks)),
            more=len(blocks) < len(pin.keys),
            checksums=[checksum_of(self.blocks[block], LAYOUT) for block in blocks],
        )  # fmt: skip
        pieces = Pieces([block * LAYOUT.block_bytes for block in blocks], LAYOUT.block_bytes)
        self.pair.remote.answer(number, encode(granted), self.pair.arena, pieces)
        self.run()

    @property
    def sent(self) -> list[str]:
        """The kinds of all messages to the node, but for what tells it of questions."""
        kinds = (PinBlocks, Unpin)
        return [type(m).__name__ for m in self.pair.there_inbox if isinstance(m, kinds)]


def test_a_run_comes_behind_its_answer_without_a_message() -> None:
    scene = Asking()
    scene.read([0, 1, 2])
    assert scene.asked()[1].keys == KEYS[:3]
    scene.answer([0, 1, 2])
    [result] = scene.ended
    assert (result.num_blocks, result.error) == (3, None)
    assert result.carried.num_bytes == 3 * LAYOUT.block_bytes
    assert result.checksums == [checksum_of(block, LAYOUT) for block in scene.blocks[:3]]
    assert scene.sent == []
    came = bytes(scene.pair.pages.buffer[: 3 * LAYOUT.block_bytes])
    assert came == b"".join(scene.blocks[:3])


def test_a_node_that_takes_no_questions_is_sent_pins() -> None:
    scene = Asking(hears=False)
    scene.read([0])
    assert scene.sent == ["PinBlocks"]


@pytest.mark.parametrize("came", [0, 2])
def test_what_an_answer_lacks_is_pinned(came: int) -> None:
    scene = Asking()
    scene.read([0, 1, 2, 3])
    scene.answer(range(came))
    assert scene.sent == ["PinBlocks"]
    pin = scene.pin()
    assert (pin.keys, pin.head.keys) == (KEYS[came:], KEYS[:came])
    assert pin.ticket != scene.asked()[1].ticket
    scene.reader.on_granted(
        PinGranted(
            asker=HERE, ticket=pin.ticket, store=NODE, num_blocks=0,
            places=scene.pair.places([]),
        ),
        0.0,
    )  # fmt: skip
    assert [result.num_blocks for result in scene.ended] == [came]


@pytest.mark.parametrize("how", ["refused", "another ticket", "too much claimed", "nonsense"])
def test_a_question_without_a_right_answer_becomes_a_pin(how: str) -> None:
    scene = Asking()
    scene.read([0, 1])
    number, _ = scene.asked()
    if how == "refused":
        scene.pair.remote.refuse(number, "no")
    elif how == "nonsense":
        scene.pair.remote.answer(number, b"?", scene.pair.arena, Pieces([0], LAYOUT.block_bytes))
    else:
        scene.answer([0], ticket=99 * (how == "another ticket"), claimed=2)
    scene.run()
    assert scene.pin().keys == KEYS[:2]
    assert scene.ended == []
    for turn in range(2, 5):
        assert scene.sent == ["PinBlocks"] * (turn - 1)
        scene.read([0])
        number, _ = scene.asked()
        scene.pair.remote.refuse(number, "no")
        scene.run()
    assert len({m.number for m in scene.pair.there_inbox if isinstance(m, Asked)}) == 3
    assert scene.sent == ["PinBlocks"] * 4, "three questions without an answer are enough"


def test_questions_that_break_together_count_once() -> None:
    """One broken connection ends all of them, and the next question may well be answered."""
    scene = Asking()
    for _ in range(block_reader.MAX_UNANSWERED):
        scene.read([0])
    for number in {m.number for m in scene.pair.there_inbox if isinstance(m, Asked)}:
        scene.pair.remote.refuse(number, "the connection broke")
    scene.run()
    scene.pair.there_inbox.clear()
    scene.read([0])
    assert scene.sent == []
    scene.answer([0])
    assert [result.num_blocks for result in scene.ended] == [1]


def test_a_damaged_block_is_reported() -> None:
    scene = Asking()
    scene.read([0, 1])
    scene.blocks[1] = bytes(LAYOUT.block_bytes)
    scene.answer([0, 1])
    assert [result.num_blocks for result in scene.ended] == [1]
    [unpin] = [m for m in scene.pair.there_inbox if isinstance(m, Unpin)]
    assert unpin.corrupt == [KEYS[1]]


def test_a_read_that_is_cancelled_while_it_asks_ends_without_a_pin() -> None:
    scene = Asking()
    number = scene.read([0])
    scene.reader.cancel(number, scene.pair.heap.now())
    scene.run()
    assert [type(result.error) for result in scene.ended] == [TransferError]
    scene.answer([0])
    assert len(scene.ended) == 1
    assert scene.sent == []


def test_a_lost_node_ends_a_question() -> None:
    scene = Asking()
    scene.read([0])
    scene.reader.on_peer_lost(NODE, scene.pair.heap.now())
    scene.run()
    assert [result.num_blocks for result in scene.ended] == [0]
    scene.read([0])
    assert scene.sent == ["PinBlocks"], "its next boot is asked once it has granted something"


def test_a_silent_node_is_given_up_as_one_that_is_sent_a_pin() -> None:
    scene = Asking()
    scene.read([0], answer_by_s=scene.pair.heap.now() + 1.0)
    scene.run(1.0)
    [result] = scene.ended
    assert str(result.error) == "the pool node at there does not answer"


def test_a_long_run_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_memory, "MAX_ANSWER_BYTES", 2 * LAYOUT.block_bytes)
    scene = Asking()
    scene.read([0, 1, 2])
    assert scene.sent == ["PinBlocks"]
    monkeypatch.setattr(block_reader, "MAX_QUESTION_BYTES", 50)
    scene.read([0])
    assert scene.sent == ["PinBlocks"] * 2
