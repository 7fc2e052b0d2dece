"""Encrypted slots: what was written comes back, to who has the key, and nothing else ever."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.base import KvLayout
from mooncake.crypto.aead import record_key
from mooncake.crypto.keys import Key, KeyRing
from mooncake.kvstore.storage.block_record import PAGE_BYTES, BlockHeader, pack_block_header
from mooncake.kvstore.storage.disk import Outcome
from mooncake.kvstore.storage.record_cipher import (
    EXTRA_BYTES,
    HEADER_END,
    Opener,
    Openers,
    OtherKey,
    RecordCipher,
    _tenant_key,
)
from tests.support.kvstore.disk_bench import ALIGNED, ODD, DiskBench, key, overwrite

LAYOUTS = pytest.mark.parametrize("layout", [ALIGNED, ODD], ids=["aligned", "odd"])


def ring(*numbers: int) -> KeyRing:
    return KeyRing([Key(bytes([number]) * 32) for number in numbers])


@pytest.fixture
def benches(tmp_path: Path) -> Iterator:
    made: list[DiskBench] = []

    def make(layout: KvLayout, keys: KeyRing | None, path: Path = tmp_path, **more) -> DiskBench:
        if made:
            made[-1].disks.close()
        made.append(DiskBench(path, layout, keys=keys, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.disks.close()


def files_of(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(path.glob("segment-*.kv")))


@LAYOUTS
@pytest.mark.parametrize("direct", [True, False])
def test_blocks_come_back_as_they_went(benches, layout: KvLayout, direct: bool) -> None:
    bench = benches(layout, ring(1), direct=direct)
    wanted = [bench.fill(place, seed=place) for place in range(4)]
    slots = [2, 3, 4, 9]  # neighbours, and one apart
    written = [bench.block(n, slot, n, tenant=f"t{n % 2}") for n, slot in enumerate(slots)]
    done = bench.write(*written)
    assert done.outcomes == [Outcome.OK] * 4
    assert [bytes(bench.data(n)) for n in range(4)] == wanted, "the arena is not written to"
    known = [
        bench.block(n, slot, n + 4, checksum=done.checksums[n] if n % 2 else None)
        for n, slot in enumerate(slots)
    ]
    again = bench.read(*known)
    assert (again.outcomes, again.checksums) == (done.outcomes, done.checksums)
    assert [bytes(bench.data(place + 4)) for place in range(4)] == wanted


@LAYOUTS
def test_a_restart_finds_what_was_written(benches, layout: KvLayout) -> None:
    bench = benches(layout, ring(1))
    first, second = bench.fill(0, 1), bench.fill(1, 2)
    done = bench.write(bench.block(1, 0, 0, tenant="ü"), bench.block(2, 5, 1))
    bench = benches(layout, ring(1))
    found = bench.scanned.found
    assert [(f.key, f.slot, f.tenant) for f in found] == [(key(1), 0, "ü"), (key(2), 5, "")]
    assert [f.checksum for f in found] == done.checksums
    assert bench.scanned.num_dropped == 0
    bench.read(bench.block(1, 0, 0), bench.block(2, 5, 1))
    assert (bytes(bench.data(0)), bytes(bench.data(1))) == (first, second)


@LAYOUTS
def test_nothing_of_a_block_can_be_read_in_the_files(benches, tmp_path, layout: KvLayout) -> None:
    bench = benches(layout, ring(1))
    number = int.from_bytes(random.Random(3).randbytes(16), "big")
    data = bench.fill(0, 1)
    done = bench.write(bench.block(number, 0, 0, tenant="a tenant's name"))
    stored = files_of(tmp_path)
    secrets = [
        number.to_bytes(16, "big"),
        b"a tenant's name",
        done.checksums[0].to_bytes(8, "little"),
    ]
    secrets += [data[at : at + 8] for at in range(0, len(data) - 8, 8)]
    assert not any(secret in stored for secret in secrets)
    plain = benches(layout, None, tmp_path / "plain")
    plain.fill(0, 1)
    plain.write(plain.block(number, 0, 0, tenant="a tenant's name"))
    stored = files_of(tmp_path / "plain")
    assert all(secret in stored for secret in secrets), "the search would have found it"


def test_equal_blocks_are_never_equal_on_disk(benches, tmp_path: Path) -> None:
    """Not in two slots, not in one slot written twice, not after a restart, nor on a copied disk:
    no record shares a key with another.
    """
    seen: set[bytes] = set()
    num_written = 0
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    for path in (tmp_path, tmp_path.with_name("copy")):
        for _ in range(2):
            bench = benches(ALIGNED, ring(1), path)
            bench.fill(0, 1)
            for slot in (0, 1, 0):
                bench.write(bench.block(1, slot, 0))
                files = bench.disks._disks[0].files
                at = files.block_offset(slot)
                seen.add(files_of(path)[at : at + ALIGNED.block_bytes])
                seen.add(files_of(path)[files.header_offset(slot) :][:PAGE_BYTES])
                num_written += 1
    assert len(seen) == 2 * num_written


def test_every_flipped_byte_of_a_record_is_found(benches, tmp_path: Path) -> None:
    bench = benches(ODD, ring(1))
    bench.fill(0, 1)
    bench.write(bench.block(1, 3, 0))
    files = bench.disks._disks[0].files
    places = [files.header_offset(3) + at for at in range(HEADER_END)]
    places += [files.block_offset(3) + at for at in range(ODD.block_bytes)]
    stored = files_of(tmp_path)
    assert not any(stored[files.header_offset(3) :][HEADER_END:PAGE_BYTES])
    for place in places:
        overwrite(tmp_path, place, bytes([stored[place] ^ 0x40]))
        assert bench.read(bench.block(1, 3, 1)).outcomes == [Outcome.CORRUPT]
        overwrite(tmp_path, place, stored[place : place + 1])
    assert bench.read(bench.block(1, 3, 1)).outcomes == [Outcome.OK]


def test_what_is_known_of_a_block_needs_no_header(
    benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with plain blocks: one read a run. A restart learns it from the headers."""
    bench = benches(ALIGNED, ring(1))
    data = [bench.fill(place, place) for place in range(2)]
    done = bench.write(bench.block(0, 0, 0), bench.block(1, 1, 1))
    bench = benches(ALIGNED, ring(1))
    files, calls = bench.disks._disks[0].files, []
    move = files.headers
    monkeypatch.setattr(files, "headers", lambda *how: (calls.append(how), move(*how)))
    known = [bench.block(n, n, n, checksum=done.checksums[n]) for n in range(2)]
    assert bench.read(*known).outcomes == [Outcome.OK] * 2
    assert [bytes(bench.data(n)) for n in range(2)] == data
    assert calls == []
    # Another block's checksum, another slot, a changed byte: not the block that is wanted.
    assert bench.read(bench.block(0, 0, 2, checksum=done.checksums[1])).outcomes == [
        Outcome.CORRUPT
    ]
    assert bench.read(bench.block(0, 1, 2, checksum=done.checksums[0])).outcomes == [
        Outcome.CORRUPT
    ]
    overwrite(
        tmp_path, files.block_offset(0), bytes([files_of(tmp_path)[files.block_offset(0)] ^ 1])
    )
    assert bench.read(known[0]).outcomes == [Outcome.CORRUPT]
    bench.disks.erase(0, [known[1]])
    bench.wait(1)
    assert bench.read(known[1]).outcomes == [Outcome.CORRUPT]
    assert calls, "nothing is known of an erased slot but what its header says"


def test_a_write_that_failed_leaves_nothing_known(benches, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benches(ALIGNED, ring(1))
    bench.fill(0, 0)
    done = bench.write(bench.block(0, 0, 0))
    disk = bench.disks._disks[0]
    assert disk._openers.get(0) is not None

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk.files, "headers", refuse)
    bench.fill(1, 1)
    assert bench.write(bench.block(1, 0, 1)).outcomes == [Outcome.FAILED]
    assert disk._openers.get(0) is None
    monkeypatch.undo()
    for number in range(2):
        block = bench.block(number, 0, 2, checksum=done.checksums[0])
        assert bench.read(block).outcomes == [Outcome.CORRUPT]


def test_openers_of_slots_stand_apart() -> None:
    openers = Openers(3)
    assert [openers.get(slot) for slot in range(3)] == [None] * 3
    one = Opener(b"k" * 32, b"t" * 16, 2**64 - 1)
    openers.put(1, one)
    assert [openers.get(slot) for slot in range(3)] == [None, one, None]
    openers.forget(1)
    assert openers.get(1) is None


def test_parts_of_two_records_make_none(benches, tmp_path: Path) -> None:
    bench = benches(ALIGNED, ring(1))
    for place in range(2):
        bench.fill(place, place)
        bench.write(bench.block(place, place, place))
    files, stored = bench.disks._disks[0].files, files_of(tmp_path)
    size = ALIGNED.block_bytes
    overwrite(tmp_path, files.block_offset(0), stored[files.block_offset(1) :][:size])
    assert bench.read(bench.block(0, 0, 2)).outcomes == [Outcome.CORRUPT]
    # A whole record in another slot is the block that its header names, and no other.
    overwrite(tmp_path, files.header_offset(0), stored[files.header_offset(1) :][:PAGE_BYTES])
    assert bench.read(bench.block(0, 0, 2)).outcomes == [Outcome.CORRUPT]
    assert bench.read(bench.block(1, 0, 2)).outcomes == [Outcome.OK]
    assert bytes(bench.data(2)) == bytes(bench.data(1))


def test_an_erased_block_cannot_be_decrypted_though_its_bytes_are_there(
    benches, tmp_path: Path
) -> None:
    """The header holds the salt of the block's own key: it goes with it."""
    bench = benches(ALIGNED, ring(1))
    bench.fill(0, 1)
    bench.write(bench.block(1, 0, 0))
    files, before = bench.disks._disks[0].files, files_of(tmp_path)
    bench.disks.erase(0, [bench.block(1, 0, 0)])
    bench.wait(1)
    after, header = files_of(tmp_path), files.header_offset(0)
    assert not any(after[header : header + PAGE_BYTES])
    changed = {at // PAGE_BYTES for at in range(len(after)) if before[at] != after[at]}
    assert changed == {header // PAGE_BYTES}
    assert benches(ALIGNED, ring(1)).scanned.found == []


def test_a_key_can_be_changed_without_losing_blocks(benches) -> None:
    bench = benches(ALIGNED, ring(1))
    data = [bench.fill(place, place) for place in range(2)]
    bench.write(bench.block(0, 0, 0))
    bench = benches(ALIGNED, ring(2, 1))
    bench.memory[:] = bytes(len(bench.memory))
    bench.data(1)[:] = data[1]
    bench.write(bench.block(1, 1, 1))
    assert bench.read(bench.block(0, 0, 2), bench.block(1, 1, 3)).outcomes == [Outcome.OK] * 2
    assert [bytes(bench.data(2)), bytes(bench.data(3))] == data
    bench = benches(ALIGNED, ring(2))
    assert [found.key for found in bench.scanned.found] == [key(1)]
    assert bench.scanned.num_dropped == 1


def test_under_another_key_blocks_are_absent_and_the_log_says_so(
    benches, caplog: pytest.LogCaptureFixture
) -> None:
    bench = benches(ALIGNED, ring(1))
    for place in range(3):
        bench.fill(place, place)
        bench.write(bench.block(place, place, place))
    with caplog.at_level(logging.WARNING):
        bench = benches(ALIGNED, ring(2))
    assert "3 blocks are encrypted with a key that is not here: they are not used" in caplog.text
    assert (bench.scanned.found, bench.scanned.num_dropped) == ([], 3)
    assert bench.read(bench.block(0, 0, 4)).outcomes == [Outcome.CORRUPT]
    bench.fill(5, 5)
    bench.write(bench.block(5, 0, 5))
    bench = benches(ALIGNED, ring(1))
    assert [found.key for found in bench.scanned.found] == [key(1), key(2)], (
        "what was not overwritten"
    )


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [(None, ring(1), "they were not encrypted: 1"), (ring(1), None, "they were encrypted: 1")],
)
def test_switching_it_on_or_off_begins_anew_and_the_log_says_so(
    benches, tmp_path: Path, caplog: pytest.LogCaptureFixture, before, after, words: str
) -> None:
    bench = benches(ALIGNED, before)
    bench.fill(0, 1)
    bench.write(bench.block(1, 0, 0))
    with caplog.at_level(logging.WARNING):
        bench = benches(ALIGNED, after)
    assert f"{tmp_path}: files deleted because {words}" in caplog.text
    assert (bench.scanned.found, bench.scanned.num_dropped) == ([], 1)
    bench.fill(0, 1)
    assert bench.write(bench.block(1, 0, 0)).outcomes == [Outcome.OK]
    assert bench.read(bench.block(1, 0, 1)).outcomes == [Outcome.OK]


class TestCipher:
    def record(self, cipher: RecordCipher, tenant: str) -> tuple[memoryview, memoryview]:
        """Return an encrypted header page and block."""
        block = memoryview(b"of this tenant alone")
        out = memoryview(bytearray(len(block) + EXTRA_BYTES))
        page = memoryview(bytearray(PAGE_BYTES))
        pack_block_header(page, BlockHeader(key(1), 7, len(block), 1, tenant))
        of_block, opener = cipher.seal(tenant, 7, block, out)
        cipher.seal_header(page, of_block)
        found = cipher.open_header(page)
        assert found is not None
        assert found[1] == opener
        return page, out[: len(block)]

    def test_tenants_have_keys_of_their_own(self) -> None:
        cipher, salt = RecordCipher(ring(1), "layout"), bytes(32)
        page, block = self.record(cipher, "alice")
        header, opener = cipher.open_header(page)
        assert (header.key, header.tenant) == (key(1), "alice")
        out = memoryview(bytearray(20))
        assert cipher.open(opener, block, out)
        assert bytes(out) == b"of this tenant alone"
        keys = {record_key(_tenant_key(ring(1).first, name), salt) for name in ("alice", "bob")}
        assert len(keys) == 2

    def test_records_of_another_layout_do_not_open(self) -> None:
        page, _ = self.record(RecordCipher(ring(1), "layout"), "")
        assert RecordCipher(ring(1), "layout").open_header(page) is not None
        assert RecordCipher(ring(1), "other").open_header(page) is None

    def test_pages_that_are_none_are_told_from_those_of_another_key(self) -> None:
        cipher = RecordCipher(ring(1), "layout")
        assert cipher.open_header(memoryview(bytes(PAGE_BYTES))) is None
        page, _ = self.record(RecordCipher(ring(2), "layout"), "")
        with pytest.raises(OtherKey):
            cipher.open_header(page)

    def test_the_longest_tenant_fits(self) -> None:
        cipher = RecordCipher(ring(1), "layout")
        page, block = self.record(cipher, "t" * 1024)
        header, opener = cipher.open_header(page)
        assert header.tenant == "t" * 1024
        assert cipher.open(opener, block, memoryview(bytearray(20)))
