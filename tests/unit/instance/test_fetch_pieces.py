"""A run that its owner brings up from disks in pieces: asked for again until it is here, as long as
a fetch may take; what has arrived counts whatever comes after.
"""

from __future__ import annotations

import pytest

from mooncake.base import PinBlocks, PinGranted
from mooncake.kvstore.block_checksum import checksum_of
from tests.support.engine.engine_pair import LAYOUT
from tests.unit.instance.test_fetch import HERE, KEYS, STORE, Scene


class Pieces(Scene):
    """An owner that has four blocks and gives them in pieces; its block n holds n + 1."""

    def __init__(self, *, verify: bool = False) -> None:
        super().__init__(verify=verify)
        self.blocks = [self.engine_pair.fill_pool(block, block + 1) for block in range(4)]
        self.pages = self.start(4)

    def give(self, ticket: int, blocks: list[int], *, more: bool, damaged: bool = False) -> None:
        checksums = [checksum_of(self.blocks[block], LAYOUT) + damaged for block in blocks]
        message = PinGranted(
            asker=HERE, ticket=ticket, store=STORE, num_blocks=len(blocks),
            places=self.engine_pair.places(blocks),
            checksums=checksums, more=more,
        )  # fmt: skip
        self.reader.on_granted(message, self.engine_pair.heap.now())

    def run(self) -> None:
        self.engine_pair.run()
        while self.reader.tick(self.engine_pair.heap.now()) == self.engine_pair.heap.now():
            pass
        self.engine_pair.run()

    @property
    def asked(self) -> list[tuple[int, list[bytes]]]:
        pins = [m for m in self.engine_pair.there_inbox if isinstance(m, PinBlocks)]
        return [(pin.ticket, pin.keys) for pin in pins]


@pytest.mark.parametrize("verify", [False, True])
def test_a_run_arrives_piece_by_piece_as_one_fetch(verify: bool) -> None:
    scene = Pieces(verify=verify)
    scene.give(1, [0, 1], more=True)
    scene.run()
    assert scene.asked == [(1, KEYS), (2, KEYS[2:])]
    assert scene.ended == []
    assert scene.unpinned == [1]
    scene.give(2, [2], more=True)
    scene.run()
    scene.give(3, [3], more=False)
    scene.run()
    assert scene.ended == [4]
    assert scene.unpinned == [1, 2, 3]
    assert [scene.engine_pair.page_bytes(page) for page in scene.pages] == scene.blocks
    assert scene.reader.num_open == 0


def test_a_piece_is_given_back_before_the_next_is_asked_for() -> None:
    scene = Pieces()
    scene.give(1, [0, 1], more=True)
    scene.run()
    kinds = [type(message).__name__ for message in scene.engine_pair.there_inbox]
    assert kinds == ["PinBlocks", "Unpin", "PinBlocks"]


def test_what_came_before_a_piece_that_fails_counts() -> None:
    scene = Pieces()
    scene.give(1, [0, 1], more=True)
    scene.run()
    scene.give(2, [2, 3], more=False)
    scene.engine_pair.network.detach("there")
    scene.run()
    assert scene.ended == [2]


def test_a_damaged_block_ends_the_fetch_whatever_more_there_is() -> None:
    scene = Pieces(verify=True)
    scene.give(1, [0], more=True)
    scene.run()
    scene.give(2, [1, 2], more=True, damaged=True)
    scene.run()
    assert scene.ended == [1]
    assert scene.asked[1:] == [(2, KEYS[1:])]
    assert scene.reader.num_corrupt == 1


def test_a_miss_after_a_piece_ends_the_fetch() -> None:
    scene = Pieces()
    scene.give(1, [0, 1, 2], more=True)
    scene.run()
    scene.give(2, [], more=True)
    assert scene.ended == [3]


def test_all_pieces_together_have_the_time_of_one_fetch() -> None:
    scene = Pieces()
    scene.give(1, [0, 1], more=True)
    scene.run()
    scene.reader.tick(5.0)
    assert scene.ended == [2], "the owner was silent until the time was up"


@pytest.mark.parametrize("granted", [False, True])
def test_a_fetch_is_cancelled_by_its_number_in_any_piece(granted: bool) -> None:
    scene = Pieces()
    scene.give(1, [0, 1], more=True)
    scene.run()
    if granted:
        scene.give(2, [2], more=True)
    scene.reader.cancel(1, scene.engine_pair.heap.now())
    scene.run()
    assert scene.ended == [2]
    assert len(scene.asked) == 2
    assert scene.unpinned == [1, 2]


def test_a_lost_owner_ends_the_fetch_between_pieces() -> None:
    scene = Pieces()
    scene.give(1, [0, 1], more=True)
    scene.run()
    scene.reader.on_peer_lost(STORE, scene.engine_pair.heap.now())
    assert scene.ended == [2]
