"""The file disks over one directory, with an arena of a few blocks."""

from __future__ import annotations

import mmap
import random
import select
from pathlib import Path
from typing import Any

from mooncake.base import KvLayout
from mooncake.kvstore.config import SsdConfig
from mooncake.kvstore.storage.disk import DiskBlock, DiskDone, DiskScanned
from mooncake.kvstore.storage.disk_files import FileDisks
from mooncake.sim.world.network import SimRegion

ALIGNED = KvLayout(num_layers=2, block_tokens=16, kv_width=64, dtype="float32", fingerprint="a")
ODD = KvLayout(num_layers=3, block_tokens=4, kv_width=9, dtype="float16", fingerprint="a")
NUM_BLOCKS = 8


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class DiskBench:
    """An arena and one directory, scanned."""

    def __init__(
        self, path: Path, layout: KvLayout, num_bytes: int = 1 << 20, **options: Any
    ) -> None:
        self.layout = layout
        self.memory = memoryview(mmap.mmap(-1, NUM_BLOCKS * layout.block_bytes))
        config = SsdConfig(directory=str(path), num_bytes=num_bytes)
        self.disks = FileDisks([config], layout, num_threads=2, **options)
        self.disks.attach(SimRegion(1, len(self.memory), self.memory))
        [self.scanned] = self.wait(1)
        assert isinstance(self.scanned, DiskScanned)

    def wait(self, count: int) -> list[Any]:
        events: list[Any] = []
        while len(events) < count:
            ready, _, _ = select.select([self.disks.fileno()], [], [], 30.0)
            assert ready, "nothing came"
            events += self.disks.poll()
        return events

    def block(self, number: int, slot: int, place: int, **fields: Any) -> DiskBlock:
        return DiskBlock(key(number), slot, place * self.layout.block_bytes, **fields)

    def data(self, place: int) -> memoryview:
        size = self.layout.block_bytes
        return self.memory[place * size : (place + 1) * size]

    def fill(self, place: int, seed: int) -> bytes:
        data = random.Random(seed).randbytes(self.layout.block_bytes)
        self.data(place)[:] = data
        return data

    def write(self, *blocks: DiskBlock) -> DiskDone:
        op_id = self.disks.write(0, list(blocks))
        [done] = self.wait(1)
        assert done.op_id == op_id
        return done

    def read(self, *blocks: DiskBlock) -> DiskDone:
        self.disks.read(0, list(blocks))
        [done] = self.wait(1)
        return done


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Change bytes of the first file of the directory `path`."""
    with (path / "segment-00000.kv").open("r+b") as file:
        file.seek(offset)
        file.write(data)
