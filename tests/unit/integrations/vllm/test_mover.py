"""The worker's side against a pool in memory: every load ends once, and nothing stays held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from mooncake.base import TransferError
from mooncake.integrations.vllm.chunks import Packing, RankKv
from mooncake.integrations.vllm.mover import Ended, Mover, Saving, Staging
from mooncake.integrations.vllm.plan import Load, Save
from tests.support.integrations.pool_in_memory import Pool, chain
from tests.support.waiting import LONG_S

BLOCK = 8
"""Bytes of a block of the engine."""
PART = 6
"""Bytes of a block of the pool: a chunk of one block takes two."""


class Engine:
    """Pages of a worker, and its mover."""

    def __init__(self, pool: Pool, num_slots: int = 8, blocks: int = 1) -> None:
        self.pool, self.blocks = pool, blocks
        rank = RankKv(b"r" * 16, BLOCK)
        packing = Packing(PART, blocks)
        slot = packing.num_parts(rank) * PART
        self.staging = Staging(packing, rank, num_slots * slot)
        self.mover = Mover(pool, self.staging, "", 5.0)  # type: ignore[arg-type]
        self.pages = [bytes([number]) * BLOCK for number in range(32)]
        self.now = 0.0

    def slot(self, number: int) -> memoryview:
        begin = number * self.staging.slot_bytes
        return self.staging.memory[begin : begin + self.blocks * BLOCK]

    def read(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for at, slot in enumerate(slots):
            ids = block_ids[at * self.blocks : (at + 1) * self.blocks]
            self.slot(slot)[:] = b"".join(self.pages[number] for number in ids)

    def write(self, block_ids: Sequence[int], slots: Sequence[int], num_skipped: int) -> None:
        data = b"".join(self.slot(slot) for slot in slots)[num_skipped * BLOCK :]
        assert len(data) == len(block_ids) * BLOCK
        for at, number in enumerate(block_ids):
            self.pages[number] = data[at * BLOCK : (at + 1) * BLOCK]

    def save(self, numbers: Sequence[int], block_ids: Sequence[int]) -> None:
        saving = self.begin(numbers, block_ids)
        if saving is not None:
            self.read(saving.block_ids, saving.slots)
            self.mover.give(saving, self.staging.slot_bytes)

    def begin(self, numbers: Sequence[int], block_ids: Sequence[int]) -> Saving | None:
        return self.mover.begin_save(Save(chain(numbers), list(block_ids)))

    def load(self, name: str, numbers: Sequence[int], block_ids: Sequence[int], known: int = 0):
        self.mover.load(Load(name, chain(numbers), list(block_ids), known), self.now)

    def collect(self, *aborted: str) -> Ended:
        return self.mover.collect(aborted, self.now, self.write)

    def end(self) -> Ended:
        """Collect until all loads have ended."""
        whole, deadline = Ended(), time.monotonic() + LONG_S
        while self.mover.num_loads:
            assert time.monotonic() < deadline
            self.mover.wait(0.01)
            ended = self.collect()
            assert not ended.request_ids & whole.request_ids, "ended twice"
            whole.request_ids |= ended.request_ids
            whole.missing |= ended.missing
        return whole

    def settle(self) -> None:
        """Wait until everything was moved."""
        self.until(lambda: self.mover.is_idle)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < deadline, "something stays held"
            time.sleep(0.001)


@contextmanager
def engine(pool: Pool, **shape: int) -> Iterator[Engine]:
    made = Engine(pool, **shape)
    try:
        yield made
    finally:
        pool.goes_on.set()
        made.mover.close()
        assert pool.is_closed


@pytest.mark.parametrize("num_slots", [2, 8])
@pytest.mark.parametrize("blocks", [1, 3])
def test_what_one_engine_saves_another_loads(num_slots: int, blocks: int) -> None:
    """Also through staging memory of a single chunk."""
    pool = Pool(PART)
    shape = {"num_slots": num_slots, "blocks": blocks}
    with engine(pool, **shape) as first, engine(pool, **shape) as second:
        for number in range(4):
            first.save([number], range(number * blocks, (number + 1) * blocks))
            first.settle()
        second.load("r", range(4), range(31, 31 - 4 * blocks, -1))
        assert second.end() == Ended({"r"}, set())
        second.settle()
        for number in range(4 * blocks):
            assert second.pages[31 - number] == bytes([number]) * BLOCK
        assert pool.biggest <= num_slots // 2 * second.staging.packing.num_parts(
            second.staging.rank
        )


def test_blocks_that_the_engine_has_are_left_alone() -> None:
    pool = Pool(PART)
    with engine(pool, blocks=3) as world:
        world.save([1, 2], range(6))
        world.settle()
        world.load("r", [1, 2], [20, 21, 22, 23], known=2)
        assert world.end() == Ended({"r"}, set())
        assert [world.pages[n][0] for n in range(19, 25)] == [19, 2, 3, 4, 5, 24]


@pytest.mark.parametrize("num_slots", [2, 8])
@pytest.mark.parametrize("first_missing", [0, 2])
def test_what_the_pool_lacks_is_named(num_slots: int, first_missing: int) -> None:
    pool = Pool(PART)
    with engine(pool, num_slots=num_slots) as world:
        for number in range(first_missing):
            world.save([number], [number])
            world.settle()
        world.load("r", range(4), [10, 11, 12, 13])
        assert world.end() == Ended({"r"}, set(range(10 + first_missing, 14)))
        world.settle()


def test_half_a_chunk_is_no_chunk() -> None:
    pool = Pool(PART)
    with engine(pool) as world:
        world.save([1], [1])
        world.settle()
        pool.blocks.pop(world.staging.packing.part_keys(world.staging.rank, chain([1]))[1])
        world.load("r", [1], [9])
        assert world.end() == Ended({"r"}, {9})
        assert world.pages[9] == bytes([9]) * BLOCK


@pytest.mark.parametrize("error", [TransferError("lost"), ValueError("a bug")], ids=repr)
def test_a_pool_that_fails_is_a_miss(error: Exception) -> None:
    pool = Pool(PART)
    pool.error = error
    with engine(pool) as world:
        world.save([1], [1])
        world.load("r", [1], [9])
        assert world.end() == Ended({"r"}, {9})
        world.settle()
        assert world.mover.num_dropped == 1
        pool.error = None
        world.save([1], [1])
        world.settle()
        world.load("s", [1], [9])
        assert world.end() == Ended({"s"}, set())


@pytest.mark.parametrize("why", ["deadline", "abort"])
def test_a_pool_that_hangs_holds_no_request_and_writes_no_page_later(why: str) -> None:
    pool = Pool(PART)
    with engine(pool) as world:
        world.save([1], [1])
        world.settle()
        pool.goes_on.clear()
        world.load("r", [1], [9])
        assert world.collect() == Ended()
        world.now = 5.0 if why == "deadline" else 1.0
        assert world.collect(*(["r"] if why == "abort" else [])) == Ended({"r"}, {9})
        pool.goes_on.set()
        world.settle()
        assert world.collect() == Ended()
        assert world.pages[9] == bytes([9]) * BLOCK


def test_saves_for_which_there_is_no_room_are_left_out() -> None:
    pool = Pool(PART)
    with engine(pool, num_slots=4) as world:
        pool.goes_on.clear()
        world.save([1, 2, 3], [1, 2, 3])
        world.save([4], [4])
        assert world.mover.num_dropped == 2
        pool.goes_on.set()
        world.settle()
        assert len(pool.blocks) == 2 * 2


def test_the_first_parts_of_chunks_are_in_the_pool_before_the_last_are_there() -> None:
    pool = Pool(PART)
    with engine(pool) as world:
        saving = world.begin([1, 2], [1, 2])
        assert saving is not None
        world.read(saving.block_ids, saving.slots)
        world.mover.give(saving, PART - 1)
        world.mover.give(saving, PART + 1)
        keys = world.staging.packing.part_keys(world.staging.rank, chain([1, 2]))
        world.until(lambda: len(pool.blocks) == 2)
        assert list(pool.blocks) == keys[::2]
        world.load("r", [1], [9])
        assert world.end() == Ended({"r"}, {9})
        world.mover.give(saving, world.staging.slot_bytes)
        world.settle()
        assert pool.puts == [keys[::2], keys], "the last put names the chain as it is"
        world.load("s", [1], [9])
        assert world.end() == Ended({"s"}, set())


@pytest.mark.parametrize("fails", ["early", "at the end"])
def test_a_pool_that_fails_in_the_middle_of_a_save_holds_nothing(fails: str) -> None:
    pool = Pool(PART)
    with engine(pool) as world:
        saving = world.begin([1], [1])
        assert saving is not None
        pool.error = TransferError("lost") if fails == "early" else None
        world.read(saving.block_ids, saving.slots)
        world.mover.give(saving, PART)
        world.until(lambda: saving.num_given == 1)
        pool.error = None if fails == "early" else TransferError("lost")
        world.mover.give(saving, world.staging.slot_bytes)
        world.settle()
        assert world.mover.num_dropped == (fails == "at the end")
        pool.error = None
        world.load("r", [1], [9])
        assert world.end() == Ended({"r"}, set() if fails == "early" else {9})


def test_a_pool_with_other_blocks_than_before_is_a_miss() -> None:
    pool = Pool(PART)
    with engine(pool) as world:
        pool.block_bytes = PART + 1
        world.load("r", [1], [9])
        assert world.end() == Ended({"r"}, {9})
