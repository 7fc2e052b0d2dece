"""Contents on the disk: whole or not there, lines wherever slices are cut, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.api.batches.file_area import ABANDONED_S, FileArea, LineReader
from mooncake.api.batches.lines import TextLine
from mooncake.base import ConfigError, Unavailable


def area_with(tmp_path: Path, content: bytes) -> FileArea:
    area = FileArea(tmp_path)
    writer = area.writer("file-1", "me")
    writer.write(content)
    writer.finish()
    return area


def read_all(area: FileArea, num_bytes: int, longest: int = 100) -> list[TextLine]:
    reader, found = LineReader(area, "file-1", longest), list[TextLine]()
    while not reader.at_end:
        found += reader.read(num_bytes)
    return found


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    area = FileArea(tmp_path / "deep" / "files")
    writer = area.writer("file-1", "me")
    writer.write(b"ab")
    writer.write(b"c")
    with pytest.raises(Unavailable, match="batch-dir"):
        area.read("file-1", 0, 10)
    writer.finish()
    writer.discard()  # does nothing any more
    assert writer.num_bytes == 3
    assert area.read("file-1", 1, 10) == b"bc"
    assert area.read("file-1", 3, 10) == b""
    area.delete("file-1")
    area.delete("file-1")
    assert not list((tmp_path / "deep" / "files").iterdir())


def test_what_is_discarded_leaves_nothing(tmp_path: Path) -> None:
    writer = FileArea(tmp_path).writer("file-1", "me")
    writer.write(b"ab")
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_what_is_discarded_leaves_nothing_on_a_full_disk(tmp_path: Path) -> None:
    writer = FileArea(tmp_path).writer("file-1", "me")
    (tmp_path / "file-1.me.part").symlink_to("/dev/full")
    writer.write(b"ab")  # it is in memory still, and closing writes it
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_an_empty_file_can_be_written(tmp_path: Path) -> None:
    area = FileArea(tmp_path)
    area.writer("file-1", "me").finish()
    assert area.read("file-1", 0, 1) == b""


def test_a_folder_that_cannot_be_made_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="batch-dir"):
        FileArea(tmp_path / "file" / "files")


def test_a_sweep_deletes_what_has_rested_and_belongs_to_nobody(tmp_path: Path) -> None:
    for name in ("file-1", "file-2", "file-3.gw.part", "file-4.gw.part"):
        (tmp_path / name).write_bytes(b"x")
    for name in ("file-1", "file-2", "file-3.gw.part"):
        os.utime(tmp_path / name, (1000, 1000))
    area = FileArea(tmp_path)
    assert area.sweep({"file-1"}, 1000 + ABANDONED_S + 1) == 2
    assert {each.name for each in tmp_path.iterdir()} == {"file-1", "file-4.gw.part"}


def test_lines_are_numbered_and_empty_ones_left_out(tmp_path: Path) -> None:
    area = area_with(tmp_path, b"one\n\n  \r\nfour\r\nfive")
    wanted = [(1, b"one"), (4, b"four\r"), (5, b"five")]
    assert read_all(area, 1000) == wanted
    assert [(number, text) for number, text in read_all(area, 1)] == wanted


def test_a_line_that_is_too_long_has_no_text(tmp_path: Path) -> None:
    area = area_with(tmp_path, b"x" * 50 + b"\nshort\n" + b"y" * 50)
    for num_bytes in (1, 7, 1000):
        assert read_all(area, num_bytes, longest=10) == [(1, None), (2, b"short"), (3, None)]


@given(
    st.lists(st.binary(max_size=12).filter(lambda each: b"\n" not in each), max_size=8),
    st.integers(1, 9),
)
def test_lines_do_not_depend_on_where_slices_are_cut(texts: list[bytes], num_bytes: int) -> None:
    class Memory(FileArea):
        def __init__(self) -> None:
            self.content = b"\n".join(texts)

        def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
            return self.content[offset : offset + num_bytes]

    wanted = [
        TextLine(number, text if len(text) <= 6 else None)
        for number, text in enumerate(texts, 1)
        if len(text) > 6 or text.strip()
    ]
    assert read_all(Memory(), num_bytes, longest=6) == wanted
