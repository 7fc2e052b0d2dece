"""A file as a device's memory: what is copied from it, and that nothing is copied to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mooncake.base.errors import TransferError
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.transfer import file_memory
from mooncake.transfer.device import read_now, write_now
from mooncake.transfer.file_memory import FileMemory

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def memory(tmp_path: Path, threads: ThreadPoolExecutor) -> FileMemory:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return FileMemory(PlainBytes(path).read(0, len(CONTENT)), threads)


def test_ranges_are_gathered_in_their_order(memory: FileMemory) -> None:
    assert memory.num_bytes == len(CONTENT)
    assert read_now(memory, [(0, len(CONTENT))]) == CONTENT
    assert read_now(memory, [(7000, 900), (3, 1)]) == CONTENT[7000:7900] + CONTENT[3:4]


class Later:
    """Threads that run when they are told to."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def submit(self, call: Callable[..., None], *args: object) -> None:
        self.calls.append(functools.partial(call, *args))


def test_a_copy_has_ended_when_all_its_parts_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, threads touch the window; also when one of the parts has failed."""
    monkeypatch.setattr(file_memory, "PART_BYTES", 100)
    threads: Any = Later()
    memory = FileMemory(memoryview(bytearray(CONTENT)), threads)
    for room, ranges in ((650, [(70, 250), (1000, 400)]), (620, [(0, 650)])):
        window = bytearray(room)
        ended: list[Any] = []
        memory.copy_out(ranges, memoryview(window), ended.append)
        assert len(threads.calls) == 7
        for call in reversed(threads.calls):
            assert ended == []
            call()
        threads.calls.clear()
        [error] = ended
        if room == 650:
            assert error is None
            assert window == CONTENT[70:320] + CONTENT[1000:1400]
        else:
            assert "cannot be copied" in error
            assert window[:600] == CONTENT[:600]


def test_nothing_is_written_to_a_file_and_no_nic_gets_it(memory: FileMemory) -> None:
    with pytest.raises(TransferError, match="only read"):
        write_now(memory, [(0, 3)], memoryview(bytearray(3)))
    assert read_now(memory, [(0, 3)]) == CONTENT[:3]
    assert not memory.reachable_by_nics()
    assert memory.dmabuf() is None


def test_a_copy_that_fails_is_told(memory: FileMemory, threads: ThreadPoolExecutor) -> None:
    """The window that it was to fill is given back, and the threads copy on."""
    errors: list[str | None] = []
    memory.copy_out([(0, 100)], memoryview(bytearray(5)), errors.append)
    assert read_now(memory, [(5, 5)]) == CONTENT[5:10]
    threads.shutdown()
    memory.copy_out([(0, 5)], memoryview(bytearray(5)), errors.append)
    failed, ended = errors
    assert "cannot be copied" in str(failed)
    assert ended == "the file is not lent any more"
