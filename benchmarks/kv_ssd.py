"""Throughput of the SSD tier beside plain large `pread` and `pwrite` on the same disk:
`python -m benchmarks kv-ssd --directory /mnt/nvme0 --size 4GiB`.

Plain I/O uses the same direct mode, the same number of threads and requests as large, and neither
hashes nor names what it moves. "Encrypted" is the tier with `--ssd-encryption`. Rounds of all
alternate, so that a disk's moods hit all alike. Prints the median of each and their ratio, and what
hashing and decrypting alone cost.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.support.bars import bars, write_page
from mooncake.base import KvLayout, format_bytes, parse_bytes
from mooncake.crypto.aead import TAG_BYTES, decrypt_into, encrypt_into
from mooncake.crypto.keys import KEY_BYTES, Key, KeyRing
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.config import SsdConfig
from mooncake.kvstore.storage.disk import DiskBlock, DiskDone, Outcome
from mooncake.kvstore.storage.disk_files import FileDisks
from mooncake.sim.world.network import SimRegion

K2_BLOCK = KvLayout(
    num_layers=61, block_tokens=64, kv_width=576, dtype="bfloat16", fingerprint="bench"
)
SMALL_BLOCK = KvLayout(
    num_layers=8, block_tokens=64, kv_width=64, dtype="bfloat16", fingerprint="bench"
)


class Tier:
    """Blocks between an arena and the real adapter."""

    def __init__(
        self,
        directory: Path,
        layout: KvLayout,
        num_blocks: int,
        threads: int,
        keys: KeyRing | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory = memoryview(mmap.mmap(-1, num_blocks * layout.block_bytes))
        self.memory[:] = np.random.default_rng(0).bytes(len(self.memory))
        step = layout.block_bytes
        self.checksums: list[int | None] = [
            checksum_of(self.memory[start : start + step], layout)
            for start in range(0, len(self.memory), step)
        ]
        size = 2 * len(self.memory) + (2 << 30)
        config = SsdConfig(directory=str(directory), num_bytes=size)
        self.disks = FileDisks([config], layout, num_threads=threads, keys=keys)
        self.disks.attach(SimRegion(1, len(self.memory), self.memory))
        self._wait(1)

    def _wait(self, count: int) -> None:
        while count:
            select.select([self.disks.fileno()], [], [])
            for event in self.disks.poll():
                count -= 1
                if isinstance(event, DiskDone) and set(event.outcomes) != {Outcome.OK}:
                    raise SystemExit(f"the disk failed: {set(event.outcomes)}")

    def groups(self, per_op: int, *, hashed: bool = False) -> list[list[DiskBlock]]:
        """Return all blocks, `per_op` neighbours an operation; `hashed`: their checksums are known,
        as those of blocks are that have been in the pool for a moment.
        """
        size = self.layout.block_bytes
        known = self.checksums if hashed else [None] * self.num_blocks
        blocks = [
            DiskBlock(n.to_bytes(16, "big"), n, n * size, "", known[n])
            for n in range(self.num_blocks)
        ]
        return [blocks[n : n + per_op] for n in range(0, len(blocks), per_op)]

    def move(
        self, call: Callable[[int, list[DiskBlock]], int], groups: list[list[DiskBlock]]
    ) -> None:
        """Move all blocks, an operation a group."""
        for group in groups:
            call(0, group)
        self._wait(len(groups))


class Plain:
    """The same bytes by plain calls on one preallocated file."""

    def __init__(self, path: Path, memory: memoryview, threads: int) -> None:
        self._memory = memory
        self._pool = ThreadPoolExecutor(threads)
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, len(memory))

    def move(self, call: Callable[[int, list[memoryview], int], int], num_bytes: int) -> None:
        """Move everything in requests of `num_bytes`."""

        def one(offset: int) -> None:
            view = self._memory[offset : offset + num_bytes]
            if call(self._fd, [view], offset) != len(view):
                raise SystemExit("a plain call was cut short")

        list(self._pool.map(one, range(0, len(self._memory), num_bytes)))

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


def gigabytes_per_s(num_bytes: int, work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - began_s) / 1e9


def compare(
    directory: Path, layout: KvLayout, num_bytes: int, args: argparse.Namespace
) -> tuple[str, dict[str, float]]:
    """Return one block size's table for people, and its GB/s by way."""
    num_blocks = max(1, num_bytes // layout.block_bytes)
    directory.mkdir()
    tier = Tier(directory / "tier", layout, num_blocks, args.threads)
    keys = KeyRing([Key(os.urandom(KEY_BYTES))])
    sealed = Tier(directory / "sealed", layout, num_blocks, args.threads, keys)
    plain = Plain(directory / "plain", tier.memory, args.threads)
    per_op = max(1, (16 << 20) // layout.block_bytes)
    request = per_op * layout.block_bytes
    total = num_blocks * layout.block_bytes
    hashed, bare = tier.groups(per_op, hashed=True), tier.groups(per_op)
    ways: dict[str, Callable[[], None]] = {
        "plain write": lambda: plain.move(os.pwritev, request),
        "tier write": lambda: tier.move(tier.disks.write, hashed),
        "tier write+hash": lambda: tier.move(tier.disks.write, bare),
        "plain read": lambda: plain.move(os.preadv, request),
        "tier read": lambda: tier.move(tier.disks.read, hashed),
        "encrypted write": lambda: sealed.move(sealed.disks.write, hashed),
        "encrypted read": lambda: sealed.move(sealed.disks.read, hashed),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, work in ways.items():
            rate = gigabytes_per_s(total, work)
            if number:  # the first round allocates files and faults memory in
                rates[name].append(rate)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    size = layout.block_bytes

    def hash_all() -> None:
        for start in range(0, total, size):
            checksum_of(tier.memory[start : start + size], layout)

    stored = bytearray(size + TAG_BYTES)
    encrypt_into(bytes(KEY_BYTES), tier.memory[:size], memoryview(stored))

    block, tag = memoryview(stored)[:size], bytes(stored[size:])

    def decrypt_all() -> None:
        for start in range(0, total, size):
            out = sealed.memory[start : start + size]
            decrypt_into(bytes(KEY_BYTES), tag, block, out)

    hashing = gigabytes_per_s(total, hash_all)
    decrypting = gigabytes_per_s(total, decrypt_all)
    sizes = f"{size / 2**20:.2f} MiB, {request / 2**20:.1f} MiB a request, {total / 2**30:.1f} GiB"
    lines = [f"blocks of {sizes}, {args.threads} threads, direct={tier.disks.is_direct}"]
    for way, base in (
        ("tier write", "plain write"), ("tier write+hash", "plain write"),
        ("tier read", "plain read"), ("encrypted write", "plain write"),
        ("encrypted read", "plain read"), ("encrypted write", "tier write"),
        ("encrypted read", "tier read"),
    ):  # fmt: skip
        ratio = statistics.median(a / b for a, b in zip(rates[way], rates[base], strict=True))
        ours, theirs = medians[way], medians[base]
        lines.append(f"  {way:15} {ours:6.2f} GB/s   {base:11} {theirs:6.2f} GB/s   {ratio:.2f}x")
    lines.append(
        f"  one thread, in memory: xxh3-64 {hashing:.1f} GB/s, decrypting {decrypting:.1f}"
    )
    tier.disks.close()
    sealed.disks.close()
    plain.close()
    (directory / "plain").unlink()
    return "\n".join(lines), medians


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kv-ssd", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size", default="1GiB", help="bytes moved in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--page", type=Path, default=Path("build/benchmarks/kv_ssd.html"))
    args = parser.parse_args(argv)
    tables: list[str] = []
    groups: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for layout in (K2_BLOCK, SMALL_BLOCK):
            inside = Path(directory) / str(layout.block_bytes)
            told, rates = compare(inside, layout, parse_bytes(args.size), args)
            print(told)
            tables.append(told)
            groups[f"blocks of {format_bytes(layout.block_bytes)}"] = rates
    title = "The SSD tier beside plain I/O"
    write_page(args.page, title, "\n".join(tables), [bars(title, "GB/s", groups, "tier")])
    print(f"plot: {args.page}")
    return 0
