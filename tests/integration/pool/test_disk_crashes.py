"""A process that writes blocks to disk is killed at random points, again and again: the next one
finds only whole blocks, or knows that they are not.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.base import KvLayout
from mooncake.crypto.keys import Key, KeyRing
from mooncake.kvstore.config import SsdConfig
from mooncake.kvstore.storage.disk import DiskBlock, DiskDone, DiskScanned, Outcome
from mooncake.kvstore.storage.disk_files import FileDisks
from mooncake.sim.world.network import SimRegion
from tests.support.waiting import LONG_S

LAYOUT = KvLayout(num_layers=4, block_tokens=64, kv_width=256, dtype="float32", fingerprint="t")
NUM_SLOTS = 48
NUM_BYTES = 4096 + NUM_SLOTS * (4096 + LAYOUT.block_bytes)
NUM_KILLS = 12
KINDS = {"plain": None, "encrypted": KeyRing([Key(bytes(32))])}


def content(number: int) -> bytes:
    return random.Random(number).randbytes(64) * (LAYOUT.block_bytes // 64)


class Store:
    """The adapter over one directory, with an arena of a few blocks."""

    def __init__(self, path: Path, keys: KeyRing | None = None) -> None:
        self.memory = memoryview(mmap.mmap(-1, 4 * LAYOUT.block_bytes))
        config = SsdConfig(directory=str(path), num_bytes=NUM_BYTES)
        self.disks = FileDisks([config], LAYOUT, num_threads=2, keys=keys)
        self.disks.attach(SimRegion(1, len(self.memory), self.memory))
        [scanned] = self.wait(1)
        assert isinstance(scanned, DiskScanned)
        self.scanned = scanned

    def wait(self, count: int) -> list[DiskDone | DiskScanned]:
        events: list[DiskDone | DiskScanned] = []
        while len(events) < count:
            select.select([self.disks.fileno()], [], [])
            events += self.disks.poll()
        return events

    def place(self, number: int) -> memoryview:
        return self.memory[number * LAYOUT.block_bytes : (number + 1) * LAYOUT.block_bytes]


def write_for_ever(path: Path, seed: int, kind: str) -> None:
    """Overwrite random slots with other blocks, and say when it has begun."""
    store, chance = Store(path, KINDS[kind]), random.Random(seed)
    print("begun", flush=True)
    while True:
        slots = chance.sample(range(NUM_SLOTS), 4)
        numbers = [chance.randrange(1000) * NUM_SLOTS + slot for slot in slots]
        for place, number in enumerate(numbers):
            store.place(place)[:] = content(number)
        for place, (slot, number) in enumerate(zip(slots, numbers, strict=True)):
            key = number.to_bytes(16, "big")
            store.disks.write(0, [DiskBlock(key, slot, place * LAYOUT.block_bytes)])
        store.wait(4)


def check(path: Path, kind: str) -> tuple[int, int]:
    """Read everything that is found; return (whole blocks, blocks known to be torn)."""
    store = Store(path, KINDS[kind])
    torn = 0
    for found in store.scanned.found:
        store.disks.read(0, [DiskBlock(found.key, found.slot, 0)])
        [done] = store.wait(1)
        assert isinstance(done, DiskDone)
        if done.outcomes == [Outcome.OK]:
            assert bytes(store.place(0)) == content(int.from_bytes(found.key, "big"))
        else:
            assert done.outcomes == [Outcome.CORRUPT]
            torn += 1
    store.disks.close()
    return len(store.scanned.found) - torn, torn + store.scanned.num_dropped


@pytest.mark.parametrize("kind", KINDS)
def test_no_crash_makes_a_wrong_block(tmp_path: Path, kind: str) -> None:
    chance = random.Random(11)
    num_whole = 0
    for number in range(NUM_KILLS):
        module = "tests.integration.pool.test_disk_crashes"
        writer = subprocess.Popen(
            [sys.executable, "-m", module, str(tmp_path), str(number), kind],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        # Not before some bytes have moved, whatever the machine is doing; then at any moment.
        select.select([writer.stdout], [], [], chance.random() * 0.3)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        whole, torn = check(tmp_path, kind)
        num_whole += whole
        assert whole + torn <= NUM_SLOTS
        assert torn <= 4 * (number + 1), "more was torn than was ever being written"
    assert num_whole > NUM_KILLS, "nothing was ever written"


def test_a_directory_is_one_process_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    module = "tests.integration.pool.test_disk_crashes"
    other = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path), "0", "plain"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "in use by another process" in other.stderr
    store.disks.close()


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
