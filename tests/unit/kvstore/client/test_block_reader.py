"""What `BlockReader` does beyond what the tests of fetches and of pool clients see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.base import PinBlocks, PinGranted, TransferError, Unpin, WorkerRef
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.client.block_memory import BlockMemory
from mooncake.kvstore.client.block_reader import BlockReader, ReadResult
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
        self, ticket: int, blocks: Sequence[int], *, more: bool = False, from_ssd: int = 0
    ) -> None:
        checksums = [checksum_of(self.blocks[block], LAYOUT) for block in blocks]
        message = PinGranted(
            asker=HERE, ticket=ticket, store=NODE, num_blocks=len(blocks),
            places=self.pair.places(list(blocks)), checksums=checksums, more=more,
            num_from_ssd=from_ssd,
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
    scene.grant(1, [0, 1, 2], more=True, from_ssd=1)
    scene.grant(2, [3], from_ssd=1)
    [result] = scene.ended
    assert result.num_from_ssd == 2
    assert result.checksums == [checksum_of(block, LAYOUT) for block in scene.blocks]
    assert (result.num_blocks, result.error) == (4, None)
    assert result.num_bytes == 4 * LAYOUT.block_bytes
    assert result.seconds > 0
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
