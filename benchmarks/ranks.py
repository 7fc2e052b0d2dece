"""One engine of one process with two threads against two ranks with one each, and what a lead tells
its followers: `python -m benchmarks ranks DIR`.

Rounds of both engines take turns, so that they meet the same load of the machine; a round's number
is the shortest of a few steps, the table shows the median of the rounds.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from pathlib import Path

from benchmarks.support.servers import load, machine
from mooncake.engine.plan import StepSlot
from mooncake.engine.step_log import StepWriter, encode
from mooncake.launch.worker.direct import DirectEngine
from mooncake.model.parallel.lead import receive, send

SHAPES = {
    "decode, 1 sequence at 1,024": (1, 1, 1024),
    "decode, 8 sequences at 512": (8, 1, 512),
    "prefill, 512 tokens": (1, 512, 0),
}
"""Name -> sequences, new tokens of each, tokens each has in its KV before."""
BATCH, CONTEXT_PAGES, NUM_STEPS = 64, 512, 2000


def broadcast() -> tuple[int, float, float]:
    """Return the bytes of a decode step at B=64 and 32k tokens of context, and microseconds until a
    follower has it and of the lead's CPU: medians.
    """
    ours, theirs = socket.socketpair()
    heard: list[float] = []

    def follow() -> None:
        while receive(theirs) is not None:
            heard.append(time.perf_counter())

    thread = threading.Thread(target=follow)
    thread.start()
    writer = StepWriter()
    tables = [list(range(n * CONTEXT_PAGES, (n + 1) * CONTEXT_PAGES)) for n in range(BATCH)]
    waits, costs, size = [], [], 0
    for number in range(NUM_STEPS):
        slots = [
            StepSlot(sequence_id=n, start=32_000, tokens=[7], pages=tables[n], sample=True)
            for n in range(BATCH)
        ]
        begin, cpu = time.perf_counter(), time.thread_time()
        data = encode(writer.pack(slots, {}))
        send(ours, data)
        costs.append(time.thread_time() - cpu)
        size = len(data)
        while len(heard) <= number:
            time.sleep(0)
        waits.append(heard[number] - begin)
    ours.shutdown(socket.SHUT_RDWR)
    thread.join()
    for each in (ours, theirs):
        each.close()
    return size, 1e6 * statistics.median(waits), 1e6 * statistics.median(costs)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ranks", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    settings = {"device": "cpu", "max_model_len": 8192, "num_gpu_blocks_override": 512}
    print(f"{machine()}, load {load()}\n")
    size, wait_us, cost_us = broadcast()
    print(f"a step of {BATCH} sequences: {size} bytes, {wait_us:.0f} us, {cost_us:.0f} us of CPU\n")
    model = str(args.model)
    with (
        DirectEngine.open(model, num_threads=2, **settings) as one,
        DirectEngine.open(model, num_threads=1, tensor_parallel_size=2, **settings) as two,
    ):
        print("| step | one rank ms | two ranks ms | as fast |\n|---|---|---|---|")
        for name, shape in SHAPES.items():
            rounds = [
                [1e3 * engine.time_step(shape).seconds for engine in (one, two)]
                for _ in range(args.rounds)
            ]
            alone, shared = (statistics.median(times) for times in zip(*rounds, strict=True))
            print(f"| {name} | {alone:.1f} | {shared:.1f} | {alone / shared:.2f}x |")
    print(f"\nload {load()}")
    return 0
