"""Transfer speed between two processes: ours over TCP, as it is, with MACs and encrypted, and
shared memory beside upstream's transfer engine and what the machine can do.

    python -m benchmarks transfer [--sizes 1MiB,64MiB] [--batches 1,16] [--rounds N] [--page OUT]

All ways move blocks between distinct memory and take turns in every round, so that a slow minute of
the machine hits all alike. Shown are medians over the rounds and of the ratios within one round,
and, for machines that do other work meanwhile (which only ever takes time away), what each way
reached in its fastest tenth. Upstream is run only in a network that holds nothing but the loopback,
which is made where allowed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import upstream
from benchmarks.support.bars import bars, write_page
from benchmarks.support.servers import load, machine
from benchmarks.support.transfer_ways import Way, World
from mooncake.base.memory import format_bytes, parse_bytes
from mooncake.telemetry.stats import percentile

BYTES_A_TURN = 16 * 2**20
WARM_UP_BYTES = 2**16
COMPARED = {
    "tcp": ["upstream {op}", "raw sockets", "raw socket"],
    "mac": ["tcp {op}"],
    "encrypt": ["tcp {op}"],
    "shm": ["upstream {op}", "memcpy"],
}
"""What ours is divided by."""

Case = tuple[int, int]
"""(block bytes, blocks of a batch)."""
Speeds = dict[Case, dict[str, list[float]]]
"""GB/s of each round, by way."""


def measure(ways: dict[str, Way], cases: Sequence[Case], rounds: int) -> Speeds:
    """Run all ways of a case one after the other, `rounds` times after one to warm up."""
    speeds: Speeds = {}
    first = 0
    for size, batch in cases:
        times = max(1, BYTES_A_TURN // (size * batch))
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, way in ways.items():
                # Each goes on where the one before left off: none finds its memory in a cache. All
                # find their code there: a little is moved before the clock starts.
                way([WARM_UP_BYTES, 1, 2, first])
                rate = size * batch * times / way([size, batch, times, first]) / 1e9
                first += batch * times
                if number > 0:
                    found[name].append(rate)
        speeds[size, batch] = found
        print(f"{title(size, batch)} done", file=sys.stderr)
    return speeds


def title(size: int, batch: int) -> str:
    """Return how a case is called."""
    return format_bytes(size) if batch == 1 else f"{batch} x {format_bytes(size)}"


def table(speeds: Speeds, *, fastest: bool) -> str:
    """Return a table: GB/s of each way, then the ratios of ours; of medians or fastest tenths."""
    names = list(next(iter(speeds.values())))
    kind = "fastest tenth" if fastest else "median"
    head = f"| {kind} | " + " | ".join(title(*case) for case in speeds) + " |"
    lines = [head, "|---" * (1 + len(speeds)) + "|"]
    one = fastest_tenth if fastest else statistics.median
    for name in names:
        cells = (f"{one(row[name]):.1f}" for row in speeds.values())
        lines.append(f"| {name}, GB/s | " + " | ".join(cells) + " |")
    ratio = fastest_ratio if fastest else paired
    for name in names:
        protocol, _, op = name.partition(" ")
        for base in (text.format(op=op) for text in COMPARED.get(protocol, [])):
            if base in names:
                cells = (f"{ratio(row[name], row[base]):.2f}x" for row in speeds.values())
                lines.append(f"| {name} / {base} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fastest_tenth(values: Sequence[float]) -> float:
    """Return the 90th percentile of speeds."""
    return percentile(values, 90)


def fastest_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the ratio of the fastest tenths."""
    return fastest_tenth(ours) / fastest_tenth(theirs)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def plots(speeds: Speeds) -> list[str]:
    """Return a plot for each number of blocks of a batch."""
    found = []
    for batch in dict.fromkeys(batch for _, batch in speeds):
        groups = {
            format_bytes(size): {name: fastest_tenth(values) for name, values in row.items()}
            for (size, of), row in speeds.items()
            if of == batch
        }
        found.append(
            bars(
                f"Batches of {batch}, by size of a block", "GB/s, fastest tenth", groups, "tcp shm"
            )
        )
    return found


def main(argv: Sequence[str]) -> int:
    """See the module."""
    args = _arguments(argv)
    reason = "not asked for" if args.no_upstream else upstream.prepare("transfer", list(argv))
    sizes = [parse_bytes(text) for text in args.sizes.split(",")]
    cases = [(size, int(batch)) for batch in args.batches.split(",") for size in sizes]
    about = machine()
    world = World(with_upstream=reason is None, apart=args.apart)
    try:
        speeds = measure(world.ways, cases, args.rounds)
    finally:
        world.close()
    peer = f"upstream {upstream.VERSION}" if reason is None else f"without upstream ({reason})"
    said = f"{about}; {args.rounds} rounds, load {load()}; {peer}\n\n"
    said += f"{table(speeds, fastest=False)}\n\n{table(speeds, fastest=True)}"
    print(said)
    write_page(args.page, "Moving bytes between two processes", said, plots(speeds))
    print(f"\nplots: {args.page}")
    if args.json is not None:
        text = {title(*case): row for case, row in speeds.items()}
        args.json.write_text(json.dumps(text, indent=2) + "\n")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks transfer", description=__doc__)
    parser.add_argument("--sizes", default="1MiB,4MiB,16MiB,64MiB")
    parser.add_argument("--batches", default="1,16", help="blocks of a batch")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-upstream", action="store_true")
    parser.add_argument(
        "--apart", action="store_true", help="each end has cores of its own, as on two machines"
    )
    parser.add_argument("--page", type=Path, default=Path("build/benchmarks/transfer.html"))
    parser.add_argument("--json", type=Path, help="write GB/s of every round to this file")
    return parser.parse_args(argv)
