"""Files of slots across changes of their limit: what still fits stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from mooncake.base import KvLayout
from mooncake.kvstore.storage import segment_files
from mooncake.kvstore.storage.segment_files import SegmentFiles

LAYOUT = KvLayout(num_layers=2, block_tokens=16, kv_width=64, dtype="float32", fingerprint="a")
FILE_BYTES = 1 << 16


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES", FILE_BYTES)


def numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("segment-")) for path in directory.glob("*.kv"))


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize(
    ("files_then", "kept"),
    [(4, [0, 1, 3]), (9, [0, 1, 3]), (3, [0, 1]), (1, [0])],
    ids=["as before", "more", "less", "much less"],
)
def test_another_limit_costs_only_what_is_beyond_it(
    tmp_path: Path, files_then: int, kept: list[int]
) -> None:
    first = SegmentFiles(tmp_path, LAYOUT, 4 * FILE_BYTES, direct=False)
    per_file = first.num_slots // 4
    assert per_file > 1
    for number in (0, 1, 3):
        first.make_room(number * per_file)
        first.blocks(os.pwritev, number * per_file + 1, [memoryview(bytes([number]) * 4096)])
    first.close()
    assert numbers(tmp_path) == [0, 1, 3]
    limit = files_then * FILE_BYTES
    again = SegmentFiles(tmp_path, LAYOUT, limit, direct=False)
    found = [slots.start // per_file for slots in again.existing_slots()]
    assert found == numbers(tmp_path) == kept
    assert again.num_foreign == 3 - len(kept)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    for number in kept:
        page = memoryview(bytearray(4096))
        again.blocks(os.preadv, number * per_file + 1, [page])
        assert bytes(page) == bytes([number]) * 4096
    again.close()


def test_a_file_whose_sealed_header_is_no_text_is_foreign(tmp_path: Path) -> None:
    first = SegmentFiles(tmp_path, LAYOUT, 2 * FILE_BYTES, direct=False)
    first.make_room(0)
    first.close()
    path = tmp_path / "segment-00000.kv"
    fields = bytearray(path.read_bytes()[:29])
    fields[28:29] = b"\xff"  # of the fingerprint "a"
    page = bytes(fields) + xxhash.xxh3_64_intdigest(bytes(fields)).to_bytes(8, "little")
    with path.open("r+b") as file:
        file.write(page)
    again = SegmentFiles(tmp_path, LAYOUT, 2 * FILE_BYTES, direct=False)
    assert again.num_foreign == 1
    again.close()
