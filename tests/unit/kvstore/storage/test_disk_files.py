"""Blocks in real files: what goes down comes up the same, and nothing else comes up ever."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from mooncake.base import KEY_BYTES, ConfigError, KvLayout
from mooncake.kvstore.config import SsdConfig
from mooncake.kvstore.storage.block_record import PAGE_BYTES, BlockHeader, pack_block_header
from mooncake.kvstore.storage.disk import DiskBlock, Outcome
from mooncake.kvstore.storage.disk_files import FileDisks
from tests.support.kvstore.disk_bench import ALIGNED, ODD, DiskBench, key, overwrite

LAYOUTS = pytest.mark.parametrize("layout", [ALIGNED, ODD], ids=["aligned", "odd"])


@pytest.fixture
def benches(tmp_path: Path) -> Iterator:
    made: list[DiskBench] = []

    def make(layout: KvLayout, **options) -> DiskBench:
        if made:
            made[-1].disks.close()
        made.append(DiskBench(tmp_path, layout, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.disks.close()


@LAYOUTS
@pytest.mark.parametrize("direct", [True, False])
def test_blocks_come_back_as_they_went(benches, layout: KvLayout, direct: bool) -> None:
    bench = benches(layout, direct=direct)
    wanted = [bench.fill(place, seed=place) for place in range(4)]
    # Neighbours, and one apart.
    done = bench.write(*(bench.block(n, slot, n) for n, slot in enumerate([2, 3, 4, 9])))
    assert done.outcomes == [Outcome.OK] * 4
    for place in range(4):
        bench.fill(place, seed=99)
    again = bench.read(*(bench.block(n, slot, n + 4) for n, slot in enumerate([2, 3, 4, 9])))
    assert again.outcomes == [Outcome.OK] * 4
    assert again.checksums == done.checksums
    assert [bytes(bench.data(place + 4)) for place in range(4)] == wanted


@LAYOUTS
def test_neighbours_go_in_one_call_however_they_are_ordered(
    benches, layout: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benches(layout)
    files, calls = bench.disks._disks[0].files, []
    move = files.blocks

    def counted(call, slot: int, vectors: list[memoryview]) -> None:
        calls.append((call.__name__, slot, len(vectors)))
        move(call, slot, vectors)

    monkeypatch.setattr(files, "blocks", counted)
    slots = [5, 3, 9, 4, 2]
    wanted = [bench.fill(place, seed=place) for place in range(3)]
    # Two places are written twice: what goes to neighbouring slots may lie anywhere.
    done = bench.write(*(bench.block(n, slot, n % 3) for n, slot in enumerate(slots)))
    assert calls == [("pwritev", 2, 4), ("pwritev", 9, 1)]
    calls.clear()
    again = bench.read(*(bench.block(n, slot, n + 3) for n, slot in enumerate(slots)))
    assert calls == [("preadv", 2, 4), ("preadv", 9, 1)]
    assert again.outcomes == done.outcomes == [Outcome.OK] * 5
    assert again.checksums == done.checksums
    assert [bytes(bench.data(n + 3)) for n in range(5)] == [wanted[n % 3] for n in range(5)]


def test_of_a_run_each_block_has_an_outcome_of_its_own(benches, tmp_path: Path) -> None:
    bench = benches(ALIGNED)
    slots = [4, 2, 3, 1]
    done = bench.write(*(bench.block(n, slot, n) for n, slot in enumerate(slots)))
    overwrite(tmp_path, bench.disks._disks[0].files.block_offset(2) + 7, b"\xff\xff")
    blocks = [bench.block(n, slot, n + 4) for n, slot in enumerate(slots)]
    known = [
        bench.block(n, slot, n + 4, checksum=done.checksums[n]) for n, slot in enumerate(slots)
    ]
    for wanted in (blocks, known):
        again = bench.read(*wanted)
        assert again.outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK]
        assert again.checksums == [done.checksums[0], 0, *done.checksums[2:]]


def test_what_is_known_of_a_block_counts_more_than_its_header(benches, tmp_path: Path) -> None:
    """A header tells a restart what there is; until then the checksum in memory is enough."""
    bench = benches(ALIGNED)
    first = bench.fill(0, 1)
    done = bench.write(bench.block(1, 0, 0))
    overwrite(tmp_path, bench.disks._disks[0].files.header_offset(0) + 12, b"\xff\xff")
    assert bench.read(bench.block(1, 0, 1)).outcomes == [Outcome.CORRUPT]
    again = bench.read(bench.block(1, 0, 1, checksum=done.checksums[0]))
    assert (again.outcomes, bytes(bench.data(1))) == ([Outcome.OK], first)
    assert bench.read(bench.block(1, 0, 1, checksum=1)).outcomes == [Outcome.CORRUPT]
    assert benches(ALIGNED).scanned.found == []


@LAYOUTS
def test_a_restart_finds_what_was_written(benches, layout: KvLayout) -> None:
    bench = benches(layout)
    first, second = bench.fill(0, 1), bench.fill(1, 2)
    done = bench.write(bench.block(1, 0, 0, tenant="ü"), bench.block(2, 5, 1))
    bench = benches(layout)
    assert [tuple(f)[:3] if isinstance(f, tuple) else (f.key, f.slot, f.tenant)
            for f in bench.scanned.found] == [(key(1), 0, "ü"), (key(2), 5, "")]  # fmt: skip
    assert [f.checksum for f in bench.scanned.found] == done.checksums
    assert bench.scanned.num_dropped == 0
    bench.read(bench.block(1, 0, 0), bench.block(2, 5, 1))
    assert (bytes(bench.data(0)), bytes(bench.data(1))) == (first, second)


def test_of_two_blocks_of_a_key_the_newer_counts_across_restarts(benches) -> None:
    bench = benches(ALIGNED)
    bench.fill(0, 1)
    bench.write(bench.block(1, 7, 0))
    bench = benches(ALIGNED)
    bench.fill(0, 2)
    bench.write(bench.block(1, 3, 0))
    bench = benches(ALIGNED)
    assert [found.slot for found in bench.scanned.found] == [3]
    assert bench.scanned.num_dropped == 1
    bench.disks.erase(0, [bench.block(1, 3, 0)])
    bench.wait(1)
    assert benches(ALIGNED).scanned.found == [], "the older one went with it"


def test_an_erased_block_stays_gone(benches) -> None:
    bench = benches(ALIGNED)
    bench.write(bench.block(1, 0, 0), bench.block(2, 1, 1))
    bench.disks.erase(0, [bench.block(1, 0, 0)])
    bench.wait(1)
    assert bench.read(bench.block(1, 0, 0)).outcomes == [Outcome.CORRUPT]
    assert [found.key for found in benches(ALIGNED).scanned.found] == [key(2)]


def test_erased_is_answered_once_the_device_has_flushed(
    benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benches(ALIGNED)
    blocks = [bench.block(n, n, n) for n in range(4)]
    bench.write(*blocks)
    blank_at_flush: list[int] = []
    files = bench.disks._disks[0].files

    def flush(fd: int) -> None:
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        offsets = [files.header_offset(slot) for slot in range(4)]
        blank_at_flush.append(
            sum(os.preadv(fd, [page], at) > 0 and not any(page) for at in offsets)
        )

    monkeypatch.setattr(os, "fdatasync", flush)
    bench.disks.erase(0, blocks[:3])
    [done] = bench.wait(1)
    assert done.outcomes == [Outcome.OK] * 3
    assert blank_at_flush == [3], "one flush for the batch, after its last header"

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "the device has lost it")

    monkeypatch.setattr(os, "fdatasync", refuse)
    bench.disks.erase(0, blocks[3:])
    [done] = bench.wait(1)
    assert done.outcomes == [Outcome.FAILED]


def test_a_sealed_record_that_makes_no_sense_costs_its_slot_only(benches, tmp_path: Path) -> None:
    bench = benches(ALIGNED)
    bench.write(*(bench.block(n, n, n, tenant="team") for n in range(3)))
    files = bench.disks._disks[0].files
    first = 8 + KEY_BYTES + 8 + 8

    def reseal(slot: int, at: int, data: bytes) -> None:
        page = bytearray((tmp_path / "segment-00000.kv").read_bytes()[files.header_offset(slot) :])
        page[at : at + len(data)] = data
        end = first + 8 + 4 + len(b"team")
        page[end : end + 8] = xxhash.xxh3_64_intdigest(page[:end]).to_bytes(8, "little")
        overwrite(tmp_path, files.header_offset(slot), bytes(page[:PAGE_BYTES]))

    reseal(0, first + 8 + 4, b"\xff\xff")  # the tenant's name
    reseal(1, first, b"\xff" * 8)  # the sequence number
    bench = benches(ALIGNED)
    assert [found.key for found in bench.scanned.found] == [key(2)]
    assert bench.scanned.num_dropped == 2
    assert bench.write(bench.block(5, 0, 5)).outcomes == [Outcome.OK]


@pytest.mark.parametrize("forged", [2**64 - 1, 2**63, 2**49])
def test_a_forged_sequence_number_hides_nothing(benches, tmp_path: Path, forged: int) -> None:
    """Neither the true block of its key, nor what is written after the start that finds it."""
    bench = benches(ALIGNED)
    bench.fill(0, 0)
    bench.fill(1, 1)
    bench.write(bench.block(1, 0, 0), bench.block(2, 1, 1))
    files = bench.disks._disks[0].files
    page = memoryview(bytearray(PAGE_BYTES))
    pack_block_header(page, BlockHeader(key(2), 7, ALIGNED.block_bytes, forged, ""))
    overwrite(tmp_path, files.header_offset(3), bytes(page))
    bench = benches(ALIGNED)
    assert [(found.key, found.slot) for found in bench.scanned.found] == [(key(1), 0), (key(2), 1)]
    assert bench.scanned.num_dropped == 1
    bench.fill(2, 2)
    assert bench.write(bench.block(5, 2, 2)).outcomes == [Outcome.OK]
    again = benches(ALIGNED)
    assert {found.key for found in again.scanned.found} == {key(1), key(2), key(5)}
    assert again.scanned.num_dropped == 0, "the forged one was erased"


def test_a_slot_with_another_block_is_not_taken_for_the_one_wanted(benches) -> None:
    bench = benches(ALIGNED)
    bench.write(bench.block(1, 0, 0))
    assert bench.read(bench.block(2, 0, 1)).outcomes == [Outcome.CORRUPT]


@LAYOUTS
@pytest.mark.parametrize("where", ["first byte", "last byte", "tail lost"])
def test_a_damaged_block_is_seen_and_its_neighbours_are_not_hurt(
    benches, tmp_path: Path, layout: KvLayout, where: str
) -> None:
    bench = benches(layout)
    for place in range(3):
        bench.fill(place, place)
    bench.write(*(bench.block(n, n, n) for n in range(3)))
    start = bench.disks._disks[0].files.block_offset(1)
    last = start + layout.block_bytes - 1
    if where == "tail lost":
        overwrite(tmp_path, last - 63, bytes(64))
    else:
        at = start if where == "first byte" else last
        old = bench.data(1)[0 if where == "first byte" else -1]
        overwrite(tmp_path, at, bytes([old ^ 0x10]))
    done = bench.read(*(bench.block(n, n, n) for n in range(3)))
    assert done.outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]


def test_torn_headers_are_dropped_at_the_start_and_counted(benches, tmp_path: Path) -> None:
    bench = benches(ALIGNED)
    bench.write(*(bench.block(n, n, n) for n in range(3)))
    overwrite(tmp_path, bench.disks._disks[0].files.header_offset(1) + 12, b"\xff\xff")
    bench = benches(ALIGNED)
    assert [found.key for found in bench.scanned.found] == [key(0), key(2)]
    assert bench.scanned.num_dropped == 1


@pytest.mark.parametrize(
    "trouble", ["another model", "torn header", "unreadable header", "cut short", "less room"]
)
def test_files_of_another_layout_or_size_are_not_believed(
    benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    bench = benches(ALIGNED)
    bench.write(bench.block(1, 0, 0))
    layout, options = ALIGNED, {}
    if trouble == "another model":
        layout = KvLayout(**{f: getattr(ALIGNED, f) for f in ALIGNED.__struct_fields__}
                          | {"fingerprint": "b"})  # fmt: skip
    elif trouble == "torn header":
        overwrite(tmp_path, 20, b"\xff\xff")
    elif trouble == "unreadable header":
        refused = [OSError(errno.EIO, "Input/output error")]
        real = os.preadv

        def preadv(*args) -> int:
            if refused:
                raise refused.pop()
            return real(*args)

        monkeypatch.setattr(os, "preadv", preadv)
    elif trouble == "cut short":
        os.truncate(tmp_path / "segment-00000.kv", 3 * PAGE_BYTES)
    else:
        options = {"num_bytes": 1 << 19}
    bench = benches(layout, **options)
    assert bench.scanned.found == []
    assert bench.scanned.num_dropped == 1
    assert list(tmp_path.glob("segment-*")) == []
    bench.fill(0, 5)
    bench.write(bench.block(1, 0, 0))
    assert bench.read(bench.block(1, 0, 1)).outcomes == [Outcome.OK]


def test_reading_a_file_that_is_not_there_is_a_failure_not_a_fault(benches) -> None:
    assert benches(ALIGNED).read(DiskBlock(key(1), 0, 0)).outcomes == [Outcome.FAILED]


def test_a_full_file_system_is_told_apart(benches, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benches(ALIGNED)

    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert bench.write(bench.block(1, 0, 0)).outcomes == [Outcome.FULL]
    monkeypatch.undo()
    assert bench.write(bench.block(1, 0, 0)).outcomes == [Outcome.OK]


def test_files_keep_within_the_limit(benches, tmp_path: Path) -> None:
    bench = benches(ALIGNED, num_bytes=300_000)
    (num_slots,) = bench.disks.num_slots
    for slot in range(num_slots):
        assert bench.write(bench.block(slot, slot, 0)).outcomes == [Outcome.OK]
    used = sum(path.stat().st_size for path in tmp_path.glob("segment-*"))
    assert 300_000 - bench.disks._disks[0].files.slot_bytes - 2 * PAGE_BYTES < used <= 300_000


def test_checksums_are_those_of_the_files(benches) -> None:
    bench = benches(ODD)
    bench.fill(3, 7)
    done = bench.write(bench.block(1, 0, 3))
    bench.disks.checksum([3 * ODD.block_bytes])
    [hashed] = bench.wait(1)
    assert hashed.checksums == done.checksums


def test_limits_that_hold_no_block_and_bad_directories_are_start_up_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than one block"):
        FileDisks([SsdConfig(directory=str(tmp_path), num_bytes=4096)], ALIGNED)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        FileDisks([SsdConfig(directory=str(tmp_path / "file" / "d"), num_bytes=1 << 20)], ALIGNED)
