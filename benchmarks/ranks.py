"""One engine of one process with two threads against two ranks with one each, and what a lead tells
its followers: `python -m benchmarks ranks DIR`.

Each engine is in a process of its own. They take turns, so that they meet the same load of the
machine; a round's number is the shortest of a few steps. The table shows medians of the rounds, how
often as fast as the first engine the others were in the same round (with the quartiles), and the
CPU time of all their processes. `--other DIR`: also one rank of another checkout of this project.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.servers import KEPT_HEAP, ROOT, WAIT_POLICY, load, machine
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import StepWriter, encode
from mooncake.transfer.net.blocking import receive, send

SHAPES = {
    "decode, 1 sequence at 1,024": (1, 1, 1024),
    "decode, 8 sequences at 512": (8, 1, 512),
    "prefill, 512 tokens": (1, 512, 0),
}
"""Name -> sequences, new tokens of each, tokens each has in its KV before."""
SETTINGS = {"device": "cpu", "max_model_len": 8192, "num_gpu_blocks_override": 512}
BEFORE = {"attention_backend": "reference", "moe_backend": "onednn"}
"""The products that engines had before there were ranks."""
ENGINE = """
import json, sys
try:
    from mooncake.launch.worker.direct import DirectEngine
except ImportError:
    from mooncake.launch.direct import DirectEngine
with DirectEngine.open(sys.argv[1], **json.loads(sys.argv[2])) as engine:
    print("ready", flush=True)
    for line in sys.stdin:
        print(engine.time_step(tuple(json.loads(line))).seconds, flush=True)
"""
"""A process that times the steps it is asked for; also by earlier commits."""
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


class Engine:
    """One engine in a process of its own."""

    def __init__(self, checkout: Path, model: Path, settings: Mapping[str, Any]) -> None:
        """Start it with the code of `checkout`; returns when it is ready."""
        words = [sys.executable, "-c", ENGINE, str(model), json.dumps({**SETTINGS, **settings})]
        paths = os.pathsep.join((str(checkout), str(checkout / "kernels")))
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env={**os.environ, **KEPT_HEAP, WAIT_POLICY: "PASSIVE", "PYTHONPATH": paths},
        )
        self._hear()

    def time_step(self, shape: tuple[int, int, int]) -> tuple[float, float]:
        """Return milliseconds of the shortest of some steps, and of CPU of all of them."""
        assert self._process.stdin is not None
        before = self._cpu_ms()
        self._process.stdin.write(json.dumps(shape) + "\n")
        self._process.stdin.flush()
        return 1e3 * float(self._hear()), self._cpu_ms() - before

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended; its output is above")
        return line

    def _cpu_ms(self) -> float:
        root = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
        return 1e3 * sum(each.user + each.system for each in times)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ranks", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--other", type=Path, help="another checkout, compared with one rank")
    args = parser.parse_args(argv)
    print(f"{machine()}, load {load()}\n")
    size, wait_us, cost_us = broadcast()
    print(f"a step of {BATCH} sequences: {size} bytes, {wait_us:.0f} us, {cost_us:.0f} us of CPU\n")
    asked: dict[str, tuple[Path, dict[str, Any]]]
    if args.other is None:
        two_ranks = {"num_threads": 1, "tensor_parallel_size": 2}
        asked = {"one rank": (ROOT, {"num_threads": 2}), "two ranks": (ROOT, two_ranks)}
    else:
        asked = {
            "the other checkout": (args.other.resolve(), {"num_threads": 2}),
            "here, with its products": (ROOT, {"num_threads": 2, **BEFORE}),
            "here": (ROOT, {"num_threads": 2}),
        }
    model = args.model.resolve()
    with contextlib.ExitStack() as open_:
        engines = {}
        for name, (checkout, settings) in asked.items():
            engines[name] = Engine(checkout, model, settings)
            open_.callback(engines[name].close)
        print("| step | engine | ms | as fast (quartiles) | CPU ms | of its CPU |")
        print("|---|---|---|---|---|---|")
        for title, shape in SHAPES.items():
            compare(title, shape, engines, args.rounds)
    print(f"\nload {load()}")
    return 0


def compare(
    title: str, shape: tuple[int, int, int], engines: Mapping[str, Engine], num_rounds: int
) -> None:
    """Print a row for each engine, beside the first."""
    rounds: list[dict[str, tuple[float, float]]] = []
    for number in range(num_rounds):
        names = list(engines)[:: 1 if number % 2 else -1]  # nobody is always behind the same one
        rounds.append({name: engines[name].time_step(shape) for name in names})
    first = next(iter(engines))
    for name in engines:
        wall = statistics.median(each[name][0] for each in rounds)
        cpu = statistics.median(each[name][1] for each in rounds)
        ratios = sorted(each[first][0] / each[name][0] for each in rounds)
        costs = statistics.median(each[name][1] / each[first][1] for each in rounds)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"| {title} | {name} | {wall:.1f} | {middle:.2f}x ({low:.2f} to {high:.2f}) "
            f"| {cpu:.0f} | {costs:.2f}x |"
        )
