"""Ranks with memories of their own: a move is over when each has done its part, a follower moves
what it has computed, and copies that differ count as no block.
"""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import msgspec
import pytest

from mooncake.base import BlockPlaces, PageArray, SegmentRef
from mooncake.base.kv_layout import KvPart, Move
from mooncake.engine.ranks.kv_moves import (
    ALL_LAYERS,
    AskFence,
    Fenced,
    Hashed,
    HashPages,
    Moved,
    Progress,
    RankAnswer,
    RankWord,
    Revoke,
    StartMove,
    StopMove,
    decode_answer,
    encode_answer,
)
from mooncake.engine.ranks.step_log import decode, encode
from mooncake.instance.mover import BlockChecksums, SliceMover
from mooncake.instance.rank_pages import FollowerMoves, FollowerPages, Reached
from mooncake.transfer.engine import Op, TransferDone
from mooncake.transfer.grants import FIRST_LOOK_S, LOOK_AGAIN_S, Fence
from tests.support.engine.engine_pair import LAYOUT

ARRAY = PageArray(LAYOUT, 8)
SEGMENT = SegmentRef("e", {}, "h")
THERE = BlockPlaces(SEGMENT, 1, LAYOUT.slice_bytes, [0])
LAYERS = range(LAYOUT.num_layers)


class Memory:
    """Stands for a rank's memory: begins what it is told to, and ends nothing by itself."""

    def __init__(self, array: PageArray, *, checksum: int = 7) -> None:
        self.array = array
        self.segment = SEGMENT
        self.region_id = 0
        self.moves: list[Move] = []
        self.hashes: list[list[int]] = []
        self.cancelled: list[int] = []
        self.revoked: list[int] = []
        self.fences: dict[int, Fence] = {}
        self._checksum = checksum

    def start(self, op: Op, move: Move, deadline_s: float) -> int:
        self.moves.append(move)
        return len(self.moves) - 1

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def hash(self, pages: Sequence[int]) -> int:
        self.hashes.append(list(pages))
        return len(self.hashes) - 1

    def checksum(self, page: int) -> int:
        return self._checksum

    def revoke(self, grant: int) -> None:
        self.revoked.append(grant)

    def fence(self, grant: int) -> Fence:
        return self.fences[grant]

    def on_fenced(self, grant: int, fence: Fence) -> None:
        raise NotImplementedError


def ranks(count: int, num_homes: int = 1) -> list[Memory]:
    array = PageArray(LAYOUT, 8, num_homes)
    return [Memory(array.of_rank(rank)) for rank in range(count)]


def mover_of(own: Memory, *others: Memory) -> SliceMover:
    return SliceMover(own, others)  # type: ignore[arg-type]


def part(*indexes: int) -> KvPart:
    places = BlockPlaces(SEGMENT, 1, LAYOUT.slice_bytes, [100 * index for index in indexes])
    return KvPart(places, list(indexes), 0, LAYOUT.num_layers)


class TestLead:
    """What the lead makes of its ranks."""

    def test_a_move_ends_once_when_all_ranks_have_ended_theirs(self) -> None:
        memories, ended = ranks(2), list[TransferDone]()
        mover = mover_of(*memories)
        move = mover.write(
            [part(0, 1, 2)], {0: 5, 1: 6, 2: 7}, LAYERS, 9.0, lambda done, _: ended.append(done)
        )
        assert [memory.moves[0].pages for memory in memories] == [[5, 7], [6]]
        first = TransferDone(batch_id=0, num_bytes=10, seconds=1.0, nics=("mlx5_1",))
        mover.on_done(first, 0.0)
        assert not ended
        mover.check_integrity()
        second = TransferDone(batch_id=0, num_bytes=20, seconds=3.0, nics=("mlx5_0",))
        mover.on_done(second, 0.0, 1)
        nics = ("mlx5_0", "mlx5_1")
        assert ended == [TransferDone(batch_id=move, num_bytes=30, seconds=3.0, nics=nics)]
        assert mover.num_in_flight == 0
        mover.check_integrity()

    def test_what_fails_on_one_rank_is_called_off_on_the_others(self) -> None:
        memories, ended = ranks(2), list[TransferDone]()
        mover = mover_of(*memories)
        mover.write([part(0, 1)], {0: 5, 1: 6}, LAYERS, 9.0, lambda done, _: ended.append(done))
        mover.on_done(TransferDone(batch_id=0, error="gone"), 0.0, 1)
        assert memories[0].cancelled == [0]
        assert not ended, "the first rank may still be writing"
        mover.on_done(TransferDone(batch_id=0, num_bytes=9), 0.0)
        assert [(done.error, done.num_bytes) for done in ended] == [("gone", 0)]

    def test_every_memory_is_told_to_peers_with_what_it_holds(self) -> None:
        mover = mover_of(*ranks(4, num_homes=2))
        parts = mover.parts([0, 5, 1], 10, 77)
        assert [each.indexes for each in parts] == [[10, 12], [11], [10, 12], [11]]
        assert {each.places.grant for each in parts} == {77}

    def test_a_grant_is_over_when_it_is_over_in_every_memory(self) -> None:
        memories = ranks(3)
        mover = mover_of(*memories)
        mover.revoke(77)
        assert [memory.revoked for memory in memories] == [[77]] * 3
        for memory, fence in zip(memories, [Fence.CLOSED, Fence.UNKNOWN, Fence.OPEN], strict=True):
            memory.fences[77] = fence
        assert mover.fence(77) is Fence.UNKNOWN
        memories[1].fences[77] = Fence.CLOSED
        assert mover.fence(77) is Fence.OPEN
        memories[2].fences[77] = Fence.CLOSED
        assert mover.fence(77) is Fence.CLOSED

    @pytest.mark.parametrize(("other", "right"), [(7, True), (8, False)])
    def test_a_block_read_into_copies_is_right_where_all_are(self, other: int, right: bool) -> None:
        own, far = ranks(2)
        mover = mover_of(own, far)
        mover.read([3], THERE, 9.0, lambda *_: None)
        mover.on_done(TransferDone(batch_id=0), 0.0)
        mover.on_done(TransferDone(batch_id=0), 0.0, 1, [other])
        assert (mover.checksum([3], 0) == 7) == right
        assert mover.checksum([3], 0) == 7, "what others found belongs to one read"

    def test_a_block_that_lies_elsewhere_has_the_checksum_found_there(self) -> None:
        own, far = ranks(2, num_homes=2)
        mover = mover_of(own, far)
        mover.read([6], THERE, 9.0, lambda *_: None)
        assert not own.moves
        mover.on_done(TransferDone(batch_id=0), 0.0, 1, [55])
        assert mover.checksum([6], 0) == 55

    def test_hashes_come_from_whoever_holds_a_page_and_copies_must_agree(self) -> None:
        memories, found = ranks(4, num_homes=2), list[list[int]]()
        checksums = BlockChecksums(memories)
        checksums.start([0, 4, 1], lambda sums, _: found.append(sums))
        assert [memory.hashes for memory in memories] == [[[0, 1]], [[4]], [[0, 1]], [[4]]]
        for rank, sums in enumerate([[10, 11], [14], [10, 99], [14]]):
            assert not found
            checksums.on_done(Hashed(0, sums), 0.0, rank)
        assert found == [[10, 14, 0]]

    def test_stages_move_and_hash_their_layers_and_a_block_has_the_sum(self) -> None:
        array, cut = PageArray(LAYOUT, 8), LAYOUT.num_layers - 1
        last = Memory(array.of_rank(0, LAYERS[cut:]))
        first = Memory(array.of_rank(1, LAYERS[:cut]))
        mover, sums = mover_of(last, first), list[list[int]]()
        mover.write([part(0)], {0: 5}, LAYERS, 9.0, lambda *_: None)
        for memory, layers in ((last, LAYERS[cut:]), (first, LAYERS[:cut])):
            [move] = memory.moves
            assert (move.pages, move.layers) == ([5], layers)
            assert move.there.offsets == [layers.start * LAYOUT.slice_bytes]
        checksums = BlockChecksums([last, first])
        checksums.start([5, 2], lambda found, _: sums.append(found))
        checksums.on_done(Hashed(0, [10, 2**64 - 1]), 0.0)
        checksums.on_done(Hashed(0, [5, 3]), 0.0, 1)
        assert sums == [[15, 2]]
        mover.read([3], THERE, 9.0, lambda *_: None)
        mover.on_done(TransferDone(batch_id=1), 0.0, 1, [100])
        assert mover.checksum([3], 0) == 107

    def test_a_follower_is_told_how_far_its_stage_is_known_to_be(self) -> None:
        told: list[tuple[int, RankWord]] = []

        class Link:
            def progress_of(self, rank: int) -> Progress:
                return (3, rank)

            def tell_rank(self, rank: int, word: RankWord) -> None:
                told.append((rank, word))

        link = Link()
        pages = FollowerPages(2, ARRAY.of_rank(2), SEGMENT, 0, link, verify=True)
        move = Move(2, [4], THERE, 0, 2)
        assert [pages.start(op, move, 9.0) for op in (Op.WRITE, Op.READ)] == [1, 2]
        pages.cancel(1)
        assert pages.hash([4]) == 3
        assert told == [
            (2, StartMove(1, Op.WRITE, move, (3, 2), 9.0, verify=False)),
            (2, StartMove(2, Op.READ, move, (3, 2), 9.0, verify=True)),
            (2, StopMove(1)),
            (2, HashPages(3, [4], (3, 2))),
        ]
        for _, word in told:
            assert decode(encode(word)) == word

    def test_a_follower_is_asked_about_a_grant_until_nothing_is_open(self) -> None:
        told: list[RankWord] = []
        link = mock.Mock(tell_rank=lambda _, word: told.append(word))
        pages = FollowerPages(2, ARRAY.of_rank(2), SEGMENT, 0, link, verify=True)
        pages.revoke(77)
        assert [pages.fence(77), pages.fence(77)] == [Fence.OPEN] * 2
        assert told == [Revoke(77), AskFence(77)]
        pages.on_fenced(77, Fence.UNKNOWN)
        assert pages.fence(77) is Fence.UNKNOWN
        assert pages.fence(77) is Fence.OPEN, "it may have changed"
        pages.on_fenced(77, Fence.CLOSED)
        assert pages.fence(77) is Fence.CLOSED
        for word in told:
            assert decode(encode(word)) == word


class Rank:
    """A follower's machine over a memory that ends nothing by itself."""

    def __init__(self) -> None:
        self.memory = Memory(ARRAY.of_rank(1))
        self.answers: list[RankAnswer] = []
        self.machine = FollowerMoves(self.memory, self.answers.append)

    def handle(self, event: msgspec.Struct) -> None:
        self.machine.handle(event, 0.0)
        self.machine.check_integrity()

    def reach(self, steps: int, layers: int) -> None:
        self.machine.progress = (steps, layers)
        self.handle(Reached())


def start(number: int, after: Progress = (0, 0), *, verify: bool = False) -> StartMove:
    return StartMove(number, Op.READ, Move(1, [number], THERE, 0, 2), after, 9.0, verify)


class TestFollower:
    """What a follower does."""

    def test_moves_wait_for_what_this_rank_has_not_computed_yet(self) -> None:
        rank = Rank()
        rank.handle(start(1, (2, 1)))
        rank.handle(start(2, (2, 3)))
        rank.handle(HashPages(3, [5], (2, 3)))
        for steps, layers, begun in ((1, ALL_LAYERS, []), (2, 0, []), (2, 1, [[1]])):
            rank.reach(steps, layers)
            assert [move.pages for move in rank.memory.moves] == begun
        rank.reach(2, ALL_LAYERS)
        assert [move.pages for move in rank.memory.moves] == [[1], [2]]
        assert rank.memory.hashes == [[5]]

    def test_every_word_is_answered_once(self) -> None:
        rank = Rank()
        for word in (start(4), start(5, verify=True), HashPages(6, [2], (0, 0))):
            rank.handle(word)
        rank.handle(Hashed(0, [9]))
        nics = ("mlx5_0",)
        done = TransferDone(batch_id=1, num_bytes=8, seconds=2.0, protocol="rdma", nics=nics)
        rank.handle(done)
        rank.handle(TransferDone(batch_id=0, error="gone"))
        assert rank.answers == [Hashed(6, [9]), Moved(TransferDone(batch_id=4, error="gone"))]
        assert rank.memory.hashes == [[2], [5]], "what was read is hashed"
        rank.handle(Hashed(1, [77]))
        assert rank.answers[2:] == [Moved(msgspec.structs.replace(done, batch_id=5), [77])]
        assert decode_answer(encode_answer(rank.answers[2])) == rank.answers[2]
        assert rank.machine.quiet

    def test_a_grant_that_was_revoked_is_answered_for_when_nothing_is_open(self) -> None:
        rank = Rank()
        rank.handle(Revoke(77))
        assert rank.memory.revoked == [77]
        rank.handle(AskFence(77))
        rank.memory.fences[77] = Fence.OPEN
        assert rank.machine.tick(0.0) == FIRST_LOOK_S
        assert rank.machine.tick(FIRST_LOOK_S) == FIRST_LOOK_S + LOOK_AGAIN_S
        assert rank.answers == []
        rank.memory.fences[77] = Fence.CLOSED
        assert rank.machine.tick(1.0) is None
        assert rank.answers == [Fenced(77, Fence.CLOSED)]
        assert decode_answer(encode_answer(rank.answers[0])) == rank.answers[0]

    def test_a_move_that_is_stopped_still_ends(self) -> None:
        rank = Rank()
        rank.handle(start(1))
        rank.handle(start(2, (1, 1)))
        rank.handle(StopMove(2))
        cancelled = TransferDone(batch_id=2, error="cancelled")
        assert rank.answers == [Moved(cancelled)], "it has never begun"
        rank.handle(StopMove(1))
        assert rank.memory.cancelled == [0]
        assert len(rank.answers) == 1, "it may still touch memory"
        rank.handle(TransferDone(batch_id=0, error="cancelled"))
        rank.handle(StopMove(1))
        assert len(rank.answers) == 2
        rank.reach(5, 0)
        assert len(rank.memory.moves) == 1
