"""Memory and speed of the Conductor's block index: `python benchmarks/kv_index.py --keys 10000000`.

Prints bytes per key, stores, look-ups and removals per second, and the time of a longest-prefix
look-up of 2,000 keys (a 128k-token prompt) against 1,000 workers.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mooncake.base import BlockEvents, BlockKey, Tier, WorkerRef, block_keys
from mooncake.kvstore.directory import NUM_SHARDS, SWEEP_KEYS
from mooncake.kvstore.index import PrefixIndex

EVENT_KEYS = 500
CHAIN_KEYS = 2_000
ROUNDS = 200


def resident_bytes() -> int:
    """Return this process' resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Reporter:
    """One worker's numbered events."""

    def __init__(self, index: PrefixIndex, number: int) -> None:
        self.worker = WorkerRef(
            f"kv-{number}", "boot", f"tcp://10.0.{number // 250}.{number % 250}"
        )
        self._index = index
        self._sequence_no = 0
        index.add_worker(self.worker, Tier.DRAM)

    def report(self, stored: list[BlockKey], removed: list[BlockKey]) -> None:
        self._sequence_no += 1
        self._index.apply(
            BlockEvents(
                worker=self.worker,
                tier=Tier.DRAM,
                sequence_no=self._sequence_no,
                stored=stored,
                removed=removed,
            )
        )


def fresh_keys(source: random.Random, count: int) -> Iterator[list[BlockKey]]:
    """Yield `count` random keys in batches of one event message."""
    for start in range(0, count, EVENT_KEYS):
        yield [source.randbytes(16) for _ in range(min(EVENT_KEYS, count - start))]


def median_s(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median time of `run` over `rounds`."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fill(reporters: list[Reporter], num_keys: int) -> tuple[float, float, list[BlockKey]]:
    """Store `num_keys`, one in four with a second copy; return (bytes, seconds, some keys)."""
    source = random.Random(7)
    sample: list[BlockKey] = []
    gc.collect()
    before = resident_bytes()
    seconds = 0.0
    for keys in fresh_keys(source, num_keys):
        first, second = source.sample(reporters, 2)
        copies = keys[: len(keys) // 4]
        start = time.perf_counter()
        first.report(keys, [])
        second.report(copies, [])
        seconds += time.perf_counter() - start
        sample.append(keys[0])
    return resident_bytes() - before, seconds, sample


def report_fill(index: PrefixIndex, reporters: list[Reporter], num_keys: int) -> None:
    """Fill the index and print what it took."""
    used, seconds, sample = fill(reporters, num_keys)
    stored = num_keys + num_keys // 4
    print(f"{index.num_keys:,} keys, {stored:,} replicas on {len(reporters):,} workers")
    print(f"memory    {used / num_keys:12.0f} bytes/key ({used / 2**30:.2f} GiB)")
    print(f"stores    {stored / seconds:12,.0f} /s")
    lookups_s = median_s(lambda: [index.num_replicas(key) for key in sample], 20)
    print(f"look-ups  {len(sample) / lookups_s:12,.0f} /s (number of replicas of a key)")


def report_match(index: PrefixIndex, reporters: list[Reporter]) -> None:
    """Print the time of a longest-prefix look-up when many, few and no workers hold the chain."""
    source = random.Random(8)
    chain = block_keys("bench", [source.randrange(160_000) for _ in range(CHAIN_KEYS * 64)], 64)
    miss = block_keys("miss", list(range(CHAIN_KEYS * 64)), 64)
    for rank, reporter in enumerate(reporters):
        reporter.report(chain[: source.randrange(CHAIN_KEYS) if rank % 2 else CHAIN_KEYS], [])
    assert index.match(chain)[reporters[0].worker.worker_id] == CHAIN_KEYS
    print(f"match of {CHAIN_KEYS:,} keys against {len(reporters):,} workers, median of {ROUNDS}:")
    all_ms = 1e3 * median_s(lambda: index.match(chain))
    print(f"  every worker holds half of it on average, or all  {all_ms:8.3f} ms")
    for reporter in reporters[4:]:
        reporter.report([], chain)
    few_ms = 1e3 * median_s(lambda: index.match(chain))
    print(f"  4 workers hold it, or some of it                  {few_ms:8.3f} ms")
    miss_ms = 1e3 * median_s(lambda: index.match(miss))
    print(f"  nobody holds it                                   {miss_ms:8.4f} ms")


def report_loss(index: PrefixIndex, reporters: list[Reporter]) -> None:
    """Print the time to lose a worker and to sweep its keys away."""
    start = time.perf_counter()
    index.remove_worker(reporters[0].worker.worker_id)
    removed_us = 1e6 * (time.perf_counter() - start)
    sweeps = []
    for _ in range(NUM_SHARDS):
        start = time.perf_counter()
        reporters[1].report([], [])
        sweeps.append(time.perf_counter() - start)
    usual_ms, worst_ms = 1e3 * statistics.median(sweeps), 1e3 * max(sweeps)
    print(f"a worker lost: {removed_us:.1f} us; its keys are swept with the next reports,")
    print(f"  up to {SWEEP_KEYS:,} keys each: {usual_ms:.2f} ms median, {worst_ms:.2f} ms longest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1_000)
    args = parser.parse_args()
    index = PrefixIndex()
    reporters = [Reporter(index, number) for number in range(args.workers)]
    report_fill(index, reporters, args.keys)
    report_match(index, reporters)
    report_loss(index, reporters)


if __name__ == "__main__":
    main()
