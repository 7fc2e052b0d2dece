"""Memory and speed of the Conductor's block index: `python -m benchmarks kv-index`.

Bytes per key, stores and look-ups per second with 10,000,000 keys, and the time of a longest-prefix
look-up of 2,000 keys (a 128k-token prompt) against 1,000 workers. CPU time of the thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.support.servers import load, machine
from mooncake.base import BlockEvents, BlockKey, KeyChain, Tier, WorkerRef, block_keys
from mooncake.kvstore.index.prefix_index import SWEEP_SETS, PrefixIndex

EVENT_KEYS = 500
CHAIN_KEYS = 2_000
ROUNDS = 200
SWEEPS = 256


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
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def fill(index: PrefixIndex, reporters: list[Reporter], num_keys: int) -> dict[str, float]:
    """Store `num_keys`, one in four with a second copy; return what it took."""
    source = random.Random(7)
    sample: list[BlockKey] = []
    longest_s = 0.0
    gc.collect()
    before = resident_bytes()
    seconds = 0.0
    for keys in fresh_keys(source, num_keys):
        first, second = source.sample(reporters, 2)
        copies = keys[: len(keys) // 4]
        start = time.thread_time()
        first.report(keys, [])
        second.report(copies, [])
        took_s = time.thread_time() - start
        seconds, longest_s = seconds + took_s, max(longest_s, took_s)
        sample.append(bytes(memoryview(keys[0])))
    used = resident_bytes() - before
    chain = KeyChain.of(sample)
    lookups_s = median_s(lambda: list(index.prefix_match(chain).holders(len(chain))), 20)
    single_s = median_s(lambda: [index.mask(key) for key in sample[:1000]], 5)
    return {
        "keys": index.num_keys,
        "workers": len(reporters),
        "bytes_per_key": used / num_keys,
        "stores_per_s": (num_keys + num_keys // 4) / seconds,
        "longest_store_ms": 1e3 * longest_s,
        "lookups_per_s": len(sample) / lookups_s,
        "single_us": 1e3 * single_s,
    }


def match(index: PrefixIndex, reporters: list[Reporter]) -> dict[str, float]:
    """Return the time of a longest-prefix look-up when many, few and no workers hold the chain."""
    source = random.Random(8)
    chain = block_keys("bench", [source.randrange(160_000) for _ in range(CHAIN_KEYS * 64)], 64)
    asked = KeyChain.of(chain)
    miss = KeyChain.of(block_keys("miss", list(range(CHAIN_KEYS * 64)), 64))
    for rank, reporter in enumerate(reporters):
        reporter.report(chain[: source.randrange(CHAIN_KEYS) if rank % 2 else CHAIN_KEYS], [])
    assert index.match(asked)[reporters[0].worker.worker_id] == CHAIN_KEYS
    all_s = median_s(lambda: index.match(asked))
    for reporter in reporters[4:]:
        reporter.report([], chain)
    few_s = median_s(lambda: index.match(asked))
    miss_s = median_s(lambda: index.match(miss))
    return {"match_all_ms": 1e3 * all_s, "match_few_ms": 1e3 * few_s, "match_none_ms": 1e3 * miss_s}


def lose(index: PrefixIndex, reporters: list[Reporter]) -> dict[str, float]:
    """Return the time to lose a worker, and of the reports that sweep its keys away."""
    start = time.thread_time()
    index.remove_worker(reporters[0].worker.worker_id)
    removed_s = time.thread_time() - start
    sweeps = []
    for _ in range(SWEEPS):
        start = time.thread_time()
        reporters[1].report([], [])
        sweeps.append(time.thread_time() - start)
    return {
        "lose_us": 1e6 * removed_s,
        "sweep_ms": 1e3 * statistics.median(sweeps),
        "longest_sweep_ms": 1e3 * max(sweeps),
    }


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kv-index", description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    index = PrefixIndex()
    reporters = [Reporter(index, number) for number in range(args.workers)]
    found = fill(index, reporters, args.keys)
    found |= match(index, reporters)
    found |= lose(index, reporters)
    if args.json:
        print(json.dumps(found))
        return 0
    print(
        f"{machine()}; {found['keys']:,.0f} keys on {args.workers:,} workers, every fourth twice, "
        f"load {load()}\n\n"
        f"| | |\n|---|---|\n"
        f"| memory | {found['bytes_per_key']:.0f} B a key |\n"
        f"| stores, {EVENT_KEYS} a report | {found['stores_per_s']:,.0f} /s, "
        f"longest report {found['longest_store_ms']:.1f} ms |\n"
        f"| look-ups of many keys at once | {found['lookups_per_s']:,.0f} /s |\n"
        f"| look-up of a single key | {found['single_us']:.1f} us |\n"
        f"| longest prefix of {CHAIN_KEYS:,} keys, each worker has half of them or all "
        f"| {found['match_all_ms']:.2f} ms |\n"
        f"| the same, 4 workers have it | {found['match_few_ms']:.2f} ms |\n"
        f"| the same, nobody has | {found['match_none_ms']:.4f} ms |\n"
        f"| a worker lost | {found['lose_us']:.0f} us |\n"
        f"| a report that sweeps up to {SWEEP_SETS:,} sets of holders of it "
        f"| {found['sweep_ms']:.2f} ms, longest {found['longest_sweep_ms']:.2f} |"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
