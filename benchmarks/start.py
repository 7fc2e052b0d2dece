"""From `mooncake serve` to the first token: `python -m benchmarks start [DIR]`.

A server is started as a user does; as soon as it is ready it gets one prompt, then others of the
same length. The first is cold: what a process does once falls on it. The CPU time of the server's
processes stands beside each wall time. The first start of all compiles code and measures; it is not
counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.serve import COLOCATED, SPLIT, drive, layouts, write_model
from benchmarks.support.servers import ROOT, Layout, Server, load, machine, running
from mooncake.api.http.event_loop import run_in_loop
from mooncake.bench.samples import RandomShape

NUM_WARM = 4


def timed(server: Server, action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the server's CPU seconds that `action` takes."""
    began, began_cpu = time.perf_counter(), server.cpu_s()
    action()
    return time.perf_counter() - began, server.cpu_s() - began_cpu


def measure(layout: Layout, model: Path, prompt: RandomShape, seed: int) -> str:
    """Start a server once; return a row of the table."""
    began = time.perf_counter()
    with running(layout) as server:
        start_s, start_cpu_s = time.perf_counter() - began, server.cpu_s()
        took = [
            timed(server, lambda turn=turn: run_in_loop(drive(server, model, prompt, turn, 1, 1)))
            for turn in range(seed, seed + 1 + NUM_WARM)
        ]
    (first_s, first_cpu_s), *warm = took
    warm_s, warm_cpu_s = (statistics.median(column) for column in zip(*warm, strict=True))
    pairs = (
        (start_s, start_cpu_s),
        (first_s, first_cpu_s),
        (warm_s, warm_cpu_s),
        (first_s / warm_s, first_cpu_s / warm_cpu_s),
    )
    columns = " | ".join(f"{wall:.2f} ({cpu:.2f})" for wall, cpu in pairs)
    return f"| {layout.name} | {columns} | {load()} |"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks start", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "checkpoints" / "k2-small")
    parser.add_argument("--only", nargs="+", default=(COLOCATED, SPLIT), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args(argv)
    write_model(args.model)
    print(f"{machine()}; {args.model.name}, bf16, {args.input_len} tokens; seconds (CPU seconds)")
    print("| server | start to ready | first prompt | a warm one | first / warm | load |")
    print("|---|---|---|---|---|---|", flush=True)
    prompt = RandomShape(input_len=args.input_len, output_len=1)
    for number in range(args.rounds):
        for layout in layouts(args.model):
            if layout.name in args.only:
                seed = args.seed + 100 * number
                print(measure(layout, args.model, prompt, seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
