"""Registered memory: what is allocated, what is refused, and how it is withdrawn."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.base.errors import TransferError
from mooncake.transfer.grants import NUM_SLOTS
from mooncake.transfer.memory import (
    PAGE_BYTES,
    SharedWords,
    allocate_shared,
    map_shared,
    map_words,
)
from mooncake.transfer.regions import Gates, RangeRefused, RegionTable


@pytest.fixture
def table() -> Iterator[RegionTable]:
    made = RegionTable(Gates())
    yield made
    made.close()
    made.check_integrity()


def test_allocated_memory_is_zero_aligned_and_writable(table: RegionTable) -> None:
    region = table.allocate(3 * PAGE_BYTES + 5, "kv pages")
    assert region.num_bytes == 3 * PAGE_BYTES + 5
    assert region.buffer.nbytes == region.num_bytes
    assert (region.buffer.format, region.buffer.readonly) == ("B", False)
    assert region.array.ctypes.data % PAGE_BYTES == 0
    assert not region.array.any()
    region.buffer[-1] = 7
    assert region.array[-1] == 7


def test_registered_memory_is_the_callers_own(table: RegionTable) -> None:
    memory = bytearray(100)
    region = table.register(memoryview(memory).cast("I"), "mine")
    assert region.num_bytes == 100
    assert region.fd is None
    region.buffer[4] = 9
    assert memory[4] == 9


def test_memory_that_is_only_read_permits_no_write(table: RegionTable) -> None:
    """Not even by a grant: a number that was never issued here is valid."""
    region = table.register(memoryview(bytearray(10)), "weights", read_only=True)
    for grant in (0, NUM_SLOTS + 5):
        with pytest.raises(RangeRefused, match=r"\(weights\) is only read"):
            table.permits([region], grant)
    assert table.find(region.region_id, 0, 10) is region


@pytest.mark.parametrize(
    "buffer",
    [memoryview(b"read only"), memoryview(bytearray(10))[::2], memoryview(bytearray())],
    ids=["read-only", "strided", "empty"],
)
def test_memory_that_cannot_be_written_is_refused(table: RegionTable, buffer: memoryview) -> None:
    with pytest.raises(TransferError, match="odd: only writable"):
        table.register(buffer, "odd")


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_nothing_cannot_be_allocated(table: RegionTable, num_bytes: int) -> None:
    with pytest.raises(TransferError, match="pool: cannot allocate"):
        table.allocate(num_bytes, "pool")


def test_too_much_memory_is_a_clear_error(table: RegionTable) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferError, match=r"pool: cannot allocate .* lower the size"):
        table.allocate(2**62, "pool")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_ranges_are_checked_to_the_byte(table: RegionTable) -> None:
    region = table.allocate(100, "small")
    for offset, num_bytes in [(0, 100), (100, 0), (99, 1), (0, 0)]:
        assert table.find(region.region_id, offset, num_bytes) is region
    for offset, num_bytes in [(0, 101), (100, 1), (-1, 1), (5, -1), (2**64, 1)]:
        with pytest.raises(RangeRefused, match="lie outside region 1 \\(small\\) of 100 bytes"):
            table.find(region.region_id, offset, num_bytes)


def test_a_withdrawn_region_is_unknown_for_good(table: RegionTable) -> None:
    seen: list[int] = []
    table.watch_withdrawals(seen.append)
    first = table.allocate(10, "first")
    table.withdraw(first)
    assert not first.alive
    assert seen == [first.region_id]
    with pytest.raises(RangeRefused, match="region 1 is not registered"):
        table.find(first.region_id, 0, 1)
    with pytest.raises(RangeRefused, match="was unregistered"):
        first.check(0, 1)
    with pytest.raises(TransferError, match="not registered here"):
        table.withdraw(first)
    assert table.allocate(10, "second").region_id != first.region_id
    assert first.buffer[0] == 0, "the caller's view of the memory stays good"


def test_another_tables_region_is_not_ours_to_withdraw(table: RegionTable) -> None:
    other = RegionTable(Gates())
    theirs, ours = other.allocate(10, "theirs"), table.allocate(10, "ours")
    assert theirs.region_id == ours.region_id
    with pytest.raises(TransferError, match="not registered here"):
        table.withdraw(theirs)
    other.close()


def test_withdrawal_waits_until_no_thread_is_inside(table: RegionTable) -> None:
    region = table.allocate(10, "shared")
    gate = table.gates.new()
    inside, may_leave = threading.Event(), threading.Event()
    saw: list[bool] = []

    def touch() -> None:
        with gate:
            inside.set()
            may_leave.wait()
            saw.append(withdrawn.is_set())

    withdrawn = threading.Event()

    def withdraw() -> None:
        table.withdraw(region)
        withdrawn.set()

    toucher = threading.Thread(target=touch)
    toucher.start()
    inside.wait()
    owner = threading.Thread(target=withdraw)
    owner.start()
    while region.alive:
        pass
    may_leave.set()
    toucher.join()
    owner.join()
    assert saw == [False], "the region was withdrawn while a thread was inside"
    table.gates.forget(gate)


def test_after_close_nothing_is_taken() -> None:
    before = len(os.listdir("/proc/self/fd"))
    table = RegionTable(Gates())
    region = table.allocate(10, "early")
    table.close()
    assert not region.alive
    with pytest.raises(TransferError, match="closed"):
        table.allocate(10, "late")
    with pytest.raises(TransferError, match="closed"):
        table.register(memoryview(bytearray(4)), "late")
    del region, table
    assert len(os.listdir("/proc/self/fd")) <= before


def test_shared_memory_is_the_same_from_both_sides_and_cannot_shrink() -> None:
    memory, fd = allocate_shared(PAGE_BYTES + 1, "test")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    other = map_shared(fd, PAGE_BYTES + 1)
    memory[PAGE_BYTES] = 42
    assert other[PAGE_BYTES] == 42
    with pytest.raises(TransferError, match="shorter than"):
        map_shared(fd, 10 * PAGE_BYTES)
    os.close(fd)


@pytest.mark.parametrize("theirs", [False, True])
def test_words_cannot_shrink_on_either_side(theirs: bool) -> None:
    """Whoever touches words that were cut off is killed."""
    words = SharedWords(4, theirs=theirs)
    with pytest.raises(OSError, match=r"Operation not permitted|Invalid argument"):
        os.ftruncate(words.fd, 0)
    other = map_words(words.fd, 4, writable=theirs)
    words.words[3] = 42
    assert other[3] == 42
    with pytest.raises(TransferError, match="shorter than"):
        map_words(words.fd, 5)
    words.close()


def test_memory_that_could_shrink_is_not_mapped(tmp_path: Path) -> None:
    memory, file = os.memfd_create("unsealed"), os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    for fd in (memory, file):
        os.ftruncate(fd, PAGE_BYTES)
        with pytest.raises(TransferError, match="not sealed"):
            map_shared(fd, PAGE_BYTES)
        with pytest.raises(TransferError, match="not sealed"):
            map_words(fd, 4)
        os.close(fd)
