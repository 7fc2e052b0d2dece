"""Prompts through two stages with a thread each, against one process with one thread and with two:
`python -m benchmarks pipeline DIR`.

The engines are processes of their own and take turns, so that they meet the same load of the
machine; the table shows the median of the rounds. Through two stages of half the time each go all
chunks, and the last through the second one alone: half of what one thread takes for the prompt and
for its last chunk (its time less that of the prompt without it). *bubble* is what the measured time
is over that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.support.servers import load, machine
from mooncake.base import SamplingParams
from mooncake.launch.worker.direct import DirectEngine

ENGINES: dict[str, dict[str, Any]] = {
    "one thread": {"num_threads": 1},
    "two threads": {"num_threads": 2},
    "two stages": {"num_threads": 1, "pipeline_parallel_size": 2},
}
VOCABULARY = 500
"""Words of the prompts; every model here has them."""


def serve(link: Connection, settings: dict[str, Any]) -> None:
    """Answer each prompt with the seconds to its first token, until None comes."""
    first = SamplingParams(temperature=0, max_tokens=1)
    with DirectEngine.open(**settings) as engine:
        engine.generate([[1, 2, 3] * 100], [first])
        link.send(0.0)
        while (prompt := link.recv()) is not None:
            begin = time.perf_counter()
            engine.generate([prompt], [first])
            link.send(time.perf_counter() - begin)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._link, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, settings))
        self._process.start()
        theirs.close()  # so that an end of the process is heard
        self._link.recv()

    def seconds(self, prompt: list[int]) -> float:
        self._link.send(prompt)
        return float(self._link.recv())

    def close(self) -> None:
        self._link.send(None)
        self._process.join()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pipeline", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    args = parser.parse_args(argv)
    settings = {
        "model": str(args.model), "device": "cpu", "max_model_len": max(args.tokens) + 64,
        "num_gpu_blocks_override": 2 * max(args.tokens) // 64 + 64, "max_num_seqs": 16,
        "max_num_batched_tokens": args.chunk, "enable_prefix_caching": False,
    }  # fmt: skip
    engines = {name: Engine({**settings, **own}) for name, own in ENGINES.items()}
    print(f"{machine()}, load {load()}, chunks of {args.chunk}\n")
    columns = (*ENGINES, "stages / one thread", "stages / two threads", "bubble")
    print(f"| prompt | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for length in args.tokens:
        times: dict[str, list[float]] = {name: [] for name in engines}
        last_s = []
        for number in range(args.rounds):
            draw = random.Random(number)
            prompt = [draw.randrange(VOCABULARY) for _ in range(length)]
            for name, engine in engines.items():
                times[name].append(engine.seconds(prompt))
            before = engines["one thread"].seconds(
                prompt[: (length - 1) // args.chunk * args.chunk]
            )
            last_s.append(times["one thread"][-1] - before)
        one, two, stages = (statistics.median(found) for found in times.values())
        bubble = stages / ((one + statistics.median(last_s)) / 2) - 1
        cells = [f"{seconds:.2f} s" for seconds in (one, two, stages)]
        cells += [f"{stages / one:.2f}", f"{stages / two:.2f}", f"{bubble:+.0%}"]
        print(f"| {length:,} | {' | '.join(cells)} |", flush=True)
    for engine in engines.values():
        engine.close()
    print(f"\nload {load()}")
    return 0
